"""A connection of redis-py that looks names up aside, and that no answer makes large or busy.

redis-py has no public way to do either: its `_connect` is replaced, and its parser in plain Python is used,
which reads by lines, whatever else is installed.
"""

from __future__ import annotations

import asyncio
from ssl import SSLContext
from typing import Any

from redis._parsers import _AsyncRESP2Parser
from redis.asyncio.connection import Connection
from redis.exceptions import InvalidResponse
from redis.typing import EncodableT

from outrider_serving.suffix.shared.replies import NonsenseError
from outrider_serving.suffix.shared.resolving import Resolver

ANSWER_BYTES = 16 << 20
"""Of one answer. All that is asked for has 4 MiB at most (a full record of each of 256 streams), but for the
names of all tenants."""

ANSWER_ITEMS = 256 * 1024
"""Of one answer, with those of arrays in it: the names of as many tenants, which take a second."""

_AT_ONCE = 256
"""Lines of an answer that are taken while nothing else can run: a millisecond."""

_resolver = Resolver()


class TooLargeError(NonsenseError):
    """An answer that is larger than any that is asked for."""


class AnswerReader(asyncio.StreamReader):
    """Ends an answer as soon as it says that it is too large, before that is read.

    Texts and arrays of Redis are preceded by their sizes.
    """

    def __init__(self) -> None:
        """Read for the loop that runs."""
        super().__init__(loop=asyncio.get_running_loop())
        self._lines = 0
        self.begin()

    def begin(self) -> None:
        """What comes from now on is another answer."""
        self._bytes_left, self._items_left = ANSWER_BYTES, ANSWER_ITEMS

    async def readline(self) -> bytes:
        """A line: a size, or what is short."""
        line = await super().readline()
        self._bytes_left -= len(line)
        if line.startswith(b"*"):
            self._items_left -= max(0, int(line[1:]))
        self._check()
        self._lines += 1
        if self._lines % _AT_ONCE == 0:
            await asyncio.sleep(0)
        return line

    async def readexactly(self, n: int) -> bytes:
        """A text, after the line with its size."""
        self._bytes_left -= n
        self._check()
        return await super().readexactly(n)

    def _check(self) -> None:
        if min(self._bytes_left, self._items_left) < 0:
            raise TooLargeError(f"an answer has over {ANSWER_BYTES} bytes or {ANSWER_ITEMS} items")


class Wire(Connection):
    """One connection to a server."""

    def __init__(self, *, tls: SSLContext | None, **options: Any) -> None:
        """Nothing is connected before something is asked.

        Args:
            tls: with which the server must prove that it has the name by which it was called.
            options: redis-py's.
        """
        super().__init__(protocol=2, parser_class=_AsyncRESP2Parser, **options)
        self._tls = tls
        self._answers: AnswerReader | None = None

    async def ask(self, *command: EncodableT) -> object:
        """What the server answers. Whatever this raises but ResponseError, the connection is over."""
        await self.send_command(*command)  # connects before the first one
        if self._answers is not None:
            self._answers.begin()
        try:
            answer: object = await self.read_response()
        except (InvalidResponse, ValueError) as error:
            # They repeat what came, which may be somebody's text.
            raise NonsenseError("an answer was expected, and what came is none") from error
        return answer

    async def _connect(self) -> None:
        failure = OSError(f"{self.host} has no address")
        for address in await _resolver.addresses(self.host):
            try:
                await self._connect_to(address)
            except OSError as error:
                failure = error
            else:
                return
        raise failure

    async def _connect_to(self, address: str) -> None:
        loop = asyncio.get_running_loop()
        reader = AnswerReader()
        protocol = asyncio.StreamReaderProtocol(reader, loop=loop)
        name = self.host if self._tls is not None else None
        transport, _ = await loop.create_connection(
            lambda: protocol, address, self.port, ssl=self._tls, server_hostname=name
        )
        self._reader = self._answers = reader
        self._writer = asyncio.StreamWriter(transport, protocol, reader, loop)
