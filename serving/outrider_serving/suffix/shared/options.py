"""What the shared log is told: where Redis is, how to get in, what to keep. No password is among it."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from urllib.parse import SplitResult, urlsplit

from outrider_serving.suffix.shared import keys

MAX_BYTES = 16 * 1024
"""Of a record; entries of a stream times this bounds the stream."""

PREFIX = "outrider:"
WARM_SECONDS = 5.0
RETENTION_SECONDS = 7 * 24 * 3600
RETENTION_BYTES = 64 << 20
"""Defaults."""

LONGEST_RETENTION = 365 * 24 * 3600
"""Seconds; no resource may ask for more."""

FORMS = (
    "redis://host:port/db, redis-sentinel://host:port,host:port/service/db or redis-cluster://host:port,"
    "host:port; rediss instead of redis for TLS"
)
"""Of a URL."""

_PORTS = {"": 6379, "-sentinel": 26379, "-cluster": 6379}


class InputError(Exception):
    """Bad input; the message names the flag, what came and what is allowed."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a server listens."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Place:
    """What a URL means."""

    kind: str
    """"" for one server, "-sentinel" or "-cluster"."""
    tls: bool
    addresses: tuple[Address, ...]
    service: str
    """What the Sentinels call the master."""
    database: int


def parse_url(url: str) -> Place:
    """What a URL of FORMS means; ValueError, which never repeats a password, where it is none."""
    if "@" in url:
        raise ValueError(
            "it holds a user or a password, which everybody could read in the list of processes; they belong"
            " into files `username` and `password` of a directory (a mounted Secret)"
        )
    try:
        parts = urlsplit(url)
    except ValueError as error:
        raise ValueError(f"it is not a URL; allowed are {FORMS}") from error
    scheme = parts.scheme.partition("-")
    kind = "".join(scheme[1:])
    if scheme[0] not in ("redis", "rediss") or kind not in _PORTS:
        raise ValueError(f"{url!r} is none of {FORMS}")
    if parts.query or parts.fragment:
        # A query may hold a password: it is not repeated.
        raise ValueError(f"nothing may follow its path; allowed are {FORMS}")
    addresses = tuple(_address(part, _PORTS[kind], url) for part in parts.netloc.split(","))
    if kind == "" and len(addresses) > 1:
        raise ValueError(f"{url!r} names several servers; allowed are {FORMS}")
    service, database = _path(parts, kind, url)
    return Place(kind, scheme[0] == "rediss", addresses, service, database)


def _address(text: str, port: int, url: str) -> Address:
    try:
        parts = urlsplit(f"//{text}")
        host, port = parts.hostname or "", port if parts.port is None else parts.port
    except ValueError as error:
        raise ValueError(f"{url!r} must have a port of 1 to 65535 after each host") from error
    if not host or not port:
        raise ValueError(f"{url!r} must have hosts and ports above 0; allowed are {FORMS}")
    return Address(host, port)


def _path(parts: SplitResult, kind: str, url: str) -> tuple[str, int]:
    words = [word for word in parts.path.split("/") if word]
    service = words.pop(0) if kind == "-sentinel" and words else ""
    if kind == "-sentinel" and not service:
        raise ValueError(f"{url!r} must name the service that the Sentinels watch; allowed are {FORMS}")
    database = words.pop(0) if words else "0"
    if words or not (database.isascii() and database.isdecimal()) or (kind == "-cluster" and int(database)):
        raise ValueError(f"{url!r} must end with the number of a database (a Cluster has only 0), or nothing")
    return service, int(database)


@dataclass(frozen=True, slots=True)
class LogOptions:
    """Options of the shared log; ValueError names the field, what came and what is allowed."""

    url: str
    auth: Path | None = None
    """A directory with the files `password` and, but for the default user, `username`; for Sentinels that
    ask for one, `sentinel-password` and `sentinel-username`. Read at each connection."""
    ca: Path | None = None
    """Certificates (PEM) that may sign the servers', besides those that the system trusts."""
    prefix: str = PREFIX
    retention_seconds: int = RETENTION_SECONDS
    """How long an output is kept after it was finished."""
    retention_bytes: int = RETENTION_BYTES
    """Of a tenant, in Redis, before its own overhead."""
    warm_tenants: int = 16
    """How many of those that wrote last are read at start."""
    warm_tokens: int = 4_000_000
    """After as many tokens, no further tenant is read at start."""
    queue_bytes: int = 8 << 20
    """Of what waits to be written."""
    memory_bytes: int = 32 << 20
    """Of records that could be written again to a Redis that lost them."""

    def __post_init__(self) -> None:
        """Check everything but the files, which may come later."""
        try:
            place = self.place
        except ValueError as error:
            raise ValueError(f"url: {error}") from error
        if self.ca is not None and not place.tls:
            raise ValueError(
                "ca: certificates are for a URL of TLS: rediss://, rediss-sentinel:// or rediss-cluster:// "
                f"(it is redis{place.kind}://)"
            )
        if not keys.is_prefix(self.prefix):
            raise ValueError(f"prefix: {self.prefix!r} must be {keys.PREFIX_RULE}")
        for name, least in (
            ("retention_seconds", 1),
            ("retention_bytes", MAX_BYTES),
            ("warm_tenants", 0),
            ("warm_tokens", 0),
            ("queue_bytes", MAX_BYTES),
            ("memory_bytes", 0),
        ):
            value = getattr(self, name)
            if value < least:
                raise ValueError(f"{name}: {value} must be at least {least}")
        if self.retention_seconds > LONGEST_RETENTION:
            raise ValueError(
                f"retention_seconds: {self.retention_seconds} must be at most {LONGEST_RETENTION}"
            )

    @property
    def place(self) -> Place:
        """Where Redis is."""
        return parse_url(self.url)

    @property
    def entries(self) -> int:
        """How many entries a stream holds: none is larger than a record may be."""
        return self.retention_bytes // MAX_BYTES
