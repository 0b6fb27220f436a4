"""Names in Redis: which keys a model's shared log has, and how tenants are spelled in them.

All keys of a model hold its identity as the hash tag, so that a Cluster keeps them in one slot, where one
script and one XREAD may use several of them.
"""

from __future__ import annotations

import hashlib
import json
import re
from dataclasses import dataclass

SINGLE = ""
"""The tenant of a server that has only one."""

_SPELLED_SINGLE = "=single"  # no tenant's name may hold "="
_TENANT = re.compile(r"[-._A-Za-z0-9]{1,253}\Z")
_IDENTITY = re.compile(r"[0-9a-f]{32}\Z")
_PREFIX = re.compile(r"[-._:A-Za-z0-9]{1,128}\Z")
_OF_MODEL = re.compile(r"([-._:A-Za-z0-9]{1,128})\{([0-9a-f]{32})\}:(?:epoch|tenants|tombstones)\Z")

RETENTION = "=retention"
"""Beside the tombstones: for how many seconds pods keep text."""

TENANT_RULE = "1 to 253 of A-Z, a-z, 0-9, '-', '.' and '_'; or empty, for the server that has one tenant"
IDENTITY_RULE = "32 hexadecimal digits"
PREFIX_RULE = "1 to 128 of A-Z, a-z, 0-9, '-', '.', '_' and ':'"


def identity_of(*parts: str) -> str:
    """What outputs must have in common to be shared, such as the model's revision and its tokenizer's hash.

    The first 32 hexadecimal digits of sha256 over the parts as a JSON list, so that no two lists run into
    one text.
    """
    return hashlib.sha256(json.dumps(parts).encode()).hexdigest()[:32]


def is_tenant(name: str) -> bool:
    """Whether a tenant may be called so: TENANT_RULE."""
    return name == SINGLE or _TENANT.match(name) is not None


def is_identity(text: str) -> bool:
    """Whether this may be an identity: IDENTITY_RULE."""
    return _IDENTITY.match(text) is not None


def is_prefix(text: str) -> bool:
    """Whether keys may begin so: PREFIX_RULE, none of which is special in a pattern of keys."""
    return _PREFIX.match(text) is not None


def spell(tenant: str) -> str:
    """A tenant as Redis sees it."""
    return tenant or _SPELLED_SINGLE


def read(spelled: bytes) -> str | None:
    """The tenant that is spelled so; None where none is."""
    text = spelled.decode("ascii", "replace")
    if text == _SPELLED_SINGLE:
        return SINGLE
    return text if text and is_tenant(text) else None


@dataclass(frozen=True, slots=True)
class Keys:
    """The keys of one model's log."""

    prefix: str
    identity: str

    def _key(self, rest: str) -> str:
        return f"{self.prefix}{{{self.identity}}}:{rest}"

    @property
    def tenants(self) -> str:
        """A sorted set of the tenants that have a stream, by the time of its last write (ms of Redis)."""
        return self._key("tenants")

    @property
    def tombstones(self) -> str:
        """A hash from tenant to the id of its last purge; with what `scripts` has about it, after "="."""
        return self._key("tombstones")

    @property
    def epoch(self) -> str:
        """A random text: another one means that this Redis has lost what it held."""
        return self._key("epoch")

    @property
    def refilled(self) -> str:
        """A set of the records that were written again after such a loss; it expires."""
        return self._key("refilled")

    @property
    def logs(self) -> str:
        """What SCAN matches to find the streams of all tenants."""
        return self._key("log:*")

    def log(self, tenant: str) -> str:
        """The stream of a tenant's records."""
        return self._key(f"log:{spell(tenant)}")

    def tenant_of(self, log: bytes) -> str | None:
        """The tenant whose stream has this key; None where none has."""
        beginning = self._key("log:").encode()
        return read(log[len(beginning) :]) if log.startswith(beginning) else None


def pattern(prefix: str) -> str:
    """What SCAN matches to find the keys that each model has, under all prefixes that begin with this one."""
    return f"{prefix}*{{{'?' * 32}}}:[et]*"


def model_in(key: bytes) -> tuple[str, str] | None:
    """Prefix and identity in such a key; None where there are none."""
    found = _OF_MODEL.match(key.decode("ascii", "replace"))
    return None if found is None else (found[1], found[2])
