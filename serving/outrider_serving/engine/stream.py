"""Hands chunks from the engine's thread to a consumer in an asyncio loop."""

from __future__ import annotations

import asyncio

from outrider_serving.engine.types import Chunk, EngineError


class Stream:
    """A `Sink` whose other end is read in the event loop in which it was made."""

    def __init__(self) -> None:
        """Must run in the consumer's event loop."""
        self.cancelled = False
        self._loop = asyncio.get_running_loop()
        self._items: asyncio.Queue[Chunk | EngineError] = asyncio.Queue()

    def put(self, chunk: Chunk) -> None:
        """Called by the engine: the next chunk."""
        self._send(chunk)

    def fail(self, error: EngineError) -> None:
        """Called by the engine: there will be no more chunks."""
        self._send(error)

    async def get(self) -> Chunk:
        """The next chunk.

        Raises:
            EngineError: the request failed.
        """
        item = await self._items.get()
        if isinstance(item, EngineError):
            raise item
        return item

    def cancel(self) -> None:
        """Called by the consumer, which will read no more: the engine drops the request at its next step."""
        self.cancelled = True

    def _send(self, item: Chunk | EngineError) -> None:
        try:
            self._loop.call_soon_threadsafe(self._items.put_nowait, item)
        except RuntimeError:  # the loop is closed, so nobody reads any more
            self.cancelled = True
