"""One request from its acceptance to its end: tokens onto the wire, and one RequestRecord."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import aclosing
from typing import Any, TypeVar

from starlette.responses import Response
from starlette.types import Receive, Scope, Send

from outrider_serving.api import wire
from outrider_serving.api.choices import Choices
from outrider_serving.api.completion import Piece, joined
from outrider_serving.api.encoding import encoded
from outrider_serving.api.errors import RETRY_AFTER, SERVER_ERROR, ApiError, answer_to
from outrider_serving.api.pace import Pace
from outrider_serving.api.prepare import Arrival, Call
from outrider_serving.api.records import Outcome, RequestRecord, Usage
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.engine.types import DeadlineError

logger = logging.getLogger(__name__)

ERROR_WRITE_SECONDS = 1.0
"""How long a last error may take to be written to a client that does not read."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

MANY_LOGPROBS = 500
"""Tokens with logprobs that take some milliseconds to spell."""

Result = TypeVar("Result")

Prepare = Callable[[ServedModel], Awaitable[Call]]


class Exchange(Response):
    """Answers one arrival. It ends when the answer is written, the client hangs up, its time is over, or the
    server must stop.

    Nothing is written before the first text is there, so that a request which is refused or fails before it
    gets a proper status; afterwards an error is an event of the stream, which then ends without [DONE].
    """

    def __init__(
        self,
        serving: Serving,
        arrival: Arrival,
        spelling: wire.WireFormat,
        prepare: Prepare,
        *,
        include_usage: bool,
    ) -> None:
        """`prepare` makes the call; an ApiError (4xx) of it means that there was no arrival."""
        self._serving = serving
        self._arrival = arrival
        self._spelling = spelling
        self._prepare = prepare
        self._include_usage = include_usage
        self._pace = Pace(arrival.received)
        self._choices: Choices | None = None
        self._count = 1
        self._started = False
        self._complete = False
        self.background = None

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Run the exchange on an ASGI connection."""
        work = asyncio.create_task(self._answer(scope, receive, send))
        gone = asyncio.create_task(_disconnected(receive))
        expired = asyncio.create_task(self._serving.expired.wait())
        try:
            await asyncio.wait((work, gone, expired), return_when=asyncio.FIRST_COMPLETED)
            if not work.done():
                work.cancel()
                await asyncio.wait((work,))
            outcome, error = self._ending(work, hung_up=gone.done())
            try:
                if error is not None:
                    await self._write_error(error, scope, receive, send)
            finally:
                self._record(outcome, error)
        finally:
            for task in (work, gone, expired):
                task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        deadline = self._arrival.deadline
        left = None if deadline is None else deadline - time.monotonic()
        whole: Response | None = None
        try:
            async with asyncio.timeout(left) as limit:
                model = self._serving.model
                call = await self._prepare(model)
                self._count = len(call.requests)
                self._choices = Choices(model.engine.generate, call, self._arrival.token_seconds)
                async with aclosing(self._choices.pieces()) as pieces:
                    if self._arrival.stream:
                        await self._stream(pieces, self._choices, send)
                    else:
                        whole = await self._whole(pieces, self._choices)
        except TimeoutError as error:
            raise (DeadlineError() if limit.expired() else error) from None
        if whole is not None:
            await whole(scope, receive, send)
        self._complete = True

    async def _whole(self, pieces: AsyncIterator[Piece], choices: Choices) -> Response:
        found: list[list[Piece]] = [[] for _ in range(self._count)]
        async for piece in pieces:
            if piece.tokens:
                self._pace.mark(piece.committed_at)
            found[piece.index].append(piece)
        wholes = [joined(parts) for parts in found]
        return await _computed(wholes, self._whole_response, wholes, choices.usage)

    def _whole_response(self, wholes: Sequence[Piece], usage: Usage) -> Response:
        body = encoded(self._spelling.whole(wholes, usage))
        return Response(body, headers={"x-request-id": self._arrival.id}, media_type="application/json")

    async def _stream(self, pieces: AsyncIterator[Piece], choices: Choices, send: Send) -> None:
        async for piece in pieces:
            if events := await _computed([piece], self._events, piece):
                await self._write(events, send)
        last = wire.event(self._spelling.usage(choices.usage)) if self._include_usage else b""
        await send({"type": "http.response.body", "body": last + wire.DONE})

    def _events(self, piece: Piece) -> bytes:
        return b"".join(map(wire.event, self._spelling.piece(piece)))

    async def _write(self, events: bytes, send: Send) -> None:
        if not self._started:
            headers = [*STREAM_HEADERS, (b"x-request-id", self._arrival.id.encode())]
            await send({"type": "http.response.start", "status": 200, "headers": headers})
            self._started = True
            events = b"".join(map(wire.event, self._spelling.opening())) + events
        await send({"type": "http.response.body", "body": events, "more_body": True})
        self._pace.mark(time.monotonic())

    async def _write_error(self, error: ApiError, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            async with asyncio.timeout(ERROR_WRITE_SECONDS):
                if self._started:
                    await send({"type": "http.response.body", "body": wire.event(error.payload)})
                else:
                    error.headers["x-request-id"] = self._arrival.id
                    await error.response()(scope, receive, send)
        except TimeoutError:
            logger.warning("a client that does not read was not told how its request ended")

    def _ending(self, work: asyncio.Task[None], *, hung_up: bool) -> tuple[Outcome, ApiError | None]:
        """How the exchange ended, and the error to write if it was not completed."""
        if self._complete:
            return Outcome.COMPLETED, None
        if work.cancelled():
            if hung_up:
                return Outcome.CANCELLED, None
            error = ApiError(
                503,
                "The server shut down before the answer was complete.",
                kind=SERVER_ERROR,
                code="shutdown",
                headers={"Retry-After": RETRY_AFTER},
            )
            return Outcome.FAILED, error
        cause = work.exception()
        error = answer_to(cause)
        if isinstance(cause, DeadlineError):
            return Outcome.TIMED_OUT, error
        begun = self._started or (self._choices is not None and self._choices.usage.completion_tokens > 0)
        refused = error.status in (429, 503) and not begun
        return (Outcome.REFUSED if refused else Outcome.FAILED), error

    def _record(self, outcome: Outcome, error: ApiError | None) -> None:
        if error is not None and error.status < 500 and error.status != 429:
            log_rejection(error, self._arrival.labels.endpoint)
            return
        usage = self._choices.usage if self._choices else Usage()
        self._serving.record(
            RequestRecord(
                id=self._arrival.id,
                model=self._arrival.model,
                tenant=self._arrival.tenant,
                labels=self._arrival.labels,
                stream=self._arrival.stream,
                outcome=outcome,
                duration=time.monotonic() - self._arrival.received,
                usage=usage,
                objective=self._arrival.objective,
                ttft=self._pace.ttft,
                tpot=self._pace.tpot(usage.completion_tokens / self._count),
                max_gap=self._pace.max_gap if self._arrival.stream else None,
                error_type=error.code if error else None,
            )
        )


async def _computed(pieces: Sequence[Piece], work: Callable[..., Result], *arguments: Any) -> Result:
    """What `work` makes of pieces: in a thread if they are so large that every stream would feel it."""
    if sum(len(piece.logprobs) for piece in pieces) < MANY_LOGPROBS:
        return work(*arguments)
    return await asyncio.to_thread(work, *arguments)


def log_rejection(error: ApiError, endpoint: str) -> None:
    """Log a request that never became an arrival; its message may quote the client, so it is left out."""
    fields = {"endpoint": endpoint, "status": error.status, "code": error.code}
    logger.info("request rejected", extra={"fields": fields})


async def _disconnected(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
