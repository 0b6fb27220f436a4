"""Lets tokens come at an even pace, whatever was proposed and accepted.

Who watches the wire sees how many tokens come in a chunk, and when: where much was accepted, the text was
seen before, in the request itself or in what its tenant has stored. Where each token has a chunk of its own,
and the pace is no faster than the model's without speculation, neither sizes nor times tell it.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import TypeVar

Item = TypeVar("Item")


class Metronome:
    """Says when the next token may come: at least so many seconds after the one before."""

    def __init__(self, seconds: float) -> None:
        """The first one may come at once."""
        self._seconds = seconds
        self._due = 0.0

    async def beat(self) -> None:
        """Wait until it may."""
        loop = asyncio.get_running_loop()
        await asyncio.sleep(self._due - loop.time())
        self._due = max(self._due, loop.time()) + self._seconds


async def read_ahead(items: AsyncGenerator[Item, None]) -> AsyncGenerator[Item, None]:
    """The items, taken as they come and kept for who reads slowly; to end it early closes the iterator.

    Raises:
        Exception: what the iterator raised, after what it gave before.
    """
    taken: asyncio.Queue[Item | None] = asyncio.Queue()
    taking = asyncio.create_task(_take(items, taken))
    try:
        while (item := await taken.get()) is not None:
            yield item
        await taking
    finally:
        taking.cancel()
        await asyncio.wait((taking,))


async def _take(items: AsyncGenerator[Item, None], taken: asyncio.Queue[Item | None]) -> None:
    try:
        async with aclosing(items):
            async for item in items:
                taken.put_nowait(item)
    finally:
        taken.put_nowait(None)
