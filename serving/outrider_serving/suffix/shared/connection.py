"""Connections to Redis: to one server, or to the one that Sentinels or a Cluster say has the keys.

All keys of a model lie in one slot, so that a Cluster too is one server at a time. It is looked for at each
connection; whatever a server says against its being the right one (MOVED, READONLY) ends the connection.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

from redis.crc import key_slot
from redis.exceptions import AuthenticationError, ResponseError
from redis.typing import EncodableT

from outrider_serving.suffix.shared import replies
from outrider_serving.suffix.shared.options import Address, LogOptions
from outrider_serving.suffix.shared.replies import NonsenseError
from outrider_serving.suffix.shared.wire import Wire

CALL_SECONDS = 2.0
"""How long one answer, or the making of a connection, may take."""


class BrokenError(Exception):
    """A connection that failed before; a new one must be made, and the world be looked at again."""


class Link:
    """One connection; it is never made again behind its user's back."""

    def __init__(self, wire: Wire, missing: str = "") -> None:
        """Use a connection that nobody else uses; `missing` is said where the server wants a password."""
        self._wire = wire
        self._missing = missing
        self._lock = asyncio.Lock()
        self._broken = False

    async def call(self, *command: EncodableT, wait: float = 0.0) -> object:
        """What the server answers, within CALL_SECONDS and the seconds that it was asked to `wait`.

        Raises:
            ResponseError: the server refused the command; the connection can still be used.
            Exception: of whatever kind: the connection is broken, and whether the command was done unknown.
        """
        async with self._lock:
            if self._broken:
                raise BrokenError("the connection failed before")
            self._broken = True
            async with asyncio.timeout(CALL_SECONDS + wait):
                try:
                    answer = await self._wire.ask(*command)
                except ResponseError:
                    self._broken = False
                    raise
                except AuthenticationError as error:
                    if not self._missing:
                        raise
                    raise AuthenticationError(f"{error}; {self._missing}") from error
            self._broken = False
            return answer

    async def close(self) -> None:
        """End the connection; never raises, and never waits long."""
        with suppress(Exception):
            async with asyncio.timeout(CALL_SECONDS):
                await self._wire.disconnect()


@asynccontextmanager
async def connected(options: LogOptions, key: str) -> AsyncIterator[Link]:
    """A connection to the server that has `key`."""
    async with _at(options, await find(options, key)) as link:
        yield link


async def find(options: LogOptions, key: str) -> Address:
    """Where the server is that has `key`; the first of those that know of one is believed."""
    place = options.place
    if not place.kind:
        return place.addresses[0]
    if place.kind == "-cluster":
        slot = key_slot(key.encode())
        for first, last, address in await _slots(options):
            if first <= slot <= last:
                return address
        raise NonsenseError(f"no server of the Cluster has slot {slot}")
    answer = replies.items(await _ask_any(options, "SENTINEL", "GET-MASTER-ADDR-BY-NAME", place.service), 2)
    return Address(replies.text(answer[0]).decode(), replies.number(answer[1]))


async def masters(options: LogOptions) -> list[Address]:
    """All servers that may have keys."""
    if options.place.kind != "-cluster":
        return [await find(options, "")]
    return list(dict.fromkeys(address for _, _, address in await _slots(options)))


@asynccontextmanager
async def connected_to(options: LogOptions, address: Address) -> AsyncIterator[Link]:
    """A connection to one of the `masters`."""
    async with _at(options, address) as link:
        yield link


async def _slots(options: LogOptions) -> list[tuple[int, int, Address]]:
    """First and last slot of each range, and who has it."""
    found = []
    for row in replies.items(await _ask_any(options, "CLUSTER", "SLOTS")):
        first, last, node, *_ = [*replies.items(row), None, None, None]
        host, port, *_ = replies.items(node)
        # Without a host of its own, it is the one that was asked.
        name = replies.text(host or b"").decode() or options.place.addresses[0].host
        found.append((replies.number(first), replies.number(last), Address(name, replies.number(port))))
    return found


async def _ask_any(options: LogOptions, *command: str) -> object:
    """What the first of the addresses says that says anything; raises what the last raised."""
    place = options.place
    failure: Exception = NonsenseError(f"none of {len(place.addresses)} servers knows")
    for address in place.addresses:
        try:
            async with _at(options, address, "sentinel-" if place.kind == "-sentinel" else "") as link:
                answer = await link.call(*command)
        except Exception as error:
            failure = error
        else:
            if answer:
                return answer
    raise failure


@asynccontextmanager
async def _at(options: LogOptions, address: Address, files: str = "") -> AsyncIterator[Link]:
    """A connection to a server, whose user and password are in the files that begin so."""
    username, password = credentials(options.auth, files)
    wire = Wire(
        host=address.host,
        port=address.port,
        db=0 if files else options.place.database,
        username=username,
        password=password,
        tls=_tls(options),
        socket_connect_timeout=CALL_SECONDS,
        socket_timeout=None,  # `Link` watches the time
        driver_info=None,  # to tell it, a right of its own would be needed
    )
    link = Link(wire, _missing(options.auth, files) if password is None else "")
    try:
        yield link
    finally:
        await link.close()


def _missing(directory: Path | None, files: str) -> str:
    """Why there is no password, where one was promised."""
    if directory is None:
        return ""
    return f"there is no {f'file {files}password in' if directory.is_dir() else 'directory'} {directory}"


def _tls(options: LogOptions) -> ssl.SSLContext | None:
    """With which servers prove who they are; None without TLS."""
    if not options.place.tls:
        return None
    context = ssl.create_default_context()
    if options.ca is not None:
        context.load_verify_locations(options.ca)
    return context


def credentials(directory: Path | None, files: str = "") -> tuple[str | None, str | None]:
    """User and password in a directory's files, without the end of their line; None for what is not there.

    Raises:
        OSError: there is a file, but it cannot be read.
        UnicodeDecodeError: it holds no text.
    """
    found = []
    for name in ("username", "password"):
        path = None if directory is None else directory / f"{files}{name}"
        is_there = path is not None and path.exists()
        found.append(path.read_text(encoding="utf-8").strip("\r\n") if path and is_there else None)
    return found[0] or None, found[1] or None
