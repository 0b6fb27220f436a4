"""Watches what must be known before anything is shared (tombstones, epoch), and removes what is too old."""

from __future__ import annotations

import asyncio
import random
import secrets
from collections.abc import Iterator

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.cursor import format_id
from outrider_serving.suffix.shared.keys import spell
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.state import Epoch
from outrider_serving.suffix.shared.tombstones import new_version, tombstones

LOOK_SECONDS = 1.0
"""Between two looks at tombstones and epoch."""

TRIM_SECONDS = 60.0
"""Between two removals of what is too old, about."""

LOOKED_AT = 32
"""Streams whose extent one look asks for; of more, others the next time."""


TRIMMED = 1024
"""Streams that a pod trims at a time; of more, others the next time. What nobody writes to expires anyway."""

_BURIED = 500
"""Tombstones that one script writes or removes."""


class Watch:
    """Of one session."""

    def __init__(self, line: Line) -> None:
        """Ask through a line."""
        self._line = line
        self._looks = 0
        self._run = ""
        self._version = b""  # of the tombstones that were read last
        self._trimmed = 0  # how many streams of this round

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
        if not looked.version or looked.version != self._version:
            complete = await self._read_tombstones()
            # What came meanwhile has another one.
            self._version = looked.version if complete else b""
        for (cursor, position, lap), extent in zip(asked, looked.extents, strict=True):
            cursor.looked_at(extent.length, extent.first, extent.last, position=position, lap=lap)
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

    async def _read_tombstones(self) -> bool:
        """Learn of purges, and put back what this Redis has lost of them; whether it has all now."""
        state, keys, found = self._line.state, self._line.keys, dict[str, int]()
        async for some in tombstones(self._line.link, keys):
            state.learn(some)
            found |= some
        for part in _parts(state.lacking(found)):
            names = [keys.tombstones, keys.tenants, *(keys.log(tenant) for tenant, _ in part)]
            about = [self._line.retention, new_version(), *_flat(part)]
            try:
                await self._line.eval(scripts.BURY, names, about)
            except ResponseError as error:
                # This process' own knowledge keeps the dead text from being delivered or written here.
                self._line.refused("tombstones cannot be put back into the shared log", error)
                return False
        return True

    async def keep_looking(self) -> None:
        """Look for ever."""
        while True:
            await asyncio.sleep(LOOK_SECONDS)
            await self.look()

    async def trim(self) -> None:
        """Remove what is too old, for ever."""
        state = self._line.state
        while True:
            kept = await self._keep()
            # Not all pods at the same time, and soon after what may be a restart.
            await asyncio.sleep(random.uniform(0.5, 1.0) * min(TRIM_SECONDS, self._line.retention))
            state.memory.outlive(state.oldest())
            await self._trim_logs()
            if kept is not None:
                await self._forget_tombstones(state.now() - 1000 * kept)
            await self._remove_overdue()

    async def _keep(self) -> int | None:
        """Say how long text is kept here; for how many seconds tombstones are, None where that is refused."""
        keys = self._line.keys
        try:
            answer = await self._line.eval(
                scripts.KEEP, [keys.tombstones, keys.epoch], [self._line.retention]
            )
        except ResponseError as error:
            self._line.refused("the shared log cannot be told how long text is kept", error)
            return None
        return replies.number(answer)

    async def _trim_logs(self) -> None:
        keys = self._line.keys
        first, last = self._trimmed, self._trimmed + TRIMMED - 1
        answer = replies.items(await self._line.link.call("ZREVRANGE", keys.tenants, first, last))
        self._trimmed = 0 if len(answer) < TRIMMED else last + 1
        names = replies.tenants(answer)
        for at in range(0, len(names), LOOKED_AT):
            logs = [keys.log(tenant) for tenant in names[at : at + LOOKED_AT]]
            try:
                await self._line.eval(scripts.TRIM, [keys.tenants, *logs], [self._line.retention])
            except ResponseError as error:
                self._line.refused("the shared log cannot be trimmed", error)

    async def _forget_tombstones(self, oldest: int) -> None:
        """Remove those from before `oldest` (ms). The look that follows tells all pods."""
        known = self._line.state.tombstones
        for part in _parts({tenant: one for tenant, one in known.items() if one < oldest}):
            try:
                about = [new_version(), *_flat(part)]
                await self._line.eval(scripts.FORGET, [self._line.keys.tombstones], about)
            except ResponseError as error:
                self._line.refused("the shared log cannot be trimmed", error)

    async def _remove_overdue(self) -> None:
        """Remove what was written, or written again, long after it was finished."""
        state = self._line.state
        for cursor in list(state.followed.values()):
            due = cursor.overdue(state.oldest())
            for at in range(0, len(due), 1000):
                some = due[at : at + 1000]
                try:
                    await self._line.link.call(
                        "XDEL", self._line.keys.log(cursor.tenant), *map(format_id, some)
                    )
                except ResponseError as error:
                    self._line.refused("the shared log cannot be trimmed", error)
                else:
                    cursor.removed(some)


def _parts(pairs: dict[str, int]) -> Iterator[list[tuple[str, int]]]:
    listed = list(pairs.items())
    for at in range(0, len(listed), _BURIED):
        yield listed[at : at + _BURIED]


def _flat(pairs: list[tuple[str, int]]) -> list[str | int]:
    """Tenants as Redis sees them, each before its tombstone."""
    return [part for tenant, known in pairs for part in (spell(tenant), known)]
