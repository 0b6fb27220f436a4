"""How a connection ends: its last answer says so, and arrives whole."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import h11
from uvicorn.protocols.http.flow_control import CLOSE_HEADER

LINGER_SECONDS = 5.0
"""How long what a client still sends is dropped, once it has been told that nobody listens any more."""


class Messages(h11.Connection):
    """The messages of one connection.

    Attributes:
        last: the answer that is written, or is written next, is the last one.
        chunked: the request that was read last has its body in chunks.
    """

    last = False
    chunked = False

    def next_event(self) -> h11.Event | type[h11.NEED_DATA] | type[h11.PAUSED]:
        """The next part of a request; see h11."""
        event = super().next_event()
        if isinstance(event, h11.Request):
            names = {name for name, _ in event.headers}
            self.chunked = b"transfer-encoding" in names
            # Two lengths, of which somebody in between may have believed the other (RFC 9112, section 6.3).
            self.last = self.chunked and b"content-length" in names
        return event

    def send_with_data_passthrough(self, event: h11.Event) -> list[bytes] | None:
        """The bytes of a part of an answer; see h11. The head of the last one closes the connection."""
        if isinstance(event, h11.Response):
            # Where an answer begins before the request has ended, the rest of the request is of no use.
            self.last |= self.their_state is h11.SEND_BODY
            if self.last and CLOSE_HEADER not in event.headers:
                headers = [*event.headers, CLOSE_HEADER]
                event = h11.Response(status_code=event.status_code, headers=headers, reason=event.reason)
        return super().send_with_data_passthrough(event)

    @property
    def ahead(self) -> int:
        """Bytes that came and are not parsed; once a request is whole, those sent ahead of its answer."""
        return len(self.trailing_data[0])

    @property
    def unread(self) -> bool:
        """Whether the client has sent, or is likely to send, what nobody will parse."""
        return self.their_state in (h11.SEND_BODY, h11.ERROR) or self.ahead > 0


class LingeringTransport:
    """A transport that does not lose what was written last when it closes.

    A socket that is closed under unread bytes resets its connection, and the client then loses what it has
    not read yet. So this side only is closed at first, and what comes is dropped until the client closes too.
    """

    def __init__(self, transport: asyncio.Transport, unread: Callable[[], bool]) -> None:
        """Wrap `transport`; where nothing is `unread`, closing is done at once."""
        self._transport = transport
        self._unread = unread
        self._lingering: asyncio.TimerHandle | None = None

    def __getattr__(self, name: str) -> Any:
        """All else is the transport's own."""
        return getattr(self._transport, name)

    def is_closing(self) -> bool:
        """Whether nothing more may be written."""
        return self._lingering is not None or self._transport.is_closing()

    def close(self) -> None:
        """Close once all is written, and give the client the time to read it."""
        if self.is_closing():
            return
        if not self._unread():
            self._transport.close()
            return
        try:
            self._transport.write_eof()
        except OSError:  # the client has gone, which will only be read later
            self._transport.abort()
            return
        self._transport.resume_reading()
        self._linger()

    def lost(self) -> None:
        """The connection is closed."""
        if self._lingering is not None:
            self._lingering.cancel()

    def _linger(self) -> None:
        """Wait while the client takes what is written; the time to read the last of it begins after that."""
        left = self._transport.get_write_buffer_size()
        loop = asyncio.get_running_loop()
        self._lingering = loop.call_later(LINGER_SECONDS, self._end, left)

    def _end(self, before: int) -> None:
        if self._transport.get_write_buffer_size() < before:
            self._linger()
        else:
            self._transport.abort()
