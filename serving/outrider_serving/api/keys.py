"""API keys: which tenant a presented key belongs to.

A directory holds one file a tenant, as a mounted Secret does; the file's lines are the tenant's keys.
Keys are kept as digests only, and every one is compared at every request, so that the time taken tells
nothing about them.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

Contents = tuple[tuple[str, bytes], ...]
"""Names and contents of the files of a key directory, sorted by name."""


class KeysError(ValueError):
    """A set of keys that cannot be taken as it is; the message names file and line, never a key."""


def read_directory(directory: Path) -> Contents:
    """The tenants' files of a directory; OSError if it cannot be read.

    A mounted Secret is a link farm over `..data`, which moves at once when the Secret changes: reading
    behind that link never mixes two versions.
    """
    resolved = (directory / "..data" if (directory / "..data").exists() else directory).resolve(strict=True)
    files = sorted(path for path in resolved.iterdir() if not path.name.startswith(".") and path.is_file())
    return tuple((path.name, path.read_bytes()) for path in files)


@dataclass(frozen=True, slots=True)
class KeyRing:
    """The keys in force."""

    digests: Mapping[bytes, str]
    """Tenant by sha256 of the key."""

    def tenant_of(self, key: str) -> str | None:
        """The tenant whose key this is, or None; takes the same time for any key of that length."""
        presented = _digest(key)
        found: str | None = None
        for digest, tenant in self.digests.items():
            if hmac.compare_digest(digest, presented):
                found = tenant
        return found

    @property
    def tenants(self) -> list[str]:
        """Names of the tenants that have a key."""
        return sorted(set(self.digests.values()))


NO_KEYS = KeyRing({})
"""Refuses everybody."""


def parse(contents: Contents) -> KeyRing:
    """The key ring in a directory's files; KeysError if a key is malformed or belongs to two tenants.

    Blank lines and spaces around a key are ignored; there are no comments, since a key may hold any
    visible ASCII character.
    """
    digests: dict[bytes, str] = {}
    for tenant, content in contents:
        for number, line in enumerate(content.splitlines(), start=1):
            raw = line.strip()
            if not raw:
                continue
            if not all(0x21 <= byte <= 0x7E for byte in raw):
                raise KeysError(f"{tenant}, line {number}: a key must be visible ASCII without spaces")
            digest = _digest(raw.decode("ascii"))
            if digests.setdefault(digest, tenant) != tenant:
                raise KeysError(f"{tenant}, line {number}: this key belongs to {digests[digest]} too")
    return KeyRing(digests)


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
