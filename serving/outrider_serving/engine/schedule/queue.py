"""The waiting room: bounded, and fair between tenants."""

from __future__ import annotations

import math
from bisect import insort
from collections import Counter, deque
from collections.abc import Callable, Iterator
from itertools import zip_longest

from outrider_serving.engine.schedule.fairness import Served, share_of
from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.types import QueueFullError

PROMPT_WEIGHT, OUTPUT_WEIGHT = 1, 2
"""What a token costs a tenant (the weights of the paper's evaluation): output is the dearer part."""

RETRY_SECONDS = (1, 60)
"""Least and most that a refused request is asked to wait."""

_ENDS = 32
"""How many of the latest ends tell the rate at which requests end."""


class FairQueue:
    """Waiting sequences, and what each tenant was served.

    A tenant is active while one of its sequences waits or runs: from `put` until `ended` or `remove`.
    """

    def __init__(self, limit: int) -> None:
        """Let so many sequences wait beyond those that will find a place at once."""
        self._limit = limit
        self._lines: dict[str, list[Sequence]] = {}  # of each tenant that waits, by order
        self._running: Counter[str] = Counter()
        self._served = Served()
        self._ends: deque[float] = deque(maxlen=_ENDS)

    def __len__(self) -> int:
        return sum(map(len, self._lines.values()))

    def __iter__(self) -> Iterator[Sequence]:
        """All that wait, about as they will go: the first of each tenant, then the second ones."""
        lines = [self._lines[tenant] for tenant in sorted(self._lines, key=self._served.__getitem__)]
        for abreast in zip_longest(*lines):
            yield from filter(None, abreast)

    def put(self, sequence: Sequence, places: int, now: float) -> None:
        """Let a new sequence wait.

        There is room for `limit` sequences beyond those that take a free place in the next step, and each
        tenant may have its share of it (`share_of`). Preempted sequences count, but are never refused: with
        `put_back`, what waits and runs together stays below `limit` plus all places.

        Args:
            sequence: with an order above all earlier ones.
            places: how many more sequences could run at once.
            now: for the estimate of when to come again; same clock as in `ended`.

        Raises:
            QueueFullError: there is no room, or no more room for this tenant.
        """
        tenant, waiting, room = sequence.request.tenant, len(self), self._limit + places
        own = len(self._lines.get(tenant, ()))
        share = share_of(tenant, room, waiting, others=bool(self._active() - {tenant}))
        if waiting >= room:
            raise QueueFullError(waiting - places, self._limit, self._retry_after(now))
        if waiting >= places and own >= share:
            raise QueueFullError(own, share, self._retry_after(now))
        self._served.begin(tenant, self._active())
        self._enqueue(sequence)

    def put_back(self, sequence: Sequence) -> None:
        """Let a sequence that ran wait again, in its old order."""
        self._enqueue(sequence)
        self._stop(sequence.request.tenant)

    def head(self, held_back: Callable[[Sequence], bool]) -> Sequence | None:
        """Who goes next: the first of the tenant with the least counter; of equal tenants the first to come.

        Args:
            held_back: says who is passed over for now, though it keeps its turn.
        """
        firsts = []
        for tenant, line in self._lines.items():
            first = next((sequence for sequence in line if not held_back(sequence)), None)
            if first is not None:
                firsts.append((self._served[tenant], first.order, first))
        return min(firsts)[2] if firsts else None

    def take(self, sequence: Sequence) -> None:
        """Take out a sequence that begins to run."""
        self._dequeue(sequence)
        self._running[sequence.request.tenant] += 1

    def remove(self, sequence: Sequence) -> None:
        """Take out a sequence that will not run any more."""
        self._dequeue(sequence)
        self._served.end(sequence.request.tenant, self._active())

    def ended(self, sequence: Sequence, now: float) -> None:
        """Take note that a sequence that ran has ended; `now` is in seconds.

        The rate of ends is that of the present spell in which somebody waits: idle times say nothing.
        """
        if self._lines:
            self._ends.append(now)
        else:
            self._ends.clear()
        self._stop(sequence.request.tenant)
        self._served.end(sequence.request.tenant, self._active())

    def charge(self, tenant: str, *, prompt: int = 0, output: int = 0) -> None:
        """Add tokens to what an active tenant was served."""
        self._served.charge(tenant, PROMPT_WEIGHT * prompt + OUTPUT_WEIGHT * output)

    def _active(self) -> set[str]:
        return {*self._lines, *self._running}

    def _stop(self, tenant: str) -> None:
        self._running[tenant] -= 1
        if not self._running[tenant]:
            del self._running[tenant]

    def _enqueue(self, sequence: Sequence) -> None:
        line = self._lines.setdefault(sequence.request.tenant, [])
        insort(line, sequence, key=lambda other: other.order)

    def _dequeue(self, sequence: Sequence) -> None:
        line = self._lines[sequence.request.tenant]
        line.remove(sequence)
        if not line:
            del self._lines[sequence.request.tenant]

    def _retry_after(self, now: float) -> int:
        """Seconds until as many requests have ended as wait now, at the latest rate; the least if unknown."""
        least, most = RETRY_SECONDS
        if len(self._ends) < 2:
            return least
        seconds = len(self) * (now - self._ends[0]) / (len(self._ends) - 1)
        return max(least, min(most, math.ceil(seconds)))
