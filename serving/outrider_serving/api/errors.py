"""Errors in OpenAI's wire format."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from starlette.responses import JSONResponse

INVALID_REQUEST = "invalid_request_error"
RATE_LIMIT = "rate_limit_error"
SERVER_ERROR = "server_error"


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
    return ApiError(503, reason, kind=SERVER_ERROR, code="not_ready", headers={"Retry-After": "5"})
