"""One connection's life: look at the world, then write, read and trim until something breaks.

Raises whatever broke; `log.py` makes the next one. Nothing that is not certainly written is lost with it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from outrider_serving.suffix.shared import replies
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.reading import Reader
from outrider_serving.suffix.shared.watching import Watch
from outrider_serving.suffix.shared.writing import Writer


async def work(
    line: Line,
    reader: Reader,
    *,
    put: asyncio.Event,
    needed: asyncio.Event,
    warm: asyncio.Event,
    connected: Callable[[], None],
    well: Callable[[], None],
) -> None:
    """Work until something breaks.

    Args:
        line: For all but reading.
        reader: Has a line of its own.
        put: Is set when there is something to write.
        needed: Is set when another tenant is to be followed.
        warm: Is set here once the hottest tenants have been read.
        connected: Is called before anything is shared.
        well: Is called once reading has worked too, and whenever it has again.
    """
    state, watch = line.state, Watch(line)
    await watch.look()
    for cursor in state.followed.values():
        cursor.broken = False
    hottest: list[str] = []
    count = state.options.warm_tenants
    if count and not warm.is_set():
        hottest = replies.tenants(await line.link.call("ZREVRANGE", line.keys.tenants, 0, count - 1))
    connected()
    async with asyncio.TaskGroup() as tasks:
        tasks.create_task(reader.run(hottest, needed, warm, well))
        tasks.create_task(Writer(line).run(put))
        tasks.create_task(watch.keep_looking())
        tasks.create_task(watch.trim())
