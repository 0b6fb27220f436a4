"""When the tokens of one request came: TTFT, TPOT and the longest gap, from marks on a monotonic clock."""

from __future__ import annotations


class Pace:
    """Marks of one request's writes or commits; those of several choices need not come in order."""

    def __init__(self, received: float) -> None:
        self._received = received
        self._first: float | None = None
        self._last: float | None = None
        self._max_gap: float | None = None

    def mark(self, now: float) -> None:
        """New tokens were written, or committed, at `now`."""
        if self._first is None or self._last is None:
            self._first = self._last = now
            return
        self._max_gap = max(self._max_gap or 0.0, now - self._last)
        self._first, self._last = min(self._first, now), max(self._last, now)

    @property
    def ttft(self) -> float | None:
        """From receipt to the earliest mark."""
        return None if self._first is None else self._first - self._received

    @property
    def max_gap(self) -> float | None:
        """The longest time by which a mark was later than all before it; None with fewer than two."""
        return self._max_gap

    def tpot(self, tokens: float) -> float | None:
        """(last - first) / (tokens - 1); None with fewer than two tokens, the mean of several choices'."""
        if self._first is None or self._last is None or tokens < 2:
            return None
        return (self._last - self._first) / (tokens - 1)
