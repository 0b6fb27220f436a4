"""Looks up the addresses of names, beside the event loop and beside the threads that the API lives on."""

from __future__ import annotations

import asyncio
import ipaddress
import socket
from concurrent.futures import Future
from contextlib import suppress
from threading import Thread


class Resolver:
    """Has one thread at most: while a lookup does not come back, no other begins.

    Whoever waits may give up at any time. Who asks for the same name meanwhile waits for the same lookup. For
    one event loop at a time.
    """

    def __init__(self) -> None:
        """Nothing is looked up yet."""
        self._host = ""
        self._found: Future[list[str]] | None = None

    async def addresses(self, host: str) -> list[str]:
        """Of a host, in the order in which they should be tried; an address is its own.

        Raises:
            OSError: it has none, or that could not be found out.
            ValueError: no host can be called so.
        """
        if _is_address(host):
            return [host]
        while True:
            found = self._found
            if found is None or found.done():
                found = self._begin(host)
            if self._host == host:
                return await asyncio.wrap_future(found)
            with suppress(Exception):
                await asyncio.wrap_future(found)

    def _begin(self, host: str) -> Future[list[str]]:
        found: Future[list[str]] = Future()
        found.set_running_or_notify_cancel()  # who gives up waiting does not end it
        # A daemon, unlike a pool's: the end of the process does not wait for it.
        Thread(target=_look_up, args=(host, found), name="suffix-names", daemon=True).start()
        self._host, self._found = host, found
        return found


def _look_up(host: str, found: Future[list[str]]) -> None:
    try:
        infos = socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except Exception as error:
        found.set_exception(error)
    else:
        found.set_result(list(dict.fromkeys(str(info[4][0]) for info in infos)))


def _is_address(host: str) -> bool:
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return False
    return True
