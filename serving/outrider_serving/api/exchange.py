"""One request from its acceptance to its end: tokens onto the wire, and one RequestRecord."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing

from starlette.responses import JSONResponse, Response
from starlette.types import Receive, Scope, Send

from outrider_serving.api import wire
from outrider_serving.api.errors import RATE_LIMIT, SERVER_ERROR, ApiError
from outrider_serving.api.pace import Pace
from outrider_serving.api.prepare import Arrival
from outrider_serving.api.records import Outcome, RequestRecord
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.engine.types import (
    Chunk,
    EngineClosedError,
    EngineError,
    QueueFullError,
    Request,
    Usage,
)

logger = logging.getLogger(__name__)

ERROR_WRITE_SECONDS = 1.0
"""How long a last error may take to be written to a client that does not read."""

STREAM_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

Prepare = Callable[[ServedModel], Awaitable[Request]]


class Exchange(Response):
    """Answers one arrival. It ends when the answer is written, the client hangs up, or the server must stop.

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
        """`prepare` makes the engine's request; an ApiError (4xx) of it means that there was no arrival."""
        self._serving = serving
        self._arrival = arrival
        self._spelling = spelling
        self._prepare = prepare
        self._include_usage = include_usage
        self._pace = Pace(arrival.received)
        self._usage = Usage()
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
            if error is not None:
                await self._write_error(error, scope, receive, send)
            self._record(outcome, error)
        finally:
            for task in (work, gone, expired):
                task.cancel()

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        model = self._serving.model
        request = await self._prepare(model)
        async with aclosing(model.engine.generate(request)) as chunks:
            if self._arrival.stream:
                await self._stream(chunks, send)
            else:
                await self._whole(chunks, scope, receive, send)
        self._complete = True

    async def _whole(self, chunks: AsyncIterator[Chunk], scope: Scope, receive: Receive, send: Send) -> None:
        text: list[str] = []
        finish = None
        async for chunk in chunks:
            self._usage = chunk.usage
            self._pace.mark(chunk.committed_at)
            text.append(chunk.text)
            finish = chunk.finish_reason
        if finish is None:
            raise EngineError("the engine ended a completion without a reason")
        body = self._spelling.whole("".join(text), finish, self._usage)
        await JSONResponse(body, headers={"x-request-id": self._arrival.id})(scope, receive, send)

    async def _stream(self, chunks: AsyncIterator[Chunk], send: Send) -> None:
        finish = None
        async for chunk in chunks:
            self._usage = chunk.usage
            finish = chunk.finish_reason
            if chunk.text or finish:
                await self._write(b"".join(map(wire.event, self._spelling.piece(chunk.text, finish))), send)
        if finish is None:
            raise EngineError("the engine ended a completion without a reason")
        last = wire.event(self._spelling.usage(self._usage)) if self._include_usage else b""
        await send({"type": "http.response.body", "body": last + wire.DONE})

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
            )
            return Outcome.FAILED, error
        error = _api_error(work.exception())
        refused = error.status in (429, 503) and not self._started
        return (Outcome.REFUSED if refused else Outcome.FAILED), error

    def _record(self, outcome: Outcome, error: ApiError | None) -> None:
        if error is not None and error.status < 500 and error.status != 429:
            log_rejection(error, self._arrival.labels.endpoint)
            return
        self._serving.record(
            RequestRecord(
                id=self._arrival.id,
                model=self._arrival.model,
                tenant=self._arrival.tenant,
                labels=self._arrival.labels,
                stream=self._arrival.stream,
                outcome=outcome,
                duration=time.monotonic() - self._arrival.received,
                usage=self._usage,
                objective=self._arrival.objective,
                ttft=self._pace.ttft,
                tpot=self._pace.tpot(self._usage.completion_tokens),
                max_gap=self._pace.max_gap if self._arrival.stream else None,
                error_type=error.code if error else None,
            )
        )


def log_rejection(error: ApiError, endpoint: str) -> None:
    """Log a request that never became an arrival; its message may quote the client, so it is left out."""
    fields = {"endpoint": endpoint, "status": error.status, "code": error.code}
    logger.info("request rejected", extra={"fields": fields})


def _api_error(error: BaseException | None) -> ApiError:
    """The answer to whatever ended the work."""
    match error:
        case ApiError():
            return error
        case QueueFullError():
            return ApiError(
                429,
                f"The server is busy: {error}.",
                kind=RATE_LIMIT,
                code="queue_full",
                headers={"Retry-After": str(error.retry_after)},
            )
        case EngineClosedError():
            return ApiError(
                503, f"The server cannot answer: {error}.", kind=SERVER_ERROR, code="engine_closed"
            )
        case EngineError():
            logger.error("the engine failed a request", exc_info=error)
            return ApiError(500, f"The request failed: {error}.", kind=SERVER_ERROR, code="engine_error")
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The request failed inside the server.", kind=SERVER_ERROR, code="internal")


async def _disconnected(receive: Receive) -> None:
    """Return when the client has hung up."""
    while (await receive())["type"] != "http.disconnect":
        pass
