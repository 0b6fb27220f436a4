"""The shared log as the API's process uses it: own outputs go in, others' come out, whatever Redis does.

Nothing here is waited for by a request: `publish`, `generation` and `need` touch memory only. All work with
Redis is done by `run`, which no fault of Redis ends.
"""

from __future__ import annotations

import asyncio
import inspect
import logging
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack
from typing import TypeAlias

from redis.exceptions import AuthenticationError, ResponseError

from outrider_serving.suffix.shared.connection import BrokenError, connected
from outrider_serving.suffix.shared.keys import IDENTITY_RULE, Keys, is_identity
from outrider_serving.suffix.shared.line import LONGEST_BACKOFF, Line, backoff, refusal
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.suffix.shared.reading import Reader
from outrider_serving.suffix.shared.replies import NonsenseError
from outrider_serving.suffix.shared.session import work
from outrider_serving.suffix.shared.state import Outputs, Received, State
from outrider_serving.suffix.shared.stats import LogStats, Telling, Trouble
from outrider_serving.suffix.shared.writing import FLUSH_SECONDS

logger = logging.getLogger(__name__)

SERVING_COMMANDS = (
    *("eval", "time", "info", "get", "set", "expire", "pttl", "unlink", "sadd"),
    *("hget", "hset", "hscan", "hdel"),
    *("xadd", "xdel", "xlen", "xread", "xrange", "xrevrange", "xtrim"),
    *("zadd", "zrem", "zrevrange", "zremrangebyscore"),
)
"""What a pod's user must be allowed to do, with keys that begin with the prefix: `+eval ... ~outrider:*`.

They are those of Redis 6.2 and later.

Without INFO it works too, but reads all again at each connection. For a Cluster, `cluster|slots` is needed
besides; for a database other than 0, `select`.
"""

ADMIN_COMMANDS = (*SERVING_COMMANDS, "scan", "memory|usage")
"""What the user of `outrider suffix` must be allowed to do."""


Alive: TypeAlias = Callable[[], bool]
"""Whether text was not purged meanwhile."""

Deliver: TypeAlias = Callable[[str, Outputs, int, Alive], Awaitable[object] | None]


class SharedLog:
    """The shared log of one model; for one event loop.

    Each finished output is delivered to every other process that follows its tenant, once; not to the one
    that published it. A purged tenant's text is neither written nor delivered from then on: by this process
    within a second where it is connected, otherwise before it shares anything again.
    """

    def __init__(
        self,
        options: LogOptions,
        identity: str,
        vocab_size: int,
        deliver: Deliver,
        on_purge: Callable[[str], None],
        kept_tokens: Callable[[], int],
    ) -> None:
        """Take what is to be called; nothing is connected before `run`.

        Args:
            options: Where Redis is, and what to keep.
            identity: Of model and tokenizer: `keys.identity_of`.
            vocab_size: Token ids lie in [0, vocab_size).
            deliver: Is given a tenant, int32 outputs of other processes, and when the oldest of them was
                written, in seconds since the epoch by Redis' clock; and what tells whether they were not
                purged meanwhile, to be asked before each part of what takes long. Where it returns an
                awaitable, that is awaited before more is read, so it can push back. The outputs of a call
                must not take effect after a later `on_purge`.
            on_purge: Is given a tenant all of whose shared text is void now, perhaps more than once.
            kept_tokens: How many the receiver can keep of a tenant; see `Reader`.
        """
        if not is_identity(identity):
            raise ValueError(f"identity: {identity!r} must be {IDENTITY_RULE}")
        self._keys = Keys(options.prefix, identity)
        self._deliver = deliver
        self._on_purge = on_purge
        self._kept_tokens = kept_tokens
        self._vocab_size = vocab_size
        self._state = State(options, vocab_size, self._purged)
        self._telling = Telling(logger)
        self._unconnected = Trouble()
        self._put = asyncio.Event()
        self._needed = asyncio.Event()
        self._warm = asyncio.Event()
        self._delivering: asyncio.Future[None] | None = None

    def publish(self, tenant: str, tokens: Sequence[int], generation: int) -> None:
        """Share a finished output; never waits, never raises.

        `generation` is what `generation(tenant)` was when the request came, so that what a purge overtakes
        is not stored. Outputs of fewer than 4 tokens are not worth it.
        """
        self._state.publish(tenant, tokens, generation)
        self._put.set()

    def generation(self, tenant: str) -> int:
        """The last purge of a tenant that this process knows; 0 if none."""
        return self._state.generation(tenant)

    def need(self, tenant: str) -> None:
        """Follow a tenant from now on: its first use. What is stored comes within BLOCK_SECONDS."""
        if self._state.need(tenant):
            self._needed.set()

    async def warmed(self, seconds: float) -> bool:
        """Wait until those that wrote last are read, at most so many seconds; whether they are."""
        try:
            async with asyncio.timeout(seconds):
                await self._warm.wait()
        except TimeoutError:
            return False
        return True

    async def flushed(self, seconds: float) -> bool:
        """Wait, before an end, until all that was published is written, at most so long; whether it is."""
        until = time.monotonic() + seconds
        while self.stats.queue_outputs:
            if time.monotonic() > until:
                return False
            await asyncio.sleep(FLUSH_SECONDS / 4)
        return True

    def replay(self) -> Iterator[tuple[str, Outputs, int, Alive]]:
        """What is remembered, own and others', for a receiver that has lost it; as `deliver` is given it."""
        for tenant, outputs, written in self._state.replay():
            yield tenant, outputs, written, self._alive(tenant)

    def _alive(self, tenant: str) -> Alive:
        """Of text that is alive now."""
        generation = self.generation(tenant)
        return lambda: self.generation(tenant) == generation

    @property
    def stats(self) -> LogStats:
        """As it is now."""
        return self._state.stats

    @property
    def trouble(self) -> str | None:
        """Why nothing, or nothing from here, is shared: a word and what was said, the same while it lasts."""
        return self._unconnected.words or self._state.unwritten.words

    async def run(self) -> None:
        """Write, read and connect again, until cancelled."""
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="suffix-log")
        attempt = 0
        try:
            while True:
                began = time.monotonic()
                try:
                    await self._connect(thread)
                except Exception as error:
                    if time.monotonic() - began > LONGEST_BACKOFF:
                        # What worked for a while was no part of the same trouble.
                        attempt = 0
                        self._telling.forget()
                    self._failed(error)
                finally:
                    self._state.connected = False
                attempt += 1
                await asyncio.sleep(backoff(attempt))
        finally:
            thread.shutdown(wait=False)
            if self._delivering is not None:
                self._delivering.cancel()

    async def _connect(self, thread: ThreadPoolExecutor) -> None:
        options, key = self._state.options, self._keys.tenants
        async with AsyncExitStack() as stack:
            lines = [
                Line(self._state, self._keys, link, thread, self._telling)
                for link in [await stack.enter_async_context(connected(options, key)) for _ in range(2)]
            ]
            reader = Reader(lines[1], self._vocab_size, self._delivered, self._idle, self._kept_tokens)
            self._put.set()  # something may wait since the last one
            await work(
                lines[0],
                reader,
                put=self._put,
                needed=self._needed,
                warm=self._warm,
                connected=self._connected,
                well=self._unconnected.end,
            )

    def _connected(self) -> None:
        # Trouble may last all the same: that ends with the first reading.
        self._state.connected = True
        self._state.counts.connections += 1
        self._telling.good("the shared log is connected")

    def _failed(self, error: Exception) -> None:
        while isinstance(error, ExceptionGroup):
            error = error.exceptions[0]
        kind = kind_of(error)
        self._state.counts.faults[kind] += 1
        self._unconnected.begin(kind, error)
        self._telling.fault("the shared log is not connected", kind, error)

    async def _delivered(self, tenant: str, received: Received) -> None:
        """Deliver; it goes on where the connection ends meanwhile: what was read is not read again."""
        alive = self._alive(tenant)  # before anything else may run
        self._delivering = asyncio.ensure_future(self._hand_over(tenant, received, alive))
        await self._idle()

    async def _idle(self) -> None:
        """Wait until all that was read is delivered."""
        if self._delivering is not None:
            await asyncio.shield(self._delivering)

    async def _hand_over(self, tenant: str, received: Received, alive: Alive) -> None:
        for outputs, written in received:
            if not alive():
                break
            try:
                waiting = self._deliver(tenant, outputs, written, alive)
                if inspect.isawaitable(waiting):
                    await waiting
            except Exception as error:
                self._state.counts.skipped["failed"] += 1
                self._telling.fault("outputs of the shared log could not be delivered", kind_of(error), error)

    def _purged(self, tenant: str) -> None:
        try:
            self._on_purge(tenant)
        except Exception as error:
            self._telling.fault("a purge of the shared log could not be applied", kind_of(error), error)


def kind_of(error: Exception) -> str:
    """A word on what failed, of a bounded set."""
    match error:
        case TimeoutError():
            return "timeout"
        case AuthenticationError():
            return "auth"
        case ResponseError():
            return refusal(error).lower() or "refused"
        case NonsenseError():
            return "nonsense"
        case BrokenError() | OSError():
            return "connection"
        case _:
            # redis-py's, and what it raises about bytes that it does not understand.
            return type(error).__name__.removesuffix("Error").lower()
