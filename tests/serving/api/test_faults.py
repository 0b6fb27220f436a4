"""Failures that the real engine cannot be made to have: each has its answer and its count."""

import asyncio
import json
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families
from starlette.requests import Request as HttpRequest

from outrider_serving.api.app import create_app
from outrider_serving.api.body import read_json_object
from outrider_serving.api.errors import ApiError
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.process.child import Ending, Reason
from outrider_serving.engine.records import GraphCounts, PageCounts
from outrider_serving.engine.types import (
    DeadlineError,
    Delta,
    EngineClosedError,
    EngineError,
    FinishReason,
    QueueFullError,
    Request,
)
from outrider_serving.settings import ModelState, Objective, PodSettings, default_settings
from outrider_serving.suffix.lookup import HistorySize
from serving.tiny import make_tokenizer

TOKENIZER = make_tokenizer()

BODY = {"model": "m", "prompt": "abc", "max_tokens": 4}


def delta(text: str, finish_reason: FinishReason | None = None) -> Delta:
    return Delta("r", tuple(TOKENIZER(text).input_ids), 0.0, finish_reason=finish_reason)


TEXT = delta("some text")
END = Delta("r", (TOKENIZER.eos_token_id,), 0.0, finish_reason=FinishReason.STOP)


HALF, REST = [
    Delta("r", tuple(ids), 0.0) for ids in (TOKENIZER("é").input_ids[:1], TOKENIZER("é").input_ids[1:])
]
"""A character of two tokens."""


class ScriptedEngine:
    """Yields or raises what its script says."""

    running = waiting = 0
    proposer_trouble = None
    pages = PageCounts()
    graphs = GraphCounts()
    kernels = ""
    history = HistorySize()
    suffix_compiled = True

    def __init__(self, *script: Delta | Exception) -> None:
        self.script = script
        self.failure: str | None = None
        self.unready: str | None = None

    def set_settings(self, settings: PodSettings) -> None:
        """Nothing depends on them."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        for step in self.script:
            if isinstance(step, Exception):
                raise step
            yield step


Make = Callable[[ScriptedEngine], Serving]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Serving] = []

    def make_one(engine: ScriptedEngine) -> Serving:
        settings = default_settings().model_copy(
            update={"objective": Objective(ttft_milliseconds=60_000, tpot_milliseconds=60_000)}
        )
        serving = Serving(served_name="m", settings=settings, keys=None)
        state = ModelState(name="m", revision="r", dtype="float32", context_length=64)
        serving.serve(ServedModel(state, engine, TextEncoder(TOKENIZER, vocab_size=len(TOKENIZER))))
        made.append(serving)
        return serving

    yield make_one
    for serving in made:
        serving.close()


async def ask(serving: Serving, **fields: Any) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        return await client.post("/v1/completions", json=BODY | fields)


def counted(serving: Serving) -> list[tuple[str, str]]:
    return [
        (sample.labels["outcome"], sample.labels["objective"])
        for family in text_string_to_metric_families(serving.telemetry.exposition().decode())
        for sample in family.samples
        if sample.name == "outrider_requests_total"
    ]


def gauge(serving: Serving, name: str) -> float:
    return sum(
        sample.value
        for family in text_string_to_metric_families(serving.telemetry.exposition().decode())
        for sample in family.samples
        if sample.name == name
    )


async def health(serving: Serving) -> dict[str, tuple[int, str]]:
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        answers = {path: await client.get(path) for path in ("/healthz", "/readyz")}
    return {path: (answer.status_code, answer.text) for path, answer in answers.items()}


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    ("error", "status", "code", "outcome"),
    [
        (QueueFullError(9, 9, retry_after=3), 429, "queue_full", "refused"),
        (EngineClosedError("closing"), 503, "engine_closed", "refused"),
        (DeadlineError("its time is over"), 504, "timeout", "timed_out"),
        (EngineError("it broke"), 500, "engine_error", "failed"),
        (RuntimeError("a secret"), 500, "internal", "failed"),
    ],
)
async def test_before_the_first_text(
    make: Make, stream: bool, error: Exception, status: int, code: str, outcome: str
) -> None:
    serving = make(ScriptedEngine(error))
    answer = await ask(serving, stream=stream)
    assert (answer.status_code, answer.json()["error"]["code"]) == (status, code)
    assert answer.headers.get("retry-after") == {429: "3", 503: "5"}.get(status)
    assert "secret" not in answer.text
    assert counted(serving) == [(outcome, "missed")]


@pytest.mark.parametrize("error", [EngineError("it broke"), EngineClosedError("closing"), RuntimeError("x")])
async def test_within_a_stream(make: Make, error: Exception) -> None:
    serving = make(ScriptedEngine(TEXT, error))
    answer = await ask(serving, stream=True)
    assert answer.status_code == 200
    first, last = [json.loads(line.removeprefix("data: ")) for line in answer.text.split("\n\n")[:-1]]
    assert first["choices"][0]["text"] == "some text"
    assert last["error"]["type"] == "server_error"
    assert counted(serving) == [("failed", "missed")]


async def test_within_a_whole_answer(make: Make) -> None:
    serving = make(ScriptedEngine(TEXT, EngineError("it broke")))
    answer = await ask(serving)
    assert answer.status_code == 500
    assert "it broke" in answer.json()["error"]["message"]


@pytest.mark.parametrize("stream", [True, False])
async def test_after_a_token_that_was_not_written(make: Make, stream: bool) -> None:
    """Nothing was written, so there is a status, but tokens were made: that is no refusal."""
    serving = make(ScriptedEngine(HALF, EngineClosedError("closing")))
    assert (await ask(serving, stream=stream)).status_code == 503
    assert counted(serving) == [("failed", "missed")]


@pytest.mark.parametrize("stream", [True, False])
async def test_an_engine_that_forgets_to_end(make: Make, stream: bool) -> None:
    serving = make(ScriptedEngine(TEXT))
    assert "without a reason" in (await ask(serving, stream=stream)).text
    assert counted(serving) == [("failed", "missed")]


async def test_a_text_that_comes_late_is_the_first_write(make: Make) -> None:
    serving = make(ScriptedEngine(HALF, REST, END))
    answer = await ask(serving, stream=True)
    assert answer.text.endswith("data: [DONE]\n\n")
    assert answer.text.count("data: ") == 3
    assert counted(serving) == [("completed", "met")]


async def test_an_engine_that_is_restarted(make: Make) -> None:
    """Not ready, alive: requests are refused and told to come again, until it serves as before."""
    engine = ScriptedEngine(TEXT, END)
    serving = make(engine)
    assert (await health(serving)) == {"/healthz": (200, "ok\n"), "/readyz": (200, "ok\n")}
    engine.pages = PageCounts(9, 3, 2)
    assert [gauge(serving, f"outrider_pages_{name}") for name in ("total", "held", "cached")] == [9, 3, 2]
    engine.graphs = GraphCounts(15, 2)
    graphs = [gauge(serving, f"outrider_target_graphs_{name}") for name in ("captured", "fallbacks")]
    assert graphs == [15, 2]
    engine.history = HistorySize(3, 1000, 64_000, 7)
    sizes = [
        gauge(serving, f"outrider_history_{name}") for name in ("tenants", "tokens", "size_bytes", "evicted")
    ]
    assert sizes == [3, 1000, 64_000, 7]
    assert gauge(serving, "outrider_suffix_compiled") == 1
    engine.unready = "the engine's process was ended by signal 9, and is being restarted"
    serving.record_ending(Ending(Reason.DIED, "was ended by signal 9"))
    assert (await health(serving)) == {
        "/healthz": (200, "ok\n"),
        "/readyz": (503, f"{engine.unready}\n"),
    }
    assert not serving.pod_state.ready
    refused = await ask(serving)
    assert (refused.status_code, refused.headers["retry-after"]) == (503, "5")
    assert "signal 9" in refused.json()["error"]["message"]
    assert counted(serving) == [("refused", "missed")]
    assert gauge(serving, "outrider_ready") == 0
    assert gauge(serving, "outrider_engine_restarts_total") == 1
    engine.unready = None
    assert (await ask(serving)).status_code == 200


async def test_an_engine_that_cannot_be_restarted(make: Make) -> None:
    engine = ScriptedEngine()
    serving = make(engine)
    engine.unready = engine.failure = "the device is gone"
    assert (await health(serving)) == dict.fromkeys(("/healthz", "/readyz"), (503, "the device is gone\n"))


@pytest.mark.parametrize("path", ["/v1/completions/", "/v1/chat/completions/", "/v1/models/", "/healthz/"])
async def test_a_slash_too_many_is_not_found(make: Make, path: str) -> None:
    """No redirection, which a client may follow without its key or its body."""
    transport = httpx.ASGITransport(create_app(make(ScriptedEngine())))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        answer = await client.request("GET" if path in ("/v1/models/", "/healthz/") else "POST", path)
    assert answer.status_code == 404
    assert answer.json()["error"]["type"] == "invalid_request_error"


async def test_a_body_that_does_not_arrive() -> None:
    async def receive() -> Any:
        await asyncio.sleep(60)

    request = HttpRequest({"type": "http", "headers": []}, receive)
    with pytest.raises(ApiError) as refused:
        await read_json_object(request, limit=10, patience=0.01)
    assert refused.value.status == 408
