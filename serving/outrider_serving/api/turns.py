"""One thread for work that must not hold the event loop, shared fairly by tenants."""

from __future__ import annotations

import asyncio
import time
from bisect import insort
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from itertools import count
from typing import Any, TypeVar

from outrider_serving.engine.schedule.fairness import Served, check_room

Result = TypeVar("Result")

_EACH = 100
"""Microseconds that every call costs beside its own: what handing it to the thread and back takes."""


@dataclass(slots=True, eq=False)
class _Call:
    tenant: str
    size: int
    number: int
    work: Callable[[], Any]
    outcome: asyncio.Future[Any]
    took: int = 0
    """Microseconds in the thread, once it has ended."""

    def __call__(self) -> Any:
        began = time.perf_counter_ns()
        try:
            return self.work()
        finally:
            self.took = (time.perf_counter_ns() - began) // 1000


class Turns:
    """Calls wait for one thread. Belongs to the event loop.

    The next turn is that of the tenant whose calls have taken the thread for the least time so far, by the
    clock: no caller can tell it beforehand. Of its calls the smallest goes first, and of those of one size
    the one that came first. None may have more places in the waiting room than it leaves to others.
    """

    def __init__(self, name: str, max_waiting: int) -> None:
        """Name the thread; `max_waiting` calls may wait while another one is worked on."""
        self._max_waiting = max_waiting
        self._lines: dict[str, list[_Call]] = {}  # of each tenant that waits, the smallest call first
        self._working: _Call | None = None
        self._served = Served()
        self._numbers = count()
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, tenant: str, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """What `work` returns, or raises.

        Args:
            tenant: who is charged the time that it takes.
            size: an estimate of that time, in any unit that all calls of these turns share.
            work: called in the thread.
            *arguments: of `work`.

        Raises:
            QueueFullError: too many wait, altogether or of this tenant.
        """
        self._check_room(tenant)
        outcome: asyncio.Future[Result] = asyncio.get_running_loop().create_future()
        call = _Call(tenant, size, next(self._numbers), partial(work, *arguments), outcome)
        self._served.begin(tenant, self._active())
        insort(self._lines.setdefault(tenant, []), call, key=lambda other: (other.size, other.number))
        self._go_on()
        try:
            return await outcome
        finally:
            # One that nobody waits for any more is not held until its turn comes.
            if call in self._lines.get(tenant, ()):
                self._leave(call)

    def close(self) -> None:
        """End the thread; calls that still wait are cancelled."""
        lines, self._lines = self._lines, {}
        for line in lines.values():
            for call in line:
                call.outcome.cancel()
        self._thread.shutdown(wait=False)

    def _check_room(self, tenant: str) -> None:
        if self._working is None:
            return
        check_room(
            tenant,
            self._max_waiting,
            own=len(self._lines.get(tenant, ())),
            waiting=sum(map(len, self._lines.values())),
            others=bool(self._active() - {tenant}),
        )

    def _active(self) -> set[str]:
        return {*self._lines, *([self._working.tenant] if self._working else [])}

    def _go_on(self) -> None:
        """Give the thread to the next call, if it is free."""
        if self._working is not None or not self._lines:
            return
        firsts = [(self._served[tenant], line[0].number, line[0]) for tenant, line in self._lines.items()]
        call = self._working = min(firsts)[2]
        self._take(call)
        done = asyncio.get_running_loop().run_in_executor(self._thread, call)
        done.add_done_callback(partial(self._ended, call))

    def _ended(self, call: _Call, done: asyncio.Future[Any]) -> None:
        self._served.charge(call.tenant, _EACH + call.took)
        self._working = None
        self._served.end(call.tenant, self._active())
        self._go_on()
        error = done.exception()
        if call.outcome.done():  # nobody waits for it any more
            return
        if error is not None:
            call.outcome.set_exception(error)
        else:
            call.outcome.set_result(done.result())

    def _leave(self, call: _Call) -> None:
        self._take(call)
        self._served.end(call.tenant, self._active())

    def _take(self, call: _Call) -> None:
        line = self._lines[call.tenant]
        line.remove(call)
        if not line:
            del self._lines[call.tenant]
