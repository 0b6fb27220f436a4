"""The HTTP servers of a process that owns its event loop and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import socket
from collections.abc import Iterator

import uvicorn
from starlette.types import ASGIApp

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection, so that they close it, and not we under their next request."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=2048)


class Listener(uvicorn.Server):
    """Serves one app on one socket, and leaves the process's signals alone."""

    def __init__(self, app: ASGIApp, listening: socket.socket) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http="h11",
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
            )
        )
        self.servers: list[asyncio.Server] = []
        self._task = asyncio.create_task(self.serve([listening]))

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture: the process's own handlers decide."""
        yield

    async def ended(self, seconds: float) -> bool:
        """Wait until the server has ended; False if it still has not after `seconds`."""
        await asyncio.wait((self._task,), timeout=seconds)
        return self._task.done()

    def stop(self) -> None:
        """Stop accepting; the server ends when the requests in flight have."""
        self.should_exit = True

    async def abandon(self) -> None:
        """End now: cut every connection, so that what is in flight sees its client gone and ends."""
        self._task.cancel()
        for server in self.servers:
            server.close()
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        if self.server_state.tasks:
            await asyncio.wait(self.server_state.tasks)
