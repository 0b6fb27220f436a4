"""The API server as the bench uses it: as administrator, from within the node's network."""

from __future__ import annotations

import asyncio
import json
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any, Final

import aiohttp

Object = dict[str, Any]

_MERGE: Final = "application/merge-patch+json"
_STRATEGIC: Final = "application/strategic-merge-patch+json"
_AT_ONCE: Final = 16
"""Requests under way at once; watches come on top."""

_WATCH_SECONDS: Final = 3600
_LONGEST_LINE: Final = 1 << 21
"""Bytes of one object in a watch: etcd takes no larger ones."""


class RefusedError(Exception):
    """The API server answered with an error."""

    def __init__(self, what: str, status: int, body: str) -> None:
        super().__init__(f"{what}: HTTP {status}: {body[:500]}")
        self.status = status


class Api:
    """Plain documents by path."""

    def __init__(self, session: aiohttp.ClientSession, server: str, tls: ssl.SSLContext) -> None:
        self._session = session
        self._server = server
        self._tls = tls
        self._slots = asyncio.Semaphore(_AT_ONCE)

    async def get(self, path: str) -> Object:
        """Read a document."""
        return await self._send("GET", path)

    async def post(self, path: str, body: Object) -> Object:
        """Create an object."""
        return await self._send("POST", path, body)

    async def merge(self, path: str, body: Object) -> Object:
        """Merge into an object of any kind."""
        return await self._send("PATCH", path, body, content_type=_MERGE)

    async def merge_by_keys(self, path: str, body: Object) -> Object:
        """Merge into a built-in object, whose lists are merged by their keys."""
        return await self._send("PATCH", path, body, content_type=_STRATEGIC)

    async def delete(self, path: str, body: Object | None = None) -> None:
        """Delete an object; it may be gone."""
        try:
            await self._send("DELETE", path, body)
        except RefusedError as error:
            if error.status != 404:
                raise

    async def watch(self, path: str, selector: str, hear: Callable[[str, Object], None]) -> None:
        """Tell ADDED, MODIFIED and DELETED objects until cancelled, those that are there first."""
        query = f"?labelSelector={selector}" if selector else "?"
        listed = await self._send("GET", path + query)
        for found in listed["items"]:
            hear("ADDED", found)
        version = listed["metadata"]["resourceVersion"]
        while True:
            more = f"&watch=1&allowWatchBookmarks=true&timeoutSeconds={_WATCH_SECONDS}"
            url = f"{self._server}{path}{query}{more}&resourceVersion={version}"
            async with self._session.get(url, ssl=self._tls) as answer:
                if answer.status != 200:
                    raise RefusedError(f"watch {path}", answer.status, await answer.text())
                async for line in answer.content:
                    event = json.loads(line)
                    if event["type"] == "ERROR":
                        raise RefusedError(
                            f"watch {path}", int(event["object"].get("code", 0)), line.decode()
                        )
                    version = event["object"]["metadata"]["resourceVersion"]
                    if event["type"] != "BOOKMARK":
                        hear(event["type"], event["object"])

    async def _send(
        self, verb: str, path: str, body: Object | None = None, content_type: str = "application/json"
    ) -> Object:
        data = None if body is None else json.dumps(body).encode()
        headers = {"Content-Type": content_type} if data else {}
        async with (
            self._slots,
            self._session.request(
                verb, self._server + path, data=data, headers=headers, ssl=self._tls
            ) as answer,
        ):
            text = await answer.text()
            if answer.status >= 400:
                raise RefusedError(f"{verb} {path}", answer.status, text)
            return dict(json.loads(text))


def access(kubeconfig: Path) -> tuple[str, ssl.SSLContext]:
    """Server and identity by a kubeconfig in JSON that names the files of its certificates."""
    config = json.loads(kubeconfig.read_text())
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    tls = ssl.create_default_context(cafile=cluster["certificate-authority"])
    tls.load_cert_chain(user["client-certificate"], user["client-key"])
    return cluster["server"], tls


@asynccontextmanager
async def connect(server: str, tls: ssl.SSLContext) -> AsyncIterator[Api]:
    """The API of a server."""
    connector = aiohttp.TCPConnector(limit=0)
    timeout = aiohttp.ClientTimeout(total=None, sock_connect=10)
    async with aiohttp.ClientSession(
        connector=connector, timeout=timeout, read_bufsize=_LONGEST_LINE
    ) as session:
        yield Api(session, server, tls)
