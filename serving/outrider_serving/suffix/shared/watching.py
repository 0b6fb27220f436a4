"""Watches what must be known before anything is shared (tombstones, epoch), and removes what is too old."""

from __future__ import annotations

import asyncio
import random
import secrets

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.cursor import format_id
from outrider_serving.suffix.shared.keys import spell
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.state import Epoch

LOOK_SECONDS = 1.0
"""Between two looks at tombstones and epoch."""

TRIM_SECONDS = 60.0
"""Between two removals of what is too old, about."""

LOOKED_AT = 32
"""Streams whose extent one look asks for; of more, others the next time."""


TRIMMED = 1024
"""Streams that one pod trims at a time."""


class Watch:
    """Of one session."""

    def __init__(self, line: Line) -> None:
        """Ask through a line."""
        self._line = line
        self._looks = 0
        self._run = ""

    async def look(self) -> None:
        """Learn what must be known, and put back what this Redis should know."""
        state, keys = self._line.state, self._line.keys
        run = await self._run_id()
        cursors = [*state.followed.values()]
        start = self._looks * LOOKED_AT % max(1, len(cursors))
        self._looks += 1
        some = (cursors[start:] + cursors[:start])[:LOOKED_AT]
        asked = [(cursor, cursor.position, cursor.lap) for cursor in some]
        logs = [keys.log(cursor.tenant) for cursor, _, _ in asked]
        answer = await self._line.eval(scripts.LOOK, [keys.tombstones, keys.epoch, *logs])
        looked = replies.looked(answer, len(logs))
        state.set_clock(looked.now)
        missing = state.learn(looked.tombstones)
        for (cursor, position, lap), extent in zip(asked, looked.extents, strict=True):
            cursor.looked_at(extent.length, extent.first, extent.last, position=position, lap=lap)
        if missing:
            await self._bury(missing)
        state.enter(Epoch(looked.epoch or await self._set_epoch(), run))

    async def _run_id(self) -> str:
        """What tells runs of a server apart; where that is forbidden, a word of this connection's own.

        With that, each connection is another epoch, and all is read again after each: more work, no harm.
        """
        if not self._run.startswith("connection "):
            try:
                self._run = replies.run_id(await self._line.link.call("INFO", "server"))
            except ResponseError:
                self._run = ""
        self._run = self._run or f"connection {secrets.token_hex(8)}"
        return self._run

    async def _set_epoch(self) -> str:
        """The epoch that this or another process gives a Redis without one; empty where it takes none."""
        key, seconds = self._line.keys.epoch, max(3600, self._line.retention)
        try:
            await self._line.link.call("SET", key, secrets.token_hex(16), "NX", "EX", seconds)
            return replies.text(await self._line.link.call("GET", key) or b"").decode("ascii", "replace")[:64]
        except ResponseError as error:
            self._line.refused("the shared log's epoch cannot be set", error)
            return ""

    async def _bury(self, tombstones: dict[str, int]) -> None:
        keys = self._line.keys
        names = [keys.tombstones, keys.tenants, *(keys.log(tenant) for tenant in tombstones)]
        pairs = [part for tenant, known in tombstones.items() for part in (spell(tenant), known)]
        try:
            await self._line.eval(scripts.BURY, names, [self._line.retention, *pairs])
        except ResponseError as error:
            # This process' own knowledge keeps the dead text from being delivered or written here.
            self._line.refused("tombstones cannot be put back into the shared log", error)

    async def keep_looking(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def trim(self) -> None:
        """Remove what is too old, for ever."""
        keys, retention = self._line.keys, self._line.retention
        while True:
            # Not all pods at the same time, and soon after what may be a restart.
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(TRIM_SECONDS, retention))
            names = replies.tenants(await self._line.link.call("ZREVRANGE", keys.tenants, 0, -1))
            # Other pods trim others; what nobody writes to expires by itself.
            names = random.sample(names, min(len(names), TRIMMED))
            for at in range(0, max(1, len(names)), LOOKED_AT):
                logs = [keys.log(tenant) for tenant in names[at : at + LOOKED_AT]]
                try:
                    await self._line.eval(
                        scripts.TRIM, [keys.tombstones, keys.tenants, keys.epoch, *logs], [retention]
                    )
                except ResponseError as error:
                    self._line.refused("the shared log cannot be trimmed", error)
            await self._remove_overdue()

    async def _remove_overdue(self) -> None:
        """Remove what was written, or written again, long after it was finished."""
        state = self._line.state
        for cursor in list(state.followed.values()):
            due = cursor.overdue(state.oldest())
            for at in range(0, len(due), 1000):
                ids = map(format_id, due[at : at + 1000])
                try:
                    await self._line.link.call("XDEL", self._line.keys.log(cursor.tenant), *ids)
                except ResponseError as error:
                    self._line.refused("the shared log cannot be trimmed", error)
