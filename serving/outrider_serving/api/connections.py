"""The HTTP connections of a server: how much of one is read at a time, and what ends it.

That is to be one too many, to ask nothing, to read nothing: uvicorn waits for such clients for ever, and each
of them holds a descriptor. It also parses all that has come in one go, and does not notice that a client is
gone which has sent more than its request.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import resource
import socket
from typing import cast

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from outrider_serving import logs
from outrider_serving.api.closing import LingeringTransport, Messages

logger = logging.getLogger(__name__)

HEADER_SECONDS = 30.0
"""How long a client that has connected, or has begun to send, may take to send the whole of a header."""

WRITE_SECONDS = 30.0
"""How long a client that is behind may take nothing of its answer; noticed within twice that time."""

PIECE_BYTES = 2048
"""Read, and parsed, in one turn of the event loop: some milliseconds where each chunk has one byte."""

BODY_PIECE_BYTES = 65536
"""The same of a body whose length was declared, which is not parsed."""

AHEAD_BYTES = 4096
"""Sent ahead of an answer, these are parsed after it; what has more sent ahead is closed after it."""

_rejections = logs.Seldom()

_piece = memoryview(bytearray(BODY_PIECE_BYTES))
"""For all connections: each copies what is read at once."""


def raise_descriptor_limit() -> None:
    """Let this process, and those that it starts, have as many descriptors as the system grants."""
    _, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with contextlib.suppress(OSError, ValueError):  # what "unlimited" means is for some systems to refuse
        resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))


class Connection(H11Protocol, asyncio.BufferedProtocol):
    """A connection of the admin port.

    Attributes:
        share: of the process's descriptors, that all connections of this kind may hold together. The rest is
            for the other port, the engine's process and files.
    """

    share = 0.25

    conn: Messages

    _closing: LingeringTransport
    _header: asyncio.TimerHandle | None = None
    _reading: asyncio.TimerHandle | None = None

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        """Take the connection, or close it at once where there are too many."""
        self.conn = Messages(h11.SERVER)
        self._closing = LingeringTransport(transport, lambda: self.conn.unread)
        super().connection_made(cast("asyncio.Transport", self._closing))
        # What is small is sent at once: else each write waits for the client to acknowledge the one before.
        # (asyncio sees to it only for sockets that were made with the number of the protocol.)
        transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        most = self._most()
        if most is not None and len(self.connections) > most:
            _rejections.event(logger, "too many connections: closing new ones", most=most)
            transport.abort()
        else:
            self._expect_header()

    def get_buffer(self, _sizehint: int) -> memoryview:
        """Where to put what is read next."""
        plain = self._answering and self.cycle.more_body and not self.conn.chunked
        return _piece if plain or self.transport.is_closing() else _piece[:PIECE_BYTES]

    def buffer_updated(self, nbytes: int) -> None:
        """Some bytes have been read."""
        self.data_received(bytes(_piece[:nbytes]))

    def data_received(self, data: bytes) -> None:
        """Take what has come; the time for a header does not begin anew with each piece of it."""
        if self.transport.is_closing():
            return
        if not self._asked:
            super().data_received(data)
        elif self.conn.ahead <= AHEAD_BYTES:
            self.conn.receive_data(data)
        self._look_ahead()
        if self._answering:
            _cancel(self._header)
            self._header = None
        elif self._header is None:
            self._expect_header()

    def send_400_response(self, msg: str) -> None:
        """Answer what is no HTTP; the answer to a request that turned out to be none will not be written."""
        if self._answering:
            self.cycle.disconnected = True
            self.cycle.message_event.set()
        super().send_400_response(msg)

    def retire(self) -> None:
        """Let the answer that is being made, if any, be the last one, and say so if it has not begun."""
        self.conn.last = True

    def connection_lost(self, exc: Exception | None) -> None:
        """The connection is closed."""
        _cancel(self._header)
        _cancel(self._reading)
        self._closing.lost()
        super().connection_lost(exc)

    def pause_writing(self) -> None:
        """The client is behind by more than may wait here."""
        super().pause_writing()
        self._expect_reading()

    def resume_writing(self) -> None:
        """The client has caught up."""
        _cancel(self._reading)
        super().resume_writing()

    def on_response_complete(self) -> None:
        """All of an answer is written, though the client may not have read it."""
        if self.conn.last:
            self.transport.close()
        super().on_response_complete()
        self._look_ahead()
        self._expect_reading()
        if self.conn.ahead and not self._answering and self._header is None:
            self._expect_header()  # of which a part was sent ahead

    @property
    def _answering(self) -> bool:
        return self.cycle is not None and not self.cycle.response_complete

    @property
    def _asked(self) -> bool:
        """Whether a request is being answered of which no more is needed."""
        return self._answering and (self.cycle.response_started or not self.cycle.more_body)

    def _look_ahead(self) -> None:
        if self._asked:
            self.conn.last |= self.conn.ahead > AHEAD_BYTES
            # Only who reads sees that the client is gone; uvicorn pauses where anything was sent ahead.
            self.flow.resume_reading()

    def _most(self) -> int | None:
        """Connections of this kind that there may be, by the limit in force now; None for any number."""
        limit, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
        return None if limit == resource.RLIM_INFINITY else int(limit * self.share)

    def _expect_header(self) -> None:
        self._header = self.loop.call_later(HEADER_SECONDS, self.transport.abort)

    def _expect_reading(self) -> None:
        _cancel(self._reading)
        if unread := self.transport.get_write_buffer_size():
            self._reading = self.loop.call_later(WRITE_SECONDS, self._check_reading, unread)

    def _check_reading(self, before: int) -> None:
        # Where the next answer is being written, what is unread tells nothing; its end or its pause will.
        if self._answering and not self.flow.write_paused:
            return
        if self.transport.get_write_buffer_size() < before:
            self._expect_reading()
        else:
            # The application sees a client that hung up.
            self.transport.abort()


class PublicConnection(Connection):
    """A connection of the public port."""

    share = 0.5


def _cancel(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
