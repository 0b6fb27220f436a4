"""What the shared log counts, and how it tells of faults without filling anybody's disk."""

from __future__ import annotations

import logging
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass, field

from outrider_serving import logs

TROUBLE_SECONDS = 5.0
"""What heals sooner is not called trouble."""


@dataclass(frozen=True, slots=True)
class LogStats:
    """The shared log as it is now; counts are since the process began."""

    connected: bool
    fresh_seconds: float | None
    """Since all that is followed was read to its end; None if it never was."""
    lag_entries: int
    """Known to be in the streams that are followed, and not read yet."""
    tenants: int
    """Streams that are followed."""
    queue_outputs: int
    queue_tokens: int
    queue_bytes: int
    memory_records: int
    memory_bytes: int
    published_records: int
    published_tokens: int
    received_records: int
    """Read and taken, those of other processes only; what became of them at the receiver is not in it."""
    received_tokens: int
    duplicates: int
    """Records that were read again, or were this process' own."""
    dropped: Mapping[str, int]
    """Outputs that were not written, by reason: full, short, tokens, tenant, purged, expired, refused."""
    skipped: Mapping[str, int]
    """Records that were not delivered, by reason: foreign, version, checksum, length, tokens, purged,
    expired, key (something else has a stream's key), failed (the receiver raised)."""
    gaps: int
    """Records that never came although earlier and later ones of their writers did: trimmed or lost before
    they were read. Of a tenant that was purged they are not counted any more."""
    purges: int
    """Tombstones that were news."""
    reconnects: int
    """Connections after the first."""
    epochs: int
    """Times at which the server was another one, had started again, or had lost what it held."""
    refilled_records: int
    """Written again by this process to a Redis that had lost them."""
    faults: Mapping[str, int]
    """Connections that failed, and writes that were refused, by a word on why."""


@dataclass(slots=True)
class Counts:
    """What is counted while the log runs; names as in LogStats."""

    published_records: int = 0
    published_tokens: int = 0
    received_records: int = 0
    received_tokens: int = 0
    duplicates: int = 0
    gaps: int = 0
    """Of tenants that are followed no more."""
    purges: int = 0
    connections: int = 0
    epochs: int = 0
    refilled_records: int = 0
    dropped: Counter[str] = field(default_factory=Counter)
    skipped: Counter[str] = field(default_factory=Counter)
    faults: Counter[str] = field(default_factory=Counter)


class Trouble:
    """Something that is wrong now, in words that stay the same while its kind does."""

    def __init__(self) -> None:
        self._kind = self._said = ""
        self._since = 0.0

    def begin(self, kind: str, error: BaseException) -> None:
        """It is wrong, or still so."""
        if not self._kind:
            self._since = time.monotonic()
        if kind != self._kind:
            self._kind = kind
            self._said = " ".join(str(error).split())[:200] or "there was no answer"

    def end(self) -> None:
        """It is well."""
        self._kind = ""

    @property
    def words(self) -> str | None:
        """Its kind and what was said; None where it is well, or has been wrong for a moment only."""
        lasts = self._kind and time.monotonic() - self._since >= TROUBLE_SECONDS
        return f"{self._kind}: {self._said}" if lasts else None


class Telling:
    """Logs the first of each kind of event, then the second, the fourth and so on."""

    def __init__(self, logger: logging.Logger) -> None:
        """Log to `logger`."""
        self._logger = logger
        self._times: Counter[str] = Counter()

    def fault(self, message: str, kind: str, error: BaseException) -> None:
        """A fault of a kind; what the error says is cut, since a server may say anything."""
        said = f"{type(error).__name__}: {error}"[:200]
        self._tell(message, logging.WARNING, f"{message}: {kind}", kind=kind, error=said)

    def good(self, message: str) -> None:
        """Something that is well again."""
        self._tell(message, logging.INFO, message)

    def forget(self) -> None:
        """What comes from now on is news again."""
        self._times.clear()

    def _tell(self, message: str, level: int, event: str, **fields: str) -> None:
        self._times[event] += 1
        times = self._times[event]
        if times & (times - 1) == 0:
            logs.event(self._logger, message, level, **fields, times=times)
