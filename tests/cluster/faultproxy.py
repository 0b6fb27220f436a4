"""An HTTP proxy between an operator and the real API server that records requests and injects faults.

It forwards every request as it is, the bearer token included, so the API server authenticates, authorizes and
audits the operator itself. It listens inside the node's network, where operators of the tests run, and its
event loop has a thread of its own, so that a test can change the fault at any moment.
"""

from __future__ import annotations

import asyncio
import queue
import re
import socket
import ssl
import threading
import time
from collections import Counter
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from enum import Enum
from pathlib import Path
from typing import Any, Final, TypeVar

import aiohttp
from aiohttp import web

from outrider_local import namespaces

T = TypeVar("T")

_WRITES: Final = frozenset({"POST", "PUT", "PATCH", "DELETE"})
_HOP_BY_HOP: Final = frozenset({"connection", "host", "keep-alive", "transfer-encoding", "content-length"})
_PATH: Final = re.compile(
    r"^/(?:api|apis/[^/]+)/v[^/]+(?:/namespaces/(?P<namespace>[^/]+))?"
    r"/(?P<resource>[a-z]+)(?:/(?P<name>[^/]+))?(?:/(?P<sub>[a-z]+))?$"
)


class Side(Enum):
    """When a write's hook runs."""

    BEFORE = "before"
    """The API server has not seen the request."""

    AFTER = "after"
    """The API server has answered, and the operator has not seen the answer."""


@dataclass(slots=True)
class Call:
    """One request of the operator."""

    verb: str
    path: str
    query: str
    body: bytes
    at: float
    """When it came, in seconds of time.time()."""

    status: int | None = None
    """What the API server answered; None where it was not asked, or did not answer."""

    @property
    def _parts(self) -> dict[str, str]:
        found = _PATH.match(self.path)
        return {key: value or "" for key, value in found.groupdict().items()} if found else {}

    @property
    def resource(self) -> str:
        """Plural, with the subresource: `speculativemodels/status`; empty for what is no resource."""
        parts = self._parts
        return "/".join(filter(None, (parts.get("resource", ""), parts.get("sub", ""))))

    @property
    def namespace(self) -> str:
        return self._parts.get("namespace", "")

    @property
    def name(self) -> str:
        return self._parts.get("name", "")

    @property
    def is_watch(self) -> bool:
        return self.verb == "GET" and re.search(r"(^|&)watch=(true|1)", self.query) is not None

    @property
    def is_lease(self) -> bool:
        return self.resource == "leases"

    @property
    def is_write(self) -> bool:
        """Whether it changes anything but a Lease."""
        return self.verb in _WRITES and not self.is_lease


Hook = Callable[[Call, Side], bool]
"""Told of each write, those of Leases too, on each side; False drops the request, or its answer."""


class FaultProxy:
    """A proxy for one operator. Faults hold from the call that begins them to `heal`."""

    def __init__(self, upstream: str, authority: str, node: int) -> None:
        """Start to listen.

        `upstream` is the API server's address on this machine, `authority` the text of its CA's certificate,
        `node` a process whose network the proxy listens in.
        """
        self.calls: list[Call] = []
        self.hook: Hook | None = None
        #: What silent watches would have said, by resource.
        self.dropped: Counter[str] = Counter()
        self._upstream = upstream
        self._tls = ssl.create_default_context(cadata=authority)
        self._node = node
        self._silent: frozenset[str] = frozenset()
        self._loop = asyncio.new_event_loop()
        self._live: set[asyncio.Transport] = set()
        self._thread = threading.Thread(target=self._loop.run_forever, name="faultproxy", daemon=True)
        self._thread.start()
        self.port = 0
        self._run(self._start())

    @property
    def url(self) -> str:
        """Where the operator reaches it."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def writes(self) -> list[Call]:
        """Requests that change anything, Leases apart."""
        return [call for call in tuple(self.calls) if call.is_write]

    def refuse(self) -> None:
        """Refuse connections, and cut those that there are."""
        self._run(self._refuse())

    def hang(self) -> None:
        """Accept connections and requests, and say nothing more."""
        self._run(self._set_open(False))

    def silence(self, *resources: str) -> None:
        """Keep watches of these resources open, the coming ones too, and drop what they would say."""
        self._run(self._silence(frozenset(resources)))

    def heal(self) -> None:
        """End all faults. What hung goes on, as after a lost packet; what was dropped stays lost."""
        self._run(self._heal())

    def close(self) -> None:
        """Cut all connections and end."""
        self._run(self._close())
        self._loop.call_soon_threadsafe(self._loop.stop)
        self._thread.join(10)
        self._loop.close()

    def _run(self, work: Coroutine[Any, Any, T]) -> T:
        return asyncio.run_coroutine_threadsafe(work, self._loop).result(20)

    async def _start(self) -> None:
        self._open, self._heard = asyncio.Event(), asyncio.Event()
        self._open.set()
        self._session = aiohttp.ClientSession(
            auto_decompress=False,
            connector=aiohttp.TCPConnector(ssl=self._tls, limit=0),
            timeout=aiohttp.ClientTimeout(total=None, sock_connect=5),
        )
        self._runner = web.ServerRunner(
            web.Server(self._handle, access_log=None, handler_cancellation=True), shutdown_timeout=0.1
        )
        await self._runner.setup()
        await self._listen()

    async def _listen(self) -> None:
        listening = listen_within(self._node, self.port)
        self.port = listening.getsockname()[1]
        self._site = web.SockSite(self._runner, listening)
        await self._site.start()

    async def _refuse(self) -> None:
        await self._site.stop()
        self._cut()

    async def _set_open(self, is_open: bool) -> None:
        (self._open.set if is_open else self._open.clear)()

    async def _silence(self, resources: frozenset[str]) -> None:
        self._silent = resources
        self._heard.clear()

    async def _heal(self) -> None:
        self._silent = frozenset()
        self._heard.set()
        self._open.set()
        if self._site not in self._runner.sites:
            await self._listen()

    async def _close(self) -> None:
        self._cut()
        await self._runner.cleanup()
        await self._session.close()
        rest = asyncio.all_tasks() - {asyncio.current_task()}
        for task in rest:
            task.cancel()
        await asyncio.gather(*rest, return_exceptions=True)

    def _cut(self) -> None:
        for transport in tuple(self._live):
            transport.abort()

    async def _handle(self, request: web.BaseRequest) -> web.StreamResponse:
        transport = request.transport
        if transport is None or self._site not in self._runner.sites:
            return _drop(request)
        body = await request.read()
        call = Call(request.method, request.path, request.query_string, body, time.time())
        self._live.add(transport)
        try:
            return await self._forward(request, call)
        except (aiohttp.ClientError, ConnectionError):
            return _drop(request)
        finally:
            self._live.discard(transport)

    async def _forward(self, request: web.BaseRequest, call: Call) -> web.StreamResponse:
        await self._open.wait()
        if request.transport is None or request.transport.is_closing():
            return _drop(request)  # whoever asked has given up
        self.calls.append(call)
        if not self._told(call, Side.BEFORE):
            return _drop(request)
        headers = {key: value for key, value in request.headers.items() if key.lower() not in _HOP_BY_HOP}
        async with self._session.request(
            call.verb, f"{self._upstream}{request.raw_path}", data=call.body or None, headers=headers
        ) as answer:
            kept = {key: value for key, value in answer.headers.items() if key.lower() not in _HOP_BY_HOP}
            if call.is_watch and answer.status == 200:
                call.status = answer.status
                return await self._watch(request, call, answer, kept)
            content = await answer.read()
            call.status = answer.status
        if not self._told(call, Side.AFTER):
            return _drop(request)
        await self._open.wait()
        return web.Response(status=answer.status, body=content, headers=kept)

    def _told(self, call: Call, side: Side) -> bool:
        return self.hook is None or call.verb not in _WRITES or self.hook(call, side)

    async def _watch(
        self, request: web.BaseRequest, call: Call, answer: aiohttp.ClientResponse, headers: dict[str, str]
    ) -> web.StreamResponse:
        response = web.StreamResponse(status=answer.status, headers=headers)
        await response.prepare(request)
        rest = b""
        async for chunk in answer.content.iter_any():
            lines, mark, rest = (rest + chunk).rpartition(b"\n")
            await self._open.wait()
            if call.resource in self._silent:
                self.dropped.update([call.resource] * (lines + mark).count(b"\n"))
            elif mark:
                await response.write(lines + mark)
        if call.resource in self._silent:
            await self._heard.wait()
        await response.write_eof()
        return response


def _drop(request: web.BaseRequest) -> web.Response:
    """Cut the connection; the response goes nowhere."""
    if request.transport is not None:
        request.transport.abort()
    return web.Response(status=502)


def listen_within(node: int, port: int) -> socket.socket:
    """A listening loopback socket in the network of that process; port 0 takes a free one.

    A socket stays in the namespace it was made in, so a thread of its own enters it and ends.
    """
    made: queue.Queue[socket.socket | OSError] = queue.Queue()

    def make() -> None:
        try:
            namespaces.enter(Path(f"/proc/{node}/ns/net"), namespaces.NEW_NET)
            listening = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
            listening.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listening.bind(("127.0.0.1", port))
            listening.listen(128)
            listening.setblocking(False)
            made.put(listening)
        except OSError as error:
            made.put(error)

    threading.Thread(target=make).start()
    result = made.get(timeout=10)
    if isinstance(result, OSError):
        raise result
    return result
