"""Keys that want attention: each handled by one worker at a time, however often it is asked for.

A key that is asked for while it is being handled is handled once more afterwards; the handler says when it
wants to see the key again by itself, and an error brings it back with growing delays.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Awaitable, Callable

logger = logging.getLogger(__name__)

Key = tuple[str, str]
"""Namespace and name."""

Handler = Callable[[str, str], Awaitable[float | None]]
"""Handles a key; seconds until it wants it again, or None to forget it."""


Report = Callable[[float, float, bool], None]
"""Told when a key was handled: seconds that it waited, seconds that it took, whether it failed."""


class WorkQueue:
    """A queue of keys, for one event loop."""

    def __init__(
        self,
        handler: Handler,
        *,
        report: Report | None = None,
        first_delay: float = 1.0,
        longest_delay: float = 60.0,
    ) -> None:
        self._handler = handler
        self._report = report
        self._first_delay = first_delay
        self._longest_delay = longest_delay
        self._ready: asyncio.Queue[Key] = asyncio.Queue()
        self._waiting: dict[Key, float] = {}
        self._running: set[Key] = set()
        self._timers: dict[Key, asyncio.TimerHandle] = {}
        self._failures: dict[Key, int] = {}

    def add(self, namespace: str, name: str) -> None:
        """Ask for a key to be handled soon."""
        key = (namespace, name)
        self._cancel_timer(key)
        if key not in self._waiting:
            self._waiting[key] = time.monotonic()
            if key not in self._running:
                self._ready.put_nowait(key)

    @property
    def depth(self) -> int:
        """How many keys wait."""
        return len(self._waiting)

    async def run(self, workers: int) -> None:
        """Handle keys until cancelled."""
        async with asyncio.TaskGroup() as group:
            for _ in range(workers):
                group.create_task(self._work())

    async def _work(self) -> None:
        while True:
            key = await self._ready.get()
            began = time.monotonic()
            waited = began - self._waiting.pop(key)
            self._running.add(key)
            try:
                delay = await self._handle(key)
            finally:
                self._running.discard(key)
            if self._report is not None:
                self._report(waited, time.monotonic() - began, key in self._failures)
            if key in self._waiting:
                self._ready.put_nowait(key)
            elif delay is not None:
                self._timers[key] = asyncio.get_running_loop().call_later(delay, self.add, *key)

    async def _handle(self, key: Key) -> float | None:
        try:
            delay: float | None = await self._handler(*key)
        except Exception as error:
            failures = self._failures[key] = self._failures.get(key, 0) + 1
            wait: float = min(self._longest_delay, self._first_delay * 2 ** min(failures - 1, 16))
            logger.error("%s/%s: %s; again in %.0f s", *key, error, wait, exc_info=not _is_expected(error))
            return wait
        self._failures.pop(key, None)
        return delay

    def _cancel_timer(self, key: Key) -> None:
        timer = self._timers.pop(key, None)
        if timer is not None:
            timer.cancel()


def _is_expected(error: Exception) -> bool:
    """Whether the message says it all: the API server's own errors need no trace."""
    return hasattr(error, "status")
