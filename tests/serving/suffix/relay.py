"""What stands between a pod and Redis in faults that a server cannot be made to show by itself."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Awaitable, Callable

Change = Callable[[bytes], Awaitable[bytes]]
Serve = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]


class Relay:
    """Passes connections on to a port of 127.0.0.1, which may change; or to none."""

    def __init__(self, target: int) -> None:
        self.target: int | None = target
        self.port = 0
        self.connections = 0
        self.change: Change | None = None
        """What becomes of the server's answers."""
        self._open: set[asyncio.StreamWriter] = set()

    @property
    def url(self) -> str:
        return f"redis://127.0.0.1:{self.port}/0"

    def to(self, target: int | None) -> None:
        """Cut all connections; further ones go there, or nowhere."""
        self.target = target
        for writer in self._open:
            writer.transport.abort()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        if self.target is None:
            writer.transport.abort()
            return
        try:
            there, back = await asyncio.open_connection("127.0.0.1", self.target)
        except OSError:
            writer.transport.abort()
            return
        self._open |= {writer, back}
        await asyncio.gather(_copy(reader, back), _copy(there, writer, lambda: self.change))
        self._open -= {writer, back}

    @contextlib.asynccontextmanager
    async def running(self) -> AsyncIterator[Relay]:
        async with listening(self._serve) as port:
            self.port = port
            yield self
            self.to(None)


async def _copy(
    reader: asyncio.StreamReader,
    writer: asyncio.StreamWriter,
    change: Callable[[], Change | None] = lambda: None,
) -> None:
    with contextlib.suppress(OSError):
        while data := await reader.read(65536):
            changed = change()
            writer.write(data if changed is None else await changed(data))
            await writer.drain()
    writer.transport.abort()


@contextlib.asynccontextmanager
async def listening(serve: Serve) -> AsyncIterator[int]:
    """A server of one's own; its port."""
    tasks: set[asyncio.Task[None]] = set()

    async def one(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        task = asyncio.current_task()
        assert task is not None
        tasks.add(task)
        try:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError, asyncio.CancelledError):
                await serve(reader, writer)
        finally:
            tasks.discard(task)
            writer.transport.abort()

    server = await asyncio.start_server(one, "127.0.0.1", 0)
    try:
        yield server.sockets[0].getsockname()[1]
    finally:
        server.close()
        for task in tasks:
            task.cancel()
        await asyncio.sleep(0)
