"""Whole answers and streams over HTTP, from an engine that does what it is told."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Iterator
from typing import Any

import httpx
import pytest

from outrider_serving.api import exchange
from outrider_serving.api.app import create_app
from outrider_serving.api.records import Outcome, RequestRecord, Verdict
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.records import GraphCounts, PageCounts
from outrider_serving.engine.types import (
    DeadlineError,
    Delta,
    EngineError,
    FinishReason,
    QueueFullError,
    Request,
    TokenLogprobs,
)
from outrider_serving.settings import ModelState, Objective, PodSettings, RequestLimits, default_settings
from outrider_serving.suffix.lookup import HistorySize
from serving.tiny import CHAT_TEMPLATE
from unit.api.vocabularies import BYTES

OBJECTIVE = Objective(ttft_milliseconds=60_000, tpot_milliseconds=60_000)


class Engine:
    """Commits the tokens of a text, k + 1 times for choice k, two by two; then it may pause, or fail.

    The first commit is half a second after the request was received, then one token takes a second.
    """

    running = waiting = 0
    unready = failure = proposer_trouble = None
    pages = PageCounts()
    graphs = GraphCounts()
    kernels = ""
    history = HistorySize()
    suffix_compiled = True

    def __init__(self, text: str, *, pause: float = 0.0, end: Exception | None = None) -> None:
        self.text, self.pause, self.end = text, pause, end
        self.asked: list[Request] = []
        self.closed: list[str] = []

    def set_settings(self, settings: PodSettings) -> None:
        """Nothing depends on them."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        self.asked.append(request)
        tokens = BYTES(self.text * (request.params.choice + 1)).input_ids
        try:
            if request.params.prompt_logprobs is not None:
                asked = tuple(self._scores(request.prompt[1:], request.params.prompt_logprobs))
                yield Delta(request.id, (), request.received, prompt_logprobs=asked, reused=1)
            for start in range(0, len(tokens), 2):
                await asyncio.sleep(0)
                step = tuple(tokens[start : start + 2])
                last = start + 2 >= len(tokens) and not (self.pause or self.end)
                yield Delta(
                    request.id,
                    step,
                    request.received + 0.5 + start,
                    proposed=2,
                    depth=2,
                    accepted=1,
                    logprobs=tuple(self._scores(step, request.params.logprobs)),
                    finish_reason=FinishReason.LENGTH if last else None,
                )
            await asyncio.sleep(self.pause)
            if self.end:
                raise self.end
        finally:
            self.closed.append(request.id)

    @staticmethod
    def _scores(tokens: Any, likeliest: int | None) -> Iterator[TokenLogprobs]:
        if likeliest is not None:
            for token in tokens:
                yield TokenLogprobs(-float(token), ((2, -0.125), (3, -2.5))[:likeliest])


class Late(Engine):
    """Begins with the first choice last."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.02 / (request.params.choice + 1))
        async for delta in super().generate(request):
            yield delta


class Reversed(Engine):
    """Commits three tokens for each choice at once, for the first one two seconds after the second."""

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        await asyncio.sleep(0.01 * request.params.choice)
        committed = request.received + 2.5 - 2 * request.params.choice
        tokens = tuple(BYTES("xyz").input_ids)
        yield Delta(request.id, tokens, committed, finish_reason=FinishReason.LENGTH)


class Recorded(Serving):
    """Keeps its records."""

    def __init__(self, settings: PodSettings) -> None:
        super().__init__(served_name="m", settings=settings, keys=None)
        self.records: list[RequestRecord] = []

    def record(self, record: RequestRecord) -> None:
        self.records.append(record)
        super().record(record)


Make = Callable[..., Recorded]


@pytest.fixture
def make() -> Iterator[Make]:
    made: list[Serving] = []

    def make_one(engine: Engine, limits: RequestLimits | None = None, max_waiting: int = 256) -> Recorded:
        changes = {"objective": OBJECTIVE, "requests": limits or RequestLimits()}
        serving = Recorded(default_settings().model_copy(update=changes))
        made.append(serving)
        encoder = TextEncoder(
            BYTES, vocab_size=len(BYTES), chat_template=CHAT_TEMPLATE, max_waiting=max_waiting
        )
        state = ModelState(name="m", revision="r", dtype="float32", context_length=200)
        serving.serve(ServedModel(state, engine, encoder))
        return serving

    yield make_one
    for serving in made:
        serving.close()


async def ask(serving: Serving, path: str = "completions", **fields: Any) -> httpx.Response:
    asked = {"prompt": "the"} if path == "completions" else {"messages": [{"role": "user", "content": "x"}]}
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        return await client.post(f"/v1/{path}", json={"model": "m"} | asked | fields)


def events(answer: httpx.Response) -> list[dict[str, Any]]:
    """The events of a stream that ended as it should."""
    assert answer.status_code == 200, answer.text
    *found, done, rest = answer.text.split("\n\n")
    assert (done, rest) == ("data: [DONE]", "")
    return [json.loads(event.removeprefix("data: ")) for event in found]


async def test_choices_in_one_answer(make: Make) -> None:
    engine = Engine("cat sat")
    serving = make(engine)
    answer = (await ask(serving, n=3, seed=5)).json()
    assert [(choice["index"], choice["text"]) for choice in answer["choices"]] == [
        (0, "cat sat"),
        (1, "cat satcat sat"),
        (2, "cat satcat satcat sat"),
    ]
    one = len(BYTES("cat sat").input_ids)
    prompt = len(BYTES("the").input_ids)
    assert answer["usage"]["prompt_tokens"] == prompt
    assert answer["usage"]["completion_tokens"] == sum(
        len(BYTES("cat sat" * count).input_ids) for count in (1, 2, 3)
    )
    assert answer["usage"]["completion_tokens"] > 5 * one
    assert {request.group for request in engine.asked} == {answer["id"]}
    (record,) = serving.records
    assert (record.outcome, record.verdict) == (Outcome.COMPLETED, Verdict.MET)
    assert record.usage.completion_tokens == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("path", ["completions", "chat/completions"])
async def test_choices_in_one_stream(make: Make, path: str) -> None:
    serving = make(Engine("cat sat"))
    found = events(await ask(serving, path, n=2, stream=True, stream_options={"include_usage": True}))
    *chunks, last = found
    texts, reasons = ["", ""], []
    for chunk in chunks:
        (choice,) = chunk["choices"]
        texts[choice["index"]] += choice.get("text") or choice.get("delta", {}).get("content") or ""
        reasons += [choice["index"]] if choice["finish_reason"] == "length" else []
    assert texts == ["cat sat", "cat satcat sat"]
    assert sorted(reasons) == [0, 1]
    assert last["choices"] == []
    assert last["usage"]["completion_tokens"] == serving.records[0].usage.completion_tokens
    assert len({chunk["id"] for chunk in found}) == 1
    opening = [chunk["choices"][0] for chunk in chunks if "role" in chunk["choices"][0].get("delta", {})]
    assert [choice["index"] for choice in opening] == ([] if path == "completions" else [0, 1])


async def test_a_stop_string_ends_the_answer_and_the_request(make: Make) -> None:
    engine = Engine("abcdef#!ghijkl")
    serving = make(engine)
    answer = (await ask(serving, stop=["#!"])).json()
    assert (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]) == ("abcdef", "stop")
    assert len(engine.closed) == 1
    found = events(await ask(serving, stop=["#!"], stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in found) == "abcdef"
    assert found[-1]["choices"][0]["finish_reason"] == "stop"


@pytest.mark.parametrize("many", [exchange.MANY_LOGPROBS, 1])
async def test_an_echo_with_logprobs(make: Make, monkeypatch: pytest.MonkeyPatch, many: int) -> None:
    """However it is computed, on the event loop or beside it."""
    monkeypatch.setattr(exchange, "MANY_LOGPROBS", many)
    serving = make(Engine("cat"))
    choice = (await ask(serving, echo=True, logprobs=1)).json()["choices"][0]
    assert choice["text"] == "thecat"
    tokens = [*BYTES("the").input_ids, *BYTES("cat").input_ids]
    logprobs = choice["logprobs"]
    assert "".join(logprobs["tokens"]) == "thecat"
    assert logprobs["token_logprobs"] == [None, *(-float(token) for token in tokens[1:])]
    assert logprobs["top_logprobs"][0] is None
    assert all(len(top) == 2 for top in logprobs["top_logprobs"][1:])
    assert [choice["text"][offset] for offset in logprobs["text_offset"]] == [
        token[0] for token in logprobs["tokens"]
    ]
    streamed = events(await ask(serving, echo=True, logprobs=1, stream=True))
    assert "".join(chunk["choices"][0]["text"] for chunk in streamed) == "thecat"
    names = ("tokens", "token_logprobs", "top_logprobs", "text_offset")
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed]
    assert {name: [item for part in parts for item in part[name]] for name in names} == logprobs


@pytest.mark.parametrize("stream", [False, True])
async def test_an_echo_is_scored_once_for_all_choices(make: Make, *, stream: bool) -> None:
    """The second choice has nothing of its own to score the prompt with, and comes before the first."""
    engine = Late("cat")
    answer = await ask(make(engine), echo=True, logprobs=1, n=3, stream=stream)
    chunks = events(answer) if stream else [answer.json()]
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    texts, logprobs = [""] * 3, [list[float | None]() for _ in range(3)]
    for choice in choices:
        texts[choice["index"]] += choice["text"]
        logprobs[choice["index"]] += choice["logprobs"]["token_logprobs"]
    prompt, own = BYTES("the").input_ids, BYTES("cat").input_ids
    assert texts == ["thecat", "thecatcat", "thecatcatcat"]
    assert logprobs[0] == [None, *(-float(token) for token in [*prompt, *own][1:])]
    assert [scores[: len(logprobs[0])] for scores in logprobs] == [logprobs[0]] * 3
    assert [request.params.prompt_logprobs for request in engine.asked].count(None) == 2


async def test_choices_that_are_read_out_of_order_are_timed_by_the_clock(make: Make) -> None:
    serving = make(Reversed("a"))
    assert (await ask(serving, n=2)).status_code == 200
    (record,) = serving.records
    assert record.ttft == pytest.approx(0.5)
    assert record.tpot == pytest.approx(2 / (record.usage.completion_tokens / 2 - 1))
    assert b"gen_ai_server_time_per_output_token_seconds_count" in serving.telemetry.exposition()


async def test_a_prompt_is_refused_where_too_many_wait_to_be_encoded(make: Make) -> None:
    serving = make(Engine("cat"), max_waiting=1)
    answers = await asyncio.gather(*(ask(serving, prompt="the cat " * 20) for _ in range(12)))
    refused = [answer for answer in answers if answer.status_code != 200]
    assert 0 < len(refused) <= 10
    for answer in refused:
        assert (answer.status_code, answer.json()["error"]["code"]) == (429, "queue_full")
        assert int(answer.headers["retry-after"]) >= 1
    assert [record.outcome for record in serving.records].count(Outcome.REFUSED) == len(refused)


async def test_a_request_that_the_shutdown_ends_is_told_when_to_come_again(make: Make) -> None:
    serving = make(Engine("cat", pause=60))
    asking = asyncio.create_task(ask(serving))
    await asyncio.sleep(0.05)
    serving.expired.set()
    answer = await asking
    assert (answer.status_code, answer.json()["error"]["code"]) == (503, "shutdown")
    assert int(answer.headers["retry-after"]) >= 1


async def test_a_whole_answer_is_timed_by_its_commits(make: Make) -> None:
    """By those of tokens, which a prompt's logprobs are not, and by the tokens of one choice."""
    tokens = len(BYTES("cat sat").input_ids)
    for fields, longest, mean in (
        ({"echo": True, "logprobs": 0}, tokens, tokens),
        ({"n": 2}, 2 * tokens, 1.5 * tokens),
    ):
        serving = make(Engine("cat sat"))
        assert (await ask(serving, **fields)).status_code == 200
        (record,) = serving.records
        assert record.ttft == pytest.approx(0.5)
        assert record.tpot == pytest.approx((longest - 1) // 2 * 2 / (mean - 1))
        assert record.max_gap is None


async def test_logprobs_of_a_chat(make: Make) -> None:
    serving = make(Engine("cat é"))
    whole = (await ask(serving, "chat/completions", logprobs=True, top_logprobs=2)).json()["choices"][0]
    content = whole["logprobs"]["content"]
    assert bytes(byte for item in content for byte in item["bytes"]).decode() == "cat é"
    assert all(len(item["top_logprobs"]) == 2 for item in content)
    streamed = events(await ask(serving, "chat/completions", logprobs=True, top_logprobs=2, stream=True))
    parts = [chunk["choices"][0]["logprobs"] for chunk in streamed if chunk["choices"][0]["logprobs"]]
    assert [item for part in parts for item in part["content"]] == content


async def test_acceptance_by_position(make: Make) -> None:
    answer = (await ask(make(Engine("abcd")), speculation={"positions": True})).json()
    found = answer["usage"]["speculation"]
    steps = found["verification_steps"]
    assert steps > 1
    assert found["proposed_by_position"] == [steps, steps]
    assert found["accepted_by_position"] == [steps]
    assert (found["accepted_tokens"], found["accepted_length"]) == (steps, 1.0)


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize(
    "engine", [Engine("", pause=30), Engine("", end=DeadlineError("too late"))], ids=["slow", "exact"]
)
async def test_a_deadline_before_the_first_text(make: Make, stream: bool, engine: Engine) -> None:
    serving = make(engine)
    answer = await ask(serving, stream=stream, timeout=0.05)
    assert answer.status_code == 504
    error = answer.json()["error"]
    assert (error["type"], error["code"]) == ("timeout_error", "timeout")
    assert answer.headers["x-should-retry"] == "false"
    assert answer.headers["x-request-id"] == serving.records[0].id
    assert engine.asked[-1].deadline is not None
    assert len(engine.closed) == len(engine.asked)
    (record,) = serving.records
    assert (record.outcome, record.verdict, record.error_type) == (
        Outcome.TIMED_OUT,
        Verdict.MISSED,
        "timeout",
    )


@pytest.mark.parametrize(
    "engine", [Engine("ab", pause=30), Engine("ab", end=DeadlineError("too late"))], ids=["slow", "exact"]
)
async def test_a_deadline_within_a_stream(make: Make, engine: Engine) -> None:
    serving = make(engine, RequestLimits(timeout_seconds=0.2))
    answer = await ask(serving, stream=True)
    *first, last, rest = answer.text.split("\n\n")
    assert first
    assert rest == ""
    assert json.loads(last.removeprefix("data: "))["error"]["code"] == "timeout"
    (record,) = serving.records
    assert (record.outcome, record.verdict) == (Outcome.TIMED_OUT, Verdict.MISSED)
    assert record.usage.completion_tokens > 0


async def test_an_answer_in_time(make: Make) -> None:
    serving = make(Engine("ab"), RequestLimits(timeout_seconds=60))
    assert (await ask(serving)).json()["choices"][0]["text"] == "ab"
    assert serving.records[0].outcome is Outcome.COMPLETED


async def test_a_failure_of_the_engine_that_looks_like_a_timeout_is_none(make: Make) -> None:
    serving = make(Engine("", end=TimeoutError("of something else")))
    assert (await ask(serving, timeout=60)).json()["error"]["code"] == "internal"
    assert serving.records[0].outcome is Outcome.FAILED


@pytest.mark.parametrize(
    ("end", "status", "outcomes"),
    [
        (QueueFullError(3, 3), 429, [Outcome.REFUSED]),
        (EngineError("it broke"), 500, [Outcome.FAILED]),
        (ValueError("too large for the pages"), 400, []),
    ],
)
async def test_failures_before_the_first_text(
    make: Make, end: Exception, status: int, outcomes: list[Outcome]
) -> None:
    serving = make(Engine("", end=end))
    answer = await ask(serving, n=2)
    assert answer.status_code == status
    assert str(end) in answer.json()["error"]["message"]
    assert [record.outcome for record in serving.records] == outcomes


async def test_what_the_settings_forbid_is_no_arrival(make: Make) -> None:
    serving = make(Engine("ab"), RequestLimits(timeout_seconds=5, speculation_override=False))
    for param, value in (("speculation", {"proposer": "none"}), ("timeout", 6)):
        answer = await ask(serving, **{param: value})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, param)
        assert answer.json()["error"]["code"] == "forbidden_by_settings"
    assert serving.records == []


async def test_tokens_come_one_by_one_and_at_an_even_pace_where_the_settings_want_it(make: Make) -> None:
    """The engine commits two at a time, all at once."""
    serving = make(Engine("xyzxyz"), RequestLimits(token_milliseconds=30))
    started = time.monotonic()
    answer = await ask(serving, stream=True, stream_options={"include_usage": True})
    took = time.monotonic() - started
    chunks = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == list("xyzxyz")
    assert took >= 5 * 0.03
    assert chunks[-1]["usage"]["completion_tokens"] == 6
    assert "speculation" not in chunks[-1]["usage"]
    (record,) = serving.records
    assert (record.usage.verification_steps, record.usage.accepted_tokens) == (3, 3)
    assert record.tpot is not None
    assert record.tpot >= 0.03
    assert record.max_gap is not None


async def test_a_failure_comes_after_the_tokens_that_wait_for_their_turn(make: Make) -> None:
    serving = make(Engine("xyzxyz", end=EngineError("it broke")), RequestLimits(token_milliseconds=5))
    answer = await ask(serving, stream=True)
    chunks = [json.loads(line[5:]) for line in answer.text.splitlines() if line.startswith("data: {")]
    assert [chunk["choices"][0]["text"] for chunk in chunks[:-1]] == list("xyzxyz")
    assert "it broke" in chunks[-1]["error"]["message"]


async def test_a_client_that_hangs_up_cancels_every_choice(make: Make) -> None:
    engine = Engine("ab", pause=30)
    serving = make(engine)
    body = json.dumps({"model": "m", "prompt": "the", "n": 3, "stream": True}).encode()
    incoming = [{"type": "http.request", "body": body, "more_body": False}]
    written = asyncio.Event()

    async def receive() -> dict[str, Any]:
        if incoming:
            return incoming.pop()
        await written.wait()
        return {"type": "http.disconnect"}

    async def send(message: Any) -> None:
        if message.get("body"):
            written.set()

    scope = {
        "type": "http",
        "method": "POST",
        "path": "/v1/completions",
        "headers": [],
        "query_string": b"",
        "app": None,
    }
    await asyncio.wait_for(create_app(serving)(scope, receive, send), 5)
    assert len(engine.asked) == 3
    assert sorted(engine.closed) == sorted(request.id for request in engine.asked)
    assert [record.outcome for record in serving.records] == [Outcome.CANCELLED]
