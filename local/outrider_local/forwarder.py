"""Forwards loopback ports of the machine into the node's network; run as a process of its own.

``python3 -m outrider_local.forwarder DESCRIPTOR RECORD PID LISTEN:ADDRESS:PORT ...``

RECORD does nothing here: whoever has lost what the record said finds the process by it.

One thread enters the network namespace of process PID and makes every outgoing socket there (a socket stays
in the namespace it was made in); the event loop, outside, listens on 127.0.0.1 and pipes the bytes.
"""

from __future__ import annotations

import asyncio
import os
import queue
import socket
import sys
import threading
from dataclasses import dataclass
from pathlib import Path

from outrider_local import namespaces

_CHUNK = 65536
_Request = tuple[asyncio.AbstractEventLoop, "asyncio.Future[socket.socket]"]


@dataclass(frozen=True)
class Route:
    """One forwarded port."""

    listen: int
    address: str
    port: int

    @staticmethod
    def parse(text: str) -> Route:
        """The route in ``LISTEN:ADDRESS:PORT``."""
        listen, address, port = text.split(":")
        return Route(int(listen), address, int(port))

    def __str__(self) -> str:
        return f"{self.listen}:{self.address}:{self.port}"


class SocketMaker:
    """Makes sockets inside another network namespace."""

    def __init__(self, pid: int) -> None:
        self._requests: queue.Queue[_Request] = queue.Queue()
        self._entered: queue.Queue[OSError | None] = queue.Queue()
        threading.Thread(target=self._serve, args=(pid,), daemon=True).start()
        failure = self._entered.get()
        if failure is not None:
            raise failure

    async def make(self) -> socket.socket:
        """A new socket of the other namespace."""
        loop = asyncio.get_running_loop()
        future: asyncio.Future[socket.socket] = loop.create_future()
        self._requests.put((loop, future))
        return await future

    def _serve(self, pid: int) -> None:
        try:
            # setns() moves the calling thread only.
            namespaces.enter(Path(f"/proc/{pid}/ns/net"), namespaces.NEW_NET)
        except OSError as error:
            self._entered.put(error)
            return
        self._entered.put(None)
        while True:
            loop, future = self._requests.get()
            # asyncio turns Nagle's algorithm off for sockets that name their protocol only.
            made = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
            made.setblocking(False)
            loop.call_soon_threadsafe(_hand_over, future, made)


def _hand_over(future: asyncio.Future[socket.socket], made: socket.socket) -> None:
    if future.cancelled():
        made.close()
    else:
        future.set_result(made)


async def _pipe(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
    """Copy until the end of one direction, then close that direction only."""
    while data := await reader.read(_CHUNK):
        writer.write(data)
        await writer.drain()
    if writer.can_write_eof():
        writer.write_eof()


async def _forward(
    maker: SocketMaker, route: Route, reader: asyncio.StreamReader, writer: asyncio.StreamWriter
) -> None:
    inner_writer: asyncio.StreamWriter | None = None
    try:
        inner = await maker.make()
        try:
            await asyncio.get_running_loop().sock_connect(inner, (route.address, route.port))
        except OSError:
            inner.close()
            raise
        inner_reader, inner_writer = await asyncio.open_connection(sock=inner)
        async with asyncio.TaskGroup() as group:
            group.create_task(_pipe(reader, inner_writer))
            group.create_task(_pipe(inner_reader, writer))
    except* OSError as errors:
        # A side that hangs up is everyday; the other one sees its connection end.
        print(f"{route}: {errors.exceptions[0]}", file=sys.stderr, flush=True)
    finally:
        for one in (writer, inner_writer):
            if one is not None:
                one.close()


async def _serve(maker: SocketMaker, routes: list[Route], ready: socket.socket) -> None:
    servers = []
    for route in routes:

        async def accept(
            reader: asyncio.StreamReader, writer: asyncio.StreamWriter, route: Route = route
        ) -> None:
            await _forward(maker, route, reader, writer)

        servers.append(await asyncio.start_server(accept, "127.0.0.1", route.listen))
    ready.sendall(b"ready\n")
    ready.close()
    await asyncio.gather(*(server.serve_forever() for server in servers))


def _drop_privileges() -> None:
    """Root is needed to enter the namespace and for nothing after it: go on as the user who called sudo."""
    user, group = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if os.geteuid() == 0 and user.isdecimal() and group.isdecimal():
        os.setgroups([])
        os.setgid(int(group))
        os.setuid(int(user))


def main(arguments: list[str]) -> None:
    """Forward until killed."""
    ready = socket.socket(fileno=int(arguments[0]))
    routes = [Route.parse(text) for text in arguments[3:]]
    try:
        maker = SocketMaker(int(arguments[2]))
        _drop_privileges()
        asyncio.run(_serve(maker, routes, ready))
    except OSError as error:
        ready.sendall(f"{error}\n".encode())
        sys.exit(1)


if __name__ == "__main__":
    main(sys.argv[1:])
