"""One thread for work that must not hold the event loop: the smallest first, so many waiting at most."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from itertools import count
from queue import PriorityQueue
from typing import Any, TypeVar

from outrider_serving.engine.types import QueueFullError

Result = TypeVar("Result")


class Turns:
    """Calls wait for one thread, and the smallest of those that wait has the next turn."""

    def __init__(self, name: str, max_waiting: int) -> None:
        """Name the thread; `max_waiting` calls may wait while another one is worked on."""
        self._max_waiting = max_waiting
        self._present = 0
        self._numbers = count()
        self._order: PriorityQueue[tuple[int, int]] = PriorityQueue()
        self._calls: dict[int, tuple[Future[Any], Callable[[], Any]]] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix=name)

    async def run(self, size: int, work: Callable[..., Result], *arguments: Any) -> Result:
        """What `work` returns, or raises; `size` is any measure of how long it takes.

        Raises:
            QueueFullError: too many wait.
        """
        if self._present > self._max_waiting:
            raise QueueFullError(self._present - 1, self._max_waiting)
        number, future = next(self._numbers), Future[Result]()
        self._calls[number] = future, partial(work, *arguments)
        self._order.put((size, number))
        self._thread.submit(self._next)
        self._present += 1
        try:
            return await asyncio.wrap_future(future)
        finally:
            self._present -= 1
            # One that nobody waits for any more is not held until its turn comes.
            self._calls.pop(number, None)

    def close(self) -> None:
        """End the thread; calls that still wait are cancelled."""
        for future, _ in list(self._calls.values()):
            future.cancel()
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _next(self) -> None:
        _, number = self._order.get_nowait()
        call = self._calls.pop(number, None)
        if call is not None:
            _fulfil(*call)


def _fulfil(future: Future[Result], work: Callable[[], Result]) -> None:
    if not future.set_running_or_notify_cancel():
        return
    try:
        future.set_result(work())
    except BaseException as error:
        future.set_exception(error)
