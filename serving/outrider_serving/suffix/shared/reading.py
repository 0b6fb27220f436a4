"""Reads the streams that are followed, and fills a Redis again that has lost what it held."""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Awaitable, Callable, Sequence

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import backlog, replies, scripts
from outrider_serving.suffix.shared.cursor import Cursor, Read, format_id, judge, share
from outrider_serving.suffix.shared.keys import spell
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.replies import Entry
from outrider_serving.suffix.shared.state import Received
from outrider_serving.suffix.shared.wire import TooLargeError

BLOCK_SECONDS = 0.5
"""How long a read waits for something new; a tenant that is needed meanwhile waits as long."""

READ_ENTRIES = 32
"""Read at a time, of all streams together."""

_NEWS = 2
"""Read at a time of each stream; one that has as many is behind."""

_HELPING_SECONDS = 0.1
"""How long one stream is helped that is behind, before news have their turn, and then another stream."""


class Reader:
    """Of one session; its line is its own, since reads wait on it.

    Streams that were read to their end are read together, and waited for. Those that are behind get helpings
    between, in turn, so that nobody's news wait for what somebody else wrote long ago.
    """

    def __init__(
        self,
        line: Line,
        vocab_size: int,
        deliver: Callable[[str, Received], Awaitable[None]],
        idle: Callable[[], Awaitable[None]],
        kept_tokens: Callable[[], int],
    ) -> None:
        """Deliver what is read through a line.

        Args:
            line: nothing else uses it.
            vocab_size: token ids lie in [0, vocab_size).
            deliver: is given a tenant, and what was read of it. It delivers it whatever becomes of the one
                who awaits it, but for what is purged meanwhile.
            idle: waits for what an earlier session delivers still.
            kept_tokens: how many the receiver can keep: what is older is not read of a stream that is new
                here.
        """
        self._line = line
        self._vocab_size = vocab_size
        self._deliver = deliver
        self._idle = idle
        self._kept_tokens = kept_tokens

    async def run(
        self, hottest: list[str], needed: asyncio.Event, warm: asyncio.Event, well: Callable[[], None]
    ) -> None:
        """Read on for ever, and fill up what was lost; the `hottest` first, after which `warm` is set.

        `needed` is set when another tenant is to be followed. `well` is called after each turn that worked.
        """
        state = self._line.state
        hottest.reverse()
        await self._idle()
        while True:
            followed = [cursor for cursor in state.followed.values() if not cursor.broken]
            late = [cursor for cursor in followed if not cursor.live]
            if late:
                await self._help(min(late, key=lambda cursor: cursor.helped_at))
            if all(cursor.caught_up or cursor.broken for cursor in followed):
                if hottest and state.counts.received_tokens < state.options.warm_tokens:
                    state.need(hottest.pop())
                    continue
                warm.set()
                if state.refill_due:
                    await self._refill()
            live = [cursor for cursor in followed if cursor.live]
            if live:
                await self._read_news(live, block=not late)
            elif not late:
                needed.clear()
                await _wait(needed, BLOCK_SECONDS)
            ends = [cursor.ended_at for cursor in followed]
            if None not in ends:
                state.caught_up_at = min(filter(None, ends), default=time.monotonic())
            well()

    async def _read_news(self, cursors: list[Cursor], *, block: bool) -> None:
        """Read on in streams that were read to their end; where nothing is there and `block`, wait for it."""
        laps = {self._line.keys.log(cursor.tenant).encode(): (cursor, cursor.lap) for cursor in cursors}
        count = min(_NEWS, share(cursors, READ_ENTRIES))
        waiting = ("BLOCK", int(1000 * BLOCK_SECONDS)) if block else ()
        places = [format_id(cursor.position) for cursor in cursors]
        try:
            answer = await self._line.link.call(
                "XREAD", "COUNT", count, *waiting, "STREAMS", *laps, *places, wait=BLOCK_SECONDS
            )
        except (ResponseError, TooLargeError) as error:
            if isinstance(error, ResponseError) and "WRONGTYPE" not in str(error):
                raise
            # One of them has something else than it should. They are read apart, which finds out which.
            for cursor in cursors:
                cursor.live = False
            if isinstance(error, TooLargeError):
                raise  # of the connection, nothing more can be understood
            return
        at = time.monotonic()
        found = replies.streams(answer)
        for key, (cursor, lap) in laps.items():
            entries = found.get(key, [])
            await self._take(cursor, lap, entries)
            if cursor.lap == lap:
                cursor.live = len(entries) < _NEWS
                if len(entries) < count:
                    cursor.ended_at = at

    async def _help(self, cursor: Cursor) -> None:
        """Read on, for a little while, in a stream that is behind."""
        cursor.helped_at, lap = time.monotonic(), cursor.lap
        try:
            if not cursor.begun:
                await backlog.begin(self._line, cursor, self._kept_tokens())
            count = cursor.helping
            entries = await backlog.following(self._line, cursor, count)
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            cursor.broken, cursor.live = True, False
            self._line.state.counts.skipped["key"] += 1
            return
        at = time.monotonic()
        taken = await self._take(cursor, lap, entries, until=at + _HELPING_SECONDS)
        if taken < len(entries):
            cursor.helping = max(1, taken)
        elif taken == count:
            cursor.helping = min(READ_ENTRIES, 2 * count)
        elif cursor.lap == lap:
            cursor.live = cursor.caught_up = True
            cursor.ended_at = at

    async def _take(self, cursor: Cursor, lap: int, entries: Sequence[Entry], until: float = math.inf) -> int:
        """Deliver entries until a time (monotonic), those of one portion at least; how many.

        What was read of a stream that was purged meanwhile, or is to be read again, is void.
        """
        read: list[Read] = []
        if entries:
            read = await self._line.in_thread(judge, entries, self._vocab_size)
        taken = 0
        for portion in backlog.portions(read):
            if cursor.lap != lap or (taken and time.monotonic() > until):
                break
            taken += len(portion)
            # All at once: none of it is new another time.
            if received := self._line.state.receive(cursor, portion):
                await self._deliver(cursor.tenant, received)
        return taken

    # Refilling a Redis that has lost what it held.

    async def _refill(self) -> None:
        state, keys = self._line.state, self._line.keys
        lost = state.lost()
        for tenant in dict.fromkeys(record.tenant for _, record in lost):
            records = [pair for pair in lost if pair[1].tenant == tenant]
            names = [keys.tombstones, keys.log(tenant), keys.tenants, keys.refilled]
            for at in range(0, len(records), READ_ENTRIES):
                some = records[at : at + READ_ENTRIES]
                parts = [part for number, one in some for part in (str(number), one.generation, one.raw)]
                about = (spell(tenant), state.options.entries, self._line.retention)
                try:
                    answer = await self._line.eval(scripts.REFILL, names, [*about, *parts])
                except ResponseError as error:
                    # It stays due; the next read comes first, so that nothing turns in a circle without rest.
                    self._line.refused("the shared log cannot be refilled", error)
                    return
                state.refilled(some, replies.number(answer))
        state.refill_due = False


async def _wait(event: asyncio.Event, seconds: float) -> None:
    try:
        async with asyncio.timeout(seconds):
            await event.wait()
    except TimeoutError:
        pass
