"""The HTTP servers of a process that owns its event loop and its signals."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
from collections.abc import Iterator
from typing import Any, cast

import uvicorn
from starlette.types import ASGIApp
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

from outrider_serving import logs
from outrider_serving.api.connections import Connection

logger = logging.getLogger(__name__)

KEEP_ALIVE_SECONDS = 75
"""Longer than clients keep a connection, so that they close it, and not we under their next request."""

BACKLOG = 2048
"""Connections that may wait to be accepted."""

ACCEPTS = 8
"""Connections that are accepted before the first of them can be told that it is one too many."""

ACCEPT_FAILED = "socket.accept() out of system resource"
"""asyncio's own words, with which it asks `report` to report."""

_failed_accepts = logs.Seldom()


def listen(host: str, port: int) -> socket.socket:
    """A listening socket; OSError if the address cannot be had."""
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    return socket.create_server((host, port), family=family, backlog=BACKLOG)


def report(loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
    """A handler of the loop's exceptions that logs few of those that come by the thousand."""
    if context["message"] == ACCEPT_FAILED:
        _failed_accepts.event(logger, "connections cannot be accepted", error=str(context["exception"]))
    else:
        loop.default_exception_handler(context)


class Listener(uvicorn.Server):
    """Serves one app on one socket, and leaves the process's signals alone."""

    def __init__(self, app: ASGIApp, listening: socket.socket, kind: type[Connection]) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                http=kind,
                ws="none",
                lifespan="off",
                log_config=None,
                access_log=False,
                server_header=False,
                # Whose a request is may depend on its address, of which a header is no proof.
                proxy_headers=False,
                timeout_keep_alive=KEEP_ALIVE_SECONDS,
                backlog=ACCEPTS,
            )
        )
        self.servers: list[asyncio.Server] = []
        self._task = asyncio.create_task(self.serve([listening]))

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        """Begin to accept. asyncio takes one number for ACCEPTS and BACKLOG."""
        await super().startup(sockets)
        for listening in sockets or ():
            listening.listen(BACKLOG)

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """Nothing to capture: the process's own handlers decide."""
        yield

    async def ended(self, seconds: float) -> bool:
        """Wait until the server has ended; False if it still has not after `seconds`."""
        await asyncio.wait((self._task,), timeout=seconds)
        if not self._task.done():
            return False
        if not self._task.cancelled() and (error := self._task.exception()):
            logger.error("a listener has failed", exc_info=error)
        return True

    def retire(self) -> None:
        """From now on each answer that begins is the last of its connection, and says so."""
        # uvicorn makes the second of the first once a second.
        for headers in (self.config.encoded_headers, self.server_state.default_headers):
            headers.append(CLOSE_HEADER)
        # A request that is being answered has taken its headers already.
        for connection in self.server_state.connections:
            cast("Connection", connection).retire()

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
