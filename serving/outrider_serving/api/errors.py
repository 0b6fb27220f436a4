"""Errors in OpenAI's wire format."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

from outrider_serving.engine.types import DeadlineError, EngineClosedError, EngineError, QueueFullError

logger = logging.getLogger(__name__)

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"
TIMEOUT = "timeout_error"

RETRY_AFTER = "5"
"""Seconds after which a server that cannot answer now is worth another try."""


class ApiError(Exception):
    """A request that gets an error; `param` names the field at fault, `code` is for programs."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        kind: str = INVALID_REQUEST,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.message = message
        self.kind = kind
        self.param = param
        self.code = code
        self.headers = dict(headers or {})

    @property
    def payload(self) -> dict[str, Any]:
        """The body of the response, or the data of an error event inside a stream."""
        error = {"message": self.message, "type": self.kind, "param": self.param, "code": self.code}
        return {"error": error}

    def response(self) -> JSONResponse:
        """The HTTP response."""
        return JSONResponse(self.payload, self.status, self.headers)


def invalid(message: str, param: str | None = None, code: str | None = None) -> ApiError:
    """A 400: the request is at fault, and `message` says what is allowed."""
    return ApiError(400, message, param=param, code=code)


def not_ready(reason: str) -> ApiError:
    """A 503: this server cannot serve now, another replica or a later try may."""
    return ApiError(503, reason, kind=SERVER_ERROR, code="not_ready", headers={"Retry-After": RETRY_AFTER})


def answer_to(error: BaseException | None) -> ApiError:
    """The answer to whatever ended the work on a request; what nobody foresaw is logged, and not shown."""
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
        case DeadlineError():
            return ApiError(
                504,
                "The request had not ended when its time was over (`timeout`, or the limit of this server).",
                kind=TIMEOUT,
                code="timeout",
                # Else the stock client tries again, for as long again.
                headers={"X-Should-Retry": "false"},
            )
        case EngineClosedError():
            return ApiError(
                503,
                f"The server cannot answer: {error}.",
                kind=SERVER_ERROR,
                code="engine_closed",
                headers={"Retry-After": RETRY_AFTER},
            )
        case EngineError():
            logger.error("the engine failed a request", exc_info=error)
            return ApiError(500, f"The request failed: {error}.", kind=SERVER_ERROR, code="engine_error")
        case _:
            logger.error("a request failed", exc_info=error)
            return ApiError(500, "The request failed inside the server.", kind=SERVER_ERROR, code="internal")
