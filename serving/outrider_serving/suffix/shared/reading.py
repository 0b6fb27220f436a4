"""Reads the streams that are followed, and fills a Redis again that has lost what it held."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.cursor import Cursor, Read, format_id, judge, share
from outrider_serving.suffix.shared.keys import spell
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.state import Outputs

BLOCK_SECONDS = 0.5
"""How long a read waits for something new; a tenant that is needed meanwhile waits as long."""

READ_ENTRIES = 32
"""Read at a time, of all streams together."""


class Reader:
    """Of one session; its line is its own, since reads wait on it."""

    def __init__(
        self,
        line: Line,
        vocab_size: int,
        deliver: Callable[[str, Outputs, int], Awaitable[None]],
        idle: Callable[[], Awaitable[None]],
    ) -> None:
        """Deliver what is read through a line; `idle` waits for what an earlier session delivers still."""
        self._line = line
        self._vocab_size = vocab_size
        self._deliver = deliver
        self._idle = idle

    async def run(self, hottest: list[str], needed: asyncio.Event, warm: asyncio.Event) -> None:
        """Read on for ever, and fill up what was lost; the `hottest` first, after which `warm` is set.

        `needed` is set when another tenant is to be followed.
        """
        state = self._line.state
        hottest.reverse()
        await self._idle()
        while True:
            followed = [cursor for cursor in state.followed.values() if not cursor.broken]
            behind = next((cursor for cursor in followed if not cursor.caught_up), None)
            if behind is not None:
                await self._read([behind], block=False)
            elif hottest and state.counts.received_tokens < state.options.warm_tokens:
                state.need(hottest.pop())
                continue
            else:
                warm.set()
                if state.refill_due:
                    await self._refill()
            live = [cursor for cursor in followed if cursor.caught_up]
            if live:
                await self._read(live, block=behind is None)
            elif behind is None:
                needed.clear()
                await _wait(needed, BLOCK_SECONDS)
            if behind is None and all(cursor.caught_up for cursor in followed):
                state.caught_up_at = time.monotonic()

    async def _read(self, cursors: list[Cursor], *, block: bool) -> None:
        """Read on in some streams; where nothing is there and `block`, wait for it."""
        laps = {self._line.keys.log(cursor.tenant).encode(): (cursor, cursor.lap) for cursor in cursors}
        count = share(cursors, READ_ENTRIES)
        waiting = ("BLOCK", int(1000 * BLOCK_SECONDS)) if block else ()
        places = [format_id(cursor.position) for cursor in cursors]
        try:
            answer = await self._line.link.call(
                "XREAD", "COUNT", count, *waiting, "STREAMS", *laps, *places, wait=BLOCK_SECONDS
            )
        except ResponseError as error:
            if "WRONGTYPE" not in str(error):
                raise
            await self._read_apart(cursors)
            return
        found = replies.streams(answer)
        for key, (cursor, lap) in laps.items():
            entries = found.get(key, [])
            read = await self._line.in_thread(judge, entries, self._vocab_size) if entries else []
            # What was read of a stream that was purged meanwhile, or is to be read again, is void.
            if cursor.lap == lap:
                await self._take(cursor, read)
                cursor.caught_up = cursor.caught_up or (len(entries) < count and cursor.lap == lap)

    async def _take(self, cursor: Cursor, read: list[Read]) -> None:
        lap = cursor.lap
        for outputs, written in self._line.state.receive(cursor, read):
            if cursor.lap == lap:  # else it was purged while the ones before were delivered
                await self._deliver(cursor.tenant, outputs, written)

    async def _read_apart(self, cursors: list[Cursor]) -> None:
        """Find out which key holds something else than a stream, and leave that one alone."""
        if len(cursors) == 1:
            cursors[0].broken = True
            self._line.state.counts.skipped["key"] += 1
            return
        for cursor in cursors:
            await self._read([cursor], block=False)

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
