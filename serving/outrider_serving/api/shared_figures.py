"""How the instruments of the shared log are read."""

from __future__ import annotations

from collections.abc import Callable

from outrider_serving.suffix.shared.stats import LogStats
from outrider_serving.telemetry import Reading

Stats = Callable[[], LogStats | None]
"""Of the shared log; None where there is none."""

_READ: dict[str, Callable[[LogStats], Reading]] = {
    "connected": lambda stats: stats.connected,
    "fresh": lambda stats: stats.fresh_seconds,
    "lag": lambda stats: stats.lag_entries,
    "tenants": lambda stats: stats.tenants,
    "queue": lambda stats: stats.queue_tokens,
    "published": lambda stats: stats.published_tokens,
    "received": lambda stats: stats.received_tokens,
    "duplicates": lambda stats: stats.duplicates,
    "gaps": lambda stats: stats.gaps,
    "purges": lambda stats: stats.purges,
    "reconnects": lambda stats: stats.reconnects,
    "refilled": lambda stats: stats.refilled_records,
    "dropped": lambda stats: stats.dropped,
    "skipped": lambda stats: stats.skipped,
    "faults": lambda stats: stats.faults,
}


def shared_readers(stats: Stats) -> dict[str, Callable[[], Reading]]:
    """A reader for each `outrider.shared.*`; they tell nothing where nothing is shared."""
    return {f"outrider.shared.{name}": _reader(stats, read) for name, read in _READ.items()}


def _reader(stats: Stats, read: Callable[[LogStats], Reading]) -> Callable[[], Reading]:
    def reader() -> Reading:
        found = stats()
        return None if found is None else read(found)

    return reader
