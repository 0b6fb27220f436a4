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

Contents = tuple[tuple[str, bytes | None], ...]
"""Names and contents of the files of a key directory, sorted by name; None for a file that cannot be read."""


class KeysError(ValueError):
    """A tenant's file that cannot be taken as it is; the message never names a key."""


def read_directory(directory: Path) -> Contents:
    """The tenants' files of a directory; OSError if it cannot be read.

    A mounted Secret is a link farm over `..data`, which moves at once when the Secret changes: reading
    behind that link never mixes two versions.
    """
    resolved = (directory / "..data" if (directory / "..data").exists() else directory).resolve(strict=True)
    files = sorted(path for path in resolved.iterdir() if not path.name.startswith(".") and path.is_file())
    return tuple((path.name, _content(path)) for path in files)


def _content(path: Path) -> bytes | None:
    try:
        return path.read_bytes()
    except OSError:
        return None


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


def parse(contents: Contents, earlier: KeyRing = NO_KEYS) -> tuple[KeyRing, list[str]]:
    """The key ring in a directory's files, and what is wrong with them.

    Tenants are judged one by one, so that nobody's mistake keeps another's revoked key valid. A tenant whose
    file cannot be taken stays with the keys that it has in `earlier`. A key that several tenants claim is
    valid for the one that has it in `earlier`, if one does, and otherwise for none: nobody is admitted as
    another. What is wrong names file and line, never a key.

    Blank lines and spaces around a key are ignored; there are no comments, since a key may hold any
    visible ASCII character.
    """
    wrong: list[str] = []
    claims: dict[bytes, dict[str, str]] = {}
    for tenant, content in contents:
        try:
            places = {digest: f"{tenant!r}, line {number}" for digest, number in _digests(content).items()}
        except KeysError as error:
            wrong.append(f"{tenant!r}: {error}; its earlier keys stay in force")
            places = {digest: repr(tenant) for digest, owner in earlier.digests.items() if owner == tenant}
        for digest, place in places.items():
            claims.setdefault(digest, {})[tenant] = place
    digests: dict[bytes, str] = {}
    for digest, claimants in claims.items():
        owner, *others = claimants
        if others:
            owner = earlier.digests.get(digest, "")
            valid = f"only for {owner!r}, who had it before" if owner in claimants else "for none of them"
            wrong.append(f"{' and '.join(claimants.values())} have the same key; it is valid {valid}")
        if owner in claimants:
            digests[digest] = owner
    return KeyRing(digests), wrong


def _digests(content: bytes | None) -> dict[bytes, int]:
    """Line by digest of the keys in a file; KeysError if one is malformed."""
    if content is None:
        raise KeysError("the file cannot be read")
    found: dict[bytes, int] = {}
    for number, line in enumerate(content.splitlines(), start=1):
        raw = line.strip()
        if not all(0x21 <= byte <= 0x7E for byte in raw):
            raise KeysError(f"line {number}: a key must be visible ASCII without spaces")
        if raw:
            found.setdefault(_digest(raw.decode("ascii")), number)
    return found


def _digest(key: str) -> bytes:
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()
