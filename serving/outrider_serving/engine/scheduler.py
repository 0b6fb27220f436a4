"""Decides who waits, who runs, and what each running request does in the next step."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from outrider_serving.engine.sequence import Sequence
from outrider_serving.engine.types import EngineClosedError, QueueFullError

PREFILL_TOKENS = 256
"""Most prompt tokens that one step reads, over all requests: what a long prompt may delay the others by."""


@dataclass(frozen=True, slots=True)
class Work:
    """What one request does in a step.

    Attributes:
        sequence: the request.
        tokens: how many of its pending tokens are run.
        verifies: these are all its pending tokens, so the step ends with a committed token.
    """

    sequence: Sequence
    tokens: int
    verifies: bool


class Scheduler:
    """First come, first served into `max_running` places.

    Every running request that has read its prompt takes part in every step. `submit`, `close`, `waiting` and
    `running` may be called from any thread; the rest belongs to the step loop.
    """

    def __init__(self, *, max_waiting: int, max_running: int) -> None:
        """Take the limits of the queue and of the batch."""
        self._max_waiting = max_waiting
        self._max_running = max_running
        self._waiting: deque[Sequence] = deque()
        self._running: list[Sequence] = []
        self._closed = False
        self._changed = threading.Condition()

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return len(self._waiting)

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return len(self._running)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The requests that have begun and not ended."""
        return tuple(self._running)

    def submit(self, sequence: Sequence) -> None:
        """Queue a request.

        Requests take their places only when the next step begins, so those that have one by then do not
        count as waiting here.

        Raises:
            QueueFullError: all places are taken, and `max_waiting` requests wait already.
            EngineClosedError: after `close`.
        """
        with self._changed:
            if self._closed:
                raise EngineClosedError("the engine is shutting down")
            free = self._max_running - len(self._running)
            if len(self._waiting) - free >= self._max_waiting:
                raise QueueFullError(len(self._waiting) - free, self._max_waiting)
            self._waiting.append(sequence)
            self._changed.notify()

    def close(self) -> None:
        """Take no more requests."""
        with self._changed:
            self._closed = True
            self._changed.notify()

    def wait(self) -> bool:
        """Block until there is work; False when there is none and never will be."""
        with self._changed:
            self._changed.wait_for(lambda: self._waiting or self._running or self._closed)
            return bool(self._waiting or self._running)

    def admit(self) -> list[Sequence]:
        """Let waiting requests run while there is room; return those that begin."""
        admitted = []
        with self._changed:
            while self._waiting and len(self._running) < self._max_running:
                admitted.append(self._waiting.popleft())
                self._running.append(admitted[-1])
        return admitted

    def schedule(self) -> list[Work]:
        """The next step: all requests that decode, and the earliest prompts as far as the budget goes."""
        work, budget = [], PREFILL_TOKENS
        for sequence in self._running:
            if sequence.pending == 1:
                work.append(Work(sequence, 1, verifies=True))
            elif budget > 0:
                tokens = min(sequence.pending, budget)
                budget -= tokens
                work.append(Work(sequence, tokens, verifies=tokens == sequence.pending))
        return work

    def remove(self, sequences: Iterable[Sequence]) -> None:
        """Take out running requests that have ended."""
        ended = {id(sequence) for sequence in sequences}
        with self._changed:
            self._running = [sequence for sequence in self._running if id(sequence) not in ended]

    def take_cancelled(self) -> list[Sequence]:
        """Take out the requests, waiting or running, that nobody waits for; return those that had begun."""
        with self._changed:
            self._waiting = deque(sequence for sequence in self._waiting if not sequence.sink.cancelled)
            cancelled = [sequence for sequence in self._running if sequence.sink.cancelled]
            self._running = [sequence for sequence in self._running if not sequence.sink.cancelled]
        return cancelled

    def take_all(self) -> list[Sequence]:
        """Take out every request, running ones first."""
        with self._changed:
            taken = [*self._running, *self._waiting]
            self._running, self._waiting = [], deque()
        return taken
