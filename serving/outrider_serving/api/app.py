"""The routes: the public API, and the admin port."""

from __future__ import annotations

import asyncio
import time
import uuid
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from fastapi import APIRouter, FastAPI, Request
from fastapi.responses import JSONResponse, PlainTextResponse, Response
from starlette.exceptions import HTTPException

from outrider_serving import telemetry
from outrider_serving.api.body import MAX_BODY_BYTES, read_json_object
from outrider_serving.api.errors import SERVER_ERROR, ApiError, invalid
from outrider_serving.api.exchange import Exchange, log_rejection
from outrider_serving.api.parse import parse_chat, parse_completion
from outrider_serving.api.prepare import arrive, prepare
from outrider_serving.api.records import CHAT, COMPLETIONS
from outrider_serving.api.schema import Body
from outrider_serving.api.state import Serving
from outrider_serving.api.wire import ChatFormat, CompletionFormat, Frame, WireFormat
from outrider_serving.settings import PodState
from outrider_serving.tenancy import TENANT_HEADER, TenantNameError, UntrustedGatewayError, Whose

WORKLOAD_HEADER = "x-outrider-workload"

PROBES = ["GET", "HEAD"]
"""How one may ask whether the process is well; load balancers use either."""


@dataclass(frozen=True, slots=True)
class _Endpoint:
    """What sets one way of asking apart: its telemetry label, its ids, what comes in and what goes out."""

    label: str
    id_prefix: str
    parse: Callable[[Mapping[str, Any]], Body]
    spelling: Callable[[Frame], WireFormat]


_COMPLETIONS = _Endpoint(COMPLETIONS, "cmpl", parse_completion, CompletionFormat)
_CHAT = _Endpoint(CHAT, "chatcmpl", parse_chat, ChatFormat)


def create_app(serving: Serving, *, max_body_bytes: int = MAX_BODY_BYTES) -> FastAPI:
    """The public API."""
    app = _bare_app("Outrider")
    app.include_router(_health_routes(serving))
    app.include_router(_openai_routes(serving, max_body_bytes))
    return app


def create_admin_app(serving: Serving) -> FastAPI:
    """The admin port: for the operator, never part of the Service."""
    app = _bare_app("Outrider admin")
    app.include_router(_health_routes(serving))

    @app.get("/admin/state")
    async def state() -> PodState:
        return serving.pod_state

    return app


def _bare_app(title: str) -> FastAPI:
    app = FastAPI(title=title, docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    app.add_exception_handler(ApiError, _on_api_error)
    app.add_exception_handler(HTTPException, _on_http_exception)
    app.add_exception_handler(Exception, _on_exception)
    return app


def _health_routes(serving: Serving) -> APIRouter:
    router = APIRouter()

    @router.api_route("/healthz", methods=PROBES)
    async def healthz() -> PlainTextResponse:
        return _health(serving.failure)

    @router.api_route("/readyz", methods=PROBES)
    async def readyz() -> PlainTextResponse:
        return _health(serving.unready)

    @router.get("/metrics")
    async def metrics() -> Response:
        serving.refresh()
        figures = await asyncio.to_thread(serving.telemetry.exposition)
        return Response(figures, media_type=telemetry.CONTENT_TYPE)

    return router


def _health(trouble: str | None) -> PlainTextResponse:
    return PlainTextResponse(f"{trouble or 'ok'}\n", 503 if trouble else 200)


def _openai_routes(serving: Serving, max_body_bytes: int) -> APIRouter:
    router = APIRouter(prefix="/v1")
    created = int(time.time())

    def model_object() -> dict[str, Any]:
        return {"id": serving.served_name, "object": "model", "created": created, "owned_by": "outrider"}

    @router.get("/models")
    async def models(request: Request) -> JSONResponse:
        authenticate(request, serving)
        return JSONResponse({"object": "list", "data": [model_object()]})

    @router.get("/models/{name:path}")
    async def model(request: Request, name: str) -> JSONResponse:
        authenticate(request, serving)
        _check_model(name, serving)
        return JSONResponse(model_object())

    @router.post("/completions")
    async def completions(request: Request) -> Response:
        return await _answer(request, serving, _COMPLETIONS, max_body_bytes)

    @router.post("/chat/completions")
    async def chat(request: Request) -> Response:
        return await _answer(request, serving, _CHAT, max_body_bytes)

    return router


async def _answer(request: Request, serving: Serving, endpoint: _Endpoint, max_body_bytes: int) -> Response:
    """The exchange that answers a request; ApiError where it does not become an arrival."""
    received = time.monotonic()
    whose = identify(request, serving)
    body = endpoint.parse(await read_json_object(request, limit=max_body_bytes))
    _check_model(body.model, serving)
    arrival = arrive(
        body,
        serving.settings,
        request_id=f"{endpoint.id_prefix}-{uuid.uuid4().hex}",
        endpoint=endpoint.label,
        whose=whose,
        workload_header=request.headers.get(WORKLOAD_HEADER),
        received=received,
    )
    frame = Frame(
        arrival.id,
        body.model,
        int(time.time()),
        choices=body.n,
        include_usage=body.include_usage,
        speculation=arrival.token_seconds is None,  # else it would tell what the even pace hides
        positions=body.speculation.positions,
    )
    return Exchange(
        serving,
        arrival,
        endpoint.spelling(frame),
        partial(prepare, body, arrival),
        include_usage=body.include_usage,
    )


def authenticate(request: Request, serving: Serving) -> str:
    """The tenant that the request's key belongs to, "" where the API is open; ApiError (401) otherwise."""
    if serving.keys is None:
        return ""
    scheme, _, key = request.headers.get("authorization", "").partition(" ")
    presented = key.strip() if scheme.lower() == "bearer" else ""
    tenant = serving.keys.tenant_of(presented)
    if tenant is None:
        raise ApiError(
            401,
            "Incorrect API key." if presented else "An API key is required: Authorization: Bearer KEY.",
            code="invalid_api_key",
            headers={"WWW-Authenticate": "Bearer"},
        )
    return tenant


def identify(request: Request, serving: Serving) -> Whose:
    """Whose a request is; ApiError (400, 401, 403) where that cannot be said."""
    tenant = authenticate(request, serving)
    peer = request.client.host if request.client else None
    named = request.headers.getlist(TENANT_HEADER)
    if len(named) > 1:
        raise invalid(f"{TENANT_HEADER}: it came {len(named)} times.", TENANT_HEADER, "invalid_value")
    try:
        return serving.tenancy.whose(tenant, peer, named[0] if named else None)
    except TenantNameError as error:
        raise invalid(str(error), param=TENANT_HEADER, code="invalid_value") from error
    except UntrustedGatewayError as error:
        raise ApiError(403, str(error), param=TENANT_HEADER, code="untrusted_gateway") from error


def _check_model(name: str, serving: Serving) -> None:
    if name != serving.served_name:
        raise ApiError(
            404,
            f"The model {name[:100]!r} does not exist here; this server has {serving.served_name!r}.",
            param="model",
            code="model_not_found",
        )


async def _on_api_error(request: Request, error: Exception) -> Response:
    assert isinstance(error, ApiError)
    log_rejection(error, request.url.path[:100])
    return error.response()


async def _on_http_exception(_request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    return ApiError(error.status_code, str(error.detail), headers=error.headers).response()


async def _on_exception(_request: Request, _error: Exception) -> Response:
    return ApiError(
        500, "The request failed inside the server.", kind=SERVER_ERROR, code="internal"
    ).response()
