"""Writes what was published: in batches, until each is certainly in Redis or certainly void."""

from __future__ import annotations

import asyncio
import random

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.keys import spell
from outrider_serving.suffix.shared.line import ELSEWHERE, Line, backoff
from outrider_serving.suffix.shared.outbox import Batch, Group

FLUSH_SECONDS = 0.1
"""How long outputs are gathered into records."""


ELSEWHERE_SECONDS = 1.0
"""At most so long, a connection is kept for reading although what is written belongs elsewhere."""


class Writer:
    """Of one session."""

    def __init__(self, line: Line) -> None:
        """Write through a line."""
        self._line = line

    async def run(self, put: asyncio.Event) -> None:
        """Write for ever, when `put` is set."""
        state, attempt = self._line.state, 0
        while True:
            await put.wait()
            put.clear()
            await asyncio.sleep(FLUSH_SECONDS)
            while (batch := state.next_batch()) is not None or state.take():
                if batch is None:
                    state.made(await self._line.in_thread(_compressed, state.groups()))
                elif await self._write_batch(batch):
                    attempt = 0
                else:
                    attempt += 1
                    await asyncio.sleep(backoff(attempt))

    async def _write_batch(self, batch: Batch) -> bool:
        """Write a batch; False where that is to be tried again on this connection."""
        state, keys = self._line.state, self._line.keys
        names = [keys.tombstones, keys.log(batch.tenant), keys.tenants, keys.epoch]
        about = (spell(batch.tenant), batch.generation, state.options.entries, self._line.retention)
        try:
            answer = await self._line.eval(
                scripts.PUBLISH, names, [*about, *(one.raw for one in batch.records)]
            )
        except ResponseError as error:
            code = self._line.refused("the shared log refuses to be written", error)
            state.unwritten.begin(code.lower() or "refused", error)
            if not code:
                state.drop(batch, "refused")
                return True
            if code in ELSEWHERE:
                # What can be read here is read meanwhile.
                await asyncio.sleep(random.uniform(0, ELSEWHERE_SECONDS))
                raise
            return False
        count, tombstone = replies.written(answer)
        if tombstone:
            state.learn({batch.tenant: tombstone})
            state.drop(batch, "purged")
        elif count == len(batch.records):
            state.settled(batch)
        else:
            raise replies.NonsenseError(f"{count} of {len(batch.records)} records were written")
        return True


def _compressed(groups: list[Group]) -> list[Group]:
    for group in groups:
        group.compress()
    return groups
