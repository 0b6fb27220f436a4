"""What serving pods do with the shared log, without engines: each notes what it is given."""

from __future__ import annotations

import asyncio
import contextlib
import time
from array import array
from collections.abc import AsyncIterator, Callable
from typing import Any

from outrider_serving.suffix.shared.keys import Keys, identity_of
from outrider_serving.suffix.shared.log import SharedLog
from outrider_serving.suffix.shared.options import LogOptions
from serving.suffix.redis_server import RedisServer

IDENTITY = identity_of("tiny", "revision", "tokenizer")
KEYS = Keys("outrider:", IDENTITY)
VOCABULARY = 50_000


def text(number: int, length: int = 12) -> list[int]:
    """An output unlike that of any other number."""
    return [number % VOCABULARY, number // VOCABULARY, *range(100, 98 + length)]


class Pod:
    """A log, and what came out of it, by tenant."""

    def __init__(
        self,
        url: str | RedisServer,
        *,
        identity: str = IDENTITY,
        kept_tokens: int = 1_000_000,
        **options: Any,
    ) -> None:
        if isinstance(url, RedisServer):
            url = url.url
        self.delivered: list[tuple[str, tuple[int, ...]]] = []
        self.purged: list[str] = []
        self.written = 0
        made = LogOptions(url=url, **options)
        self.log = SharedLog(made, identity, VOCABULARY, self._take, self._purge, lambda: kept_tokens)
        self._task: asyncio.Task[None] | None = None

    def _take(
        self, tenant: str, outputs: tuple[array[int], ...], written: int, alive: Callable[[], bool]
    ) -> None:
        assert alive()
        self.written = written
        self.delivered += [(tenant, tuple(output)) for output in outputs]

    def _purge(self, tenant: str) -> None:
        self.purged.append(tenant)
        self.delivered = [(other, output) for other, output in self.delivered if other != tenant]

    def publish(self, *numbers: int, tenant: str = "a", generation: int | None = None) -> None:
        known = self.log.generation(tenant) if generation is None else generation
        for number in numbers:
            self.log.publish(tenant, text(number), known)

    def numbers(self, tenant: str = "a") -> list[int]:
        """Of the outputs that were delivered, as `text` takes them."""
        return [one[0] + VOCABULARY * one[1] for name, one in self.delivered if name == tenant]

    def remembered(self) -> list[int]:
        """Of the outputs that could be told again."""
        return [one[0] + VOCABULARY * one[1] for _, outputs, _, _ in self.log.replay() for one in outputs]

    async def start(self, *tenants: str) -> Pod:
        for tenant in tenants:
            self.log.need(tenant)
        self._task = asyncio.create_task(self.log.run())
        await asyncio.sleep(0)
        return self

    @property
    def runs(self) -> bool:
        return self._task is not None and not self._task.done()

    async def stop(self) -> None:
        if self._task is not None:
            self._task.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await self._task

    async def connected(self) -> Pod:
        await eventually(lambda: self.log.stats.connected)
        return self


@contextlib.asynccontextmanager
async def running(*pods: Pod, tenants: tuple[str, ...] = ("a",)) -> AsyncIterator[None]:
    """Pods that follow tenants and end with the block; their tasks must not have ended before."""
    for pod in pods:
        await pod.start(*tenants)
    try:
        yield
        assert all(pod.runs for pod in pods)
    finally:
        for pod in pods:
            await pod.stop()


async def eventually(holds: Callable[[], Any], seconds: float = 15.0) -> None:
    """Wait until something holds."""
    until = time.monotonic() + seconds
    while not holds():
        assert time.monotonic() < until, f"not within {seconds} s"
        await asyncio.sleep(0.01)


async def settled(pod: Pod) -> None:
    """Wait until all that a pod published is certainly written, or given up."""
    await eventually(lambda: pod.log.stats.queue_outputs == 0)


async def publish_unwaited(pod: Pod, count: int) -> None:
    """Publish so many outputs; not one turn of the event loop may go by meanwhile."""
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1

    asyncio.get_running_loop().call_soon(turn)
    for number in range(count):
        pod.publish(number)
    assert turns == 0


def stored_raws(server: RedisServer, tenant: str) -> list[bytes]:
    with server.client() as client:
        return [fields[b"r"] for _, fields in client.xrange(KEYS.log(tenant))]


def stored(server: RedisServer) -> int:
    with server.client() as client:
        return int(client.xlen(KEYS.log("a")))
