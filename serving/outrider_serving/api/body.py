"""The body of a request: read within a limit, decoded strictly."""

from __future__ import annotations

import asyncio
from typing import Any

from jiter import from_json
from starlette.requests import ClientDisconnect, Request

from outrider_serving.api.errors import ApiError, invalid
from outrider_serving.api.wording import shown

MAX_BODY_BYTES = 1 << 20
"""Largest body that is accepted. A prompt of this size is far beyond the context of any model we serve."""

BODY_TIMEOUT = 30.0
"""Seconds that a client has to send its body."""


async def read_json_object(request: Request, *, limit: int, patience: float = BODY_TIMEOUT) -> dict[str, Any]:
    """The JSON object in the request's body; ApiError for one that is too large or slow, or no JSON."""
    encoding = request.headers.get("content-encoding", "identity")
    if encoding.lower() != "identity":
        raise ApiError(
            415,
            f"Content-Encoding: {shown(encoding)} was given, but bodies are taken uncompressed only.",
            code="unsupported_encoding",
        )
    declared = request.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise _too_large(limit, f"{int(declared)} bytes")
    try:
        async with asyncio.timeout(patience):
            raw = await _read(request, limit)
    except TimeoutError:
        raise ApiError(408, f"The body did not arrive within {patience:g} seconds.") from None
    except ClientDisconnect:
        raise ApiError(400, "The client went away before its body had arrived.") from None
    return decode(raw)


async def _read(request: Request, limit: int) -> bytes:
    body = bytearray()
    async for part in request.stream():
        if len(body) + len(part) > limit:
            raise _too_large(limit, "more than that")
        body += part
    return bytes(body)


def decode(raw: bytes) -> dict[str, Any]:
    """The JSON object that `raw` encodes; ApiError (400) for anything else."""
    try:
        raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise invalid(
            f"The body is not valid UTF-8: byte 0x{raw[error.start]:02x} at offset {error.start}.",
            code="invalid_utf8",
        ) from None
    try:
        value = from_json(raw, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as error:
        raise invalid(f"The body is not valid JSON: {error}.", code="invalid_json") from None
    if not isinstance(value, dict):
        raise invalid("The body must be a JSON object.", code="invalid_json")
    return value


def _too_large(limit: int, came: str) -> ApiError:
    return ApiError(
        413, f"The body must be at most {limit} bytes, but it has {came}.", code="request_too_large"
    )
