"""Labels and limits fixed at arrival, figures of the context, and what reaches the engine."""

import asyncio
import threading
import tracemalloc
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import pytest

from outrider_serving.api.completion import Echo
from outrider_serving.api.errors import ApiError
from outrider_serving.api.forms import Forms
from outrider_serving.api.parse import parse_chat, parse_completion
from outrider_serving.api.prepare import MAX_WHOLE_LOGPROBS, Arrival, Call, arrive, check_tokens, prepare
from outrider_serving.api.schema import Body
from outrider_serving.api.state import ServedModel
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.types import Labels, Request, SamplingClass, SamplingParams, SpeculationOverride
from outrider_serving.settings import (
    Method,
    Objective,
    PodSettings,
    RequestLimits,
    Workload,
    default_settings,
)
from outrider_serving.tenancy import Whose
from serving.tiny import CHAT_TEMPLATE
from unit.api.vocabularies import BYTES

OWN = Objective(ttft_milliseconds=1, tpot_milliseconds=1)
DEFAULT = Objective(ttft_milliseconds=2, tpot_milliseconds=2)
SETTINGS = PodSettings(
    generation=7,
    arms=default_settings().arms,
    in_force="stable",
    workloads=[Workload(name="agents", objective=OWN), Workload(name="chat")],
    objective=DEFAULT,
)
CONTEXT = 100
VOCABULARY = len(BYTES)
FORM = {"structured_outputs": {"regex": "a"}}


@pytest.fixture(scope="module")
def model() -> Iterator[ServedModel]:
    """All that preparing needs of a model: no engine."""
    encoder = TextEncoder(BYTES, vocab_size=VOCABULARY, chat_template=CHAT_TEMPLATE, eos_token_ids=[1, 5])
    forms = Forms()
    yield with_context(CONTEXT, encoder, forms)
    encoder.close()
    forms.close()


def with_context(tokens: int, encoder: TextEncoder, forms: Forms) -> ServedModel:
    state = SimpleNamespace(context_length=tokens)
    limits = {"max_running": 32, "max_waiting": 256}
    return cast("ServedModel", SimpleNamespace(state=state, encoder=encoder, forms=forms, **limits))


def completion(**fields: Any) -> Body:
    return parse_completion({"model": "m", "prompt": "a"} | fields)


def arrival(
    body: Body | None = None,
    header: str | None = None,
    settings: PodSettings = SETTINGS,
    endpoint: str = "completions",
) -> Arrival:
    return arrive(
        body or completion(),
        settings,
        request_id="id",
        endpoint=endpoint,
        whose=Whose("red", "reds"),
        workload_header=header,
        received=1.0,
    )


async def prepared(model: ServedModel, body: Body) -> Call:
    return await prepare(body, arrival(body), model)


async def request(model: ServedModel, **fields: Any) -> Request:
    (made,) = (await prepared(model, completion(**fields))).requests
    return made


async def refusal(model: ServedModel, **fields: Any) -> ApiError:
    with pytest.raises(ApiError) as refused:
        await prepared(model, completion(**fields))
    assert refused.value.status == 400
    return refused.value


@pytest.mark.parametrize(
    ("header", "metadata", "workload", "objective"),
    [
        (None, {}, "other", DEFAULT),
        ("agents", {}, "agents", OWN),
        (None, {"workload": "agents"}, "agents", OWN),
        ("chat", {"workload": "agents"}, "chat", DEFAULT),
        ("unheard-of", {"workload": "agents"}, "other", DEFAULT),
        (None, {"workload": "x" * 500}, "other", DEFAULT),
    ],
)
def test_workloads(header: str | None, metadata: dict[str, str], workload: str, objective: Objective) -> None:
    made = arrival(completion(metadata=metadata), header)
    assert made.labels == Labels(workload, "completions", SamplingClass.SAMPLED, "stable", 7)
    assert made.objective == objective


@pytest.mark.parametrize(
    ("fields", "sampling_class"),
    [
        ({}, SamplingClass.SAMPLED),
        ({"temperature": 0}, SamplingClass.GREEDY),
        ({"temperature": 0, "structured_outputs": {"regex": "a"}}, SamplingClass.CONSTRAINED),
        ({"response_format": {"type": "json_object"}}, SamplingClass.CONSTRAINED),
        ({"response_format": {"type": "text"}}, SamplingClass.SAMPLED),
    ],
)
async def test_the_sampling_class(
    model: ServedModel, fields: dict[str, Any], sampling_class: SamplingClass
) -> None:
    assert arrival(completion(**fields)).labels.sampling_class is sampling_class
    assert (await request(model, **fields)).params.sampling_class is sampling_class


@pytest.mark.parametrize(
    ("limit", "timeout", "deadline"),
    [(None, None, None), (None, 2.5, 3.5), (10.0, None, 11.0), (10.0, 2.5, 3.5), (10.0, 10, 11.0)],
)
def test_the_deadline(limit: float | None, timeout: float | None, deadline: float | None) -> None:
    settings = SETTINGS.model_copy(update={"requests": RequestLimits(timeout_seconds=limit)})
    assert arrival(completion(timeout=timeout), settings=settings).deadline == deadline


def test_a_timeout_beyond_the_servers() -> None:
    settings = SETTINGS.model_copy(update={"requests": RequestLimits(timeout_seconds=10)})
    with pytest.raises(ApiError, match=r"timeout: 10\.5 was given, but .* at most 10 seconds") as refused:
        arrival(completion(timeout=10.5), settings=settings)
    assert (refused.value.status, refused.value.param) == (400, "timeout")


def test_settings_can_forbid_the_choice_of_a_proposer() -> None:
    settings = SETTINGS.model_copy(update={"requests": RequestLimits(speculation_override=False)})
    for speculation in ({"proposer": "none"}, {"max_depth": 2}):
        with pytest.raises(ApiError) as refused:
            arrival(completion(speculation=speculation), settings=settings)
        error = refused.value
        assert (error.status, error.param, error.code) == (400, "speculation", "forbidden_by_settings")
    # Asking for figures overrides nothing.
    assert arrival(completion(speculation={"positions": True}), settings=settings).id == "id"


async def test_everything_reaches_the_engine(model: ServedModel) -> None:
    made = await request(
        model,
        prompt=[2, 3, 4],
        temperature=0.5,
        top_p=0.9,
        top_k=7,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias={"8": -100, "9": 2.5},
        allowed_token_ids=[8, 9],
        banned_token_ids=[9],
        seed=4,
        stop_token_ids=[11],
        min_tokens=2,
        max_tokens=5,
        ignore_eos=True,
        logprobs=3,
        echo=True,
        store=False,
        timeout=2,
        speculation={"proposer": "ngram", "max_depth": 2},
    )
    assert made.params == SamplingParams(
        max_tokens=5,
        min_tokens=2,
        temperature=0.5,
        top_k=7,
        top_p=0.9,
        min_p=0.1,
        presence_penalty=0.2,
        frequency_penalty=-0.3,
        repetition_penalty=1.1,
        logit_bias=((8, -100.0), (9, 2.5)),
        allowed_token_ids=(8, 9),
        banned_token_ids=(9,),
        seed=4,
        stop_token_ids=(11,),
        ignore_eos=True,
        logprobs=3,
        prompt_logprobs=3,
    )
    assert made == Request(
        id="id",
        prompt=(2, 3, 4),
        params=made.params,
        labels=Labels("other", "completions", SamplingClass.SAMPLED, "stable", 7),
        tenant="red",
        history="reds",
        private=True,
        group="id",
        deadline=3.0,
        speculation=SpeculationOverride(Method.NGRAM, 2),
        received=1.0,
    )


async def test_what_is_not_said_does_nothing(model: ServedModel) -> None:
    made = await request(model)
    assert made.params == SamplingParams(max_tokens=16)
    assert (made.private, made.deadline, made.speculation) == (False, None, SpeculationOverride())


@pytest.mark.parametrize("top_k", [0, -1, VOCABULARY, 2**62])
async def test_a_top_k_of_all(model: ServedModel, top_k: int) -> None:
    assert (await request(model, top_k=top_k)).params.top_k == 0


async def test_choices_differ_in_their_number_only(model: ServedModel) -> None:
    call = await prepared(model, completion(n=3, seed=5, stop=["x"]))
    assert call.stops == ("x",)
    assert [request.id for request in call.requests] == ["id", "id-1", "id-2"]
    assert [request.params.choice for request in call.requests] == [0, 1, 2]
    alike = {replace(each, id="", params=replace(each.params, choice=0)) for each in call.requests}
    assert len(alike) == 1


async def test_an_echoed_prompt_is_scored_for_one_choice_only(model: ServedModel) -> None:
    call = await prepared(model, completion(n=3, echo=True, logprobs=2))
    assert [request.params.prompt_logprobs for request in call.requests] == [2, None, None]
    assert [request.params.logprobs for request in call.requests] == [2, 2, 2]


async def test_a_text_that_cannot_fit_is_refused_without_being_encoded(
    model: ServedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    longest = max(len(BYTES.decode([token])) for token in range(VOCABULARY))
    error = await refusal(model, prompt="x" * ((CONTEXT - 1) * longest))
    assert f"at least {CONTEXT}" not in error.message  # by its tokens

    def encode(*_: Any) -> None:
        raise AssertionError("it was encoded")

    monkeypatch.setattr(type(BYTES), "__call__", encode)
    error = await refusal(model, prompt="x" * (CONTEXT * longest))
    assert (error.param, error.code) == ("prompt", "context_length_exceeded")
    assert f"at least {CONTEXT} tokens" in error.message


async def test_logprobs_of_the_prompt_are_for_an_echo(model: ServedModel) -> None:
    params = (await request(model, logprobs=2)).params
    assert (params.logprobs, params.prompt_logprobs) == (2, None)
    params = (await request(model, echo=True)).params
    assert (params.logprobs, params.prompt_logprobs) == (None, None)


@pytest.mark.parametrize("prompt", ["the cat é", BYTES("the cat é").input_ids])
async def test_an_echo_is_the_prompts_text(model: ServedModel, prompt: Any) -> None:
    echo = (await prepared(model, completion(prompt=prompt, echo=True, logprobs=0))).echo
    assert echo is not None
    assert echo.offsets is not None
    assert echo.text == "the cat é"
    assert len(echo.offsets) == len(BYTES("the cat é").input_ids)
    assert (echo.offsets[0], echo.offsets[-1]) == (0, len("the cat "))
    assert (await prepared(model, completion(prompt=prompt, echo=True))).echo == Echo("the cat é")
    assert (await prepared(model, completion(prompt=prompt))).echo is None


async def test_a_chat(model: ServedModel) -> None:
    body = parse_chat({"model": "m", "messages": [{"role": "user", "content": "hi"}], "logprobs": True})
    call = await prepared(model, body)
    (made,) = call.requests
    assert BYTES.decode(list(made.prompt)) == "<user>hi\n<assistant>"
    assert made.params.max_tokens == CONTEXT - len(made.prompt)
    assert (made.params.logprobs, call.echo) == (0, None)


SCHEMA = {"type": "object", "properties": {"a": {"type": "integer"}}, "required": ["a"]}


@pytest.mark.parametrize(
    "fields",
    [
        {"structured_outputs": {"regex": "[a-c]+"}},
        {"structured_outputs": {"choice": ["yes", "no"]}},
        {"structured_outputs": {"json": SCHEMA}},
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": SCHEMA}}},
    ],
)
async def test_a_form_reaches_the_engine_as_a_grammar(model: ServedModel, fields: dict[str, Any]) -> None:
    assert (await request(model, **fields)).params.grammar


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"structured_outputs": {"regex": "("}}, "structured_outputs.regex"),
        ({"structured_outputs": {"choice": []}}, "structured_outputs.choice"),
        ({"structured_outputs": {"json": {"type": 5}}}, "structured_outputs.json"),
        (
            {
                "response_format": {
                    "type": "json_schema",
                    "json_schema": {"name": "a", "schema": {"type": "colour"}},
                }
            },
            "response_format.json_schema.schema",
        ),
    ],
)
async def test_a_form_that_no_grammar_has(model: ServedModel, fields: dict[str, Any], param: str) -> None:
    error = await refusal(model, **fields)
    assert error.param == param
    assert error.message.startswith(f"{param}: ")


async def test_a_form_waits_for_no_work_but_forms(model: ServedModel) -> None:
    end, pool = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    busy = asyncio.create_task(asyncio.to_thread(end.wait, 60))
    try:
        assert (await request(model, structured_outputs={"regex": "a"})).params.grammar
        assert not busy.done()
    finally:
        end.set()
        await busy


@pytest.mark.parametrize("param", ["allowed_token_ids", "banned_token_ids", "stop_token_ids", "logit_bias"])
@pytest.mark.parametrize("token", [VOCABULARY, 10**15])
async def test_ids_beyond_the_vocabulary(model: ServedModel, param: str, token: int) -> None:
    value = {str(token): 1} if param == "logit_bias" else [3, token]
    error = await refusal(model, **{param: value})
    assert (error.param, error.code) == (param, "invalid_token")
    assert f"0 to {VOCABULARY - 1}" in error.message


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"allowed_token_ids": [3, 4], "banned_token_ids": [4, 3]}, "allowed_token_ids"),
        ({"banned_token_ids": list(range(VOCABULARY))}, "banned_token_ids"),
        (
            {
                "banned_token_ids": [token for token in range(VOCABULARY) if token not in (1, 5, 7)],
                "stop_token_ids": [7],
                "min_tokens": 1,
            },
            "banned_token_ids",
        ),
        ({"allowed_token_ids": [1, 5], "min_tokens": 1}, "allowed_token_ids"),
        ({"allowed_token_ids": [1, 7], "stop_token_ids": [7], "min_tokens": 1}, "allowed_token_ids"),
    ],
)
async def test_no_token_is_left(model: ServedModel, fields: dict[str, Any], param: str) -> None:
    error = await refusal(model, **fields)
    assert error.param == param
    assert "no token is left" in error.message


@pytest.mark.parametrize(
    "fields",
    [
        {"allowed_token_ids": [1]},
        {"allowed_token_ids": [1], "min_tokens": 1, "ignore_eos": True},
        {"allowed_token_ids": [1, 8], "min_tokens": 1},
        {"banned_token_ids": list(range(VOCABULARY - 1))},
        {"banned_token_ids": list(range(VOCABULARY - 1)), "min_tokens": 1},
    ],
)
async def test_some_token_is_left(model: ServedModel, fields: dict[str, Any]) -> None:
    assert (await request(model, **fields)).params.max_tokens == 16


def test_one_banned_token_costs_no_copy_of_the_vocabulary() -> None:
    body = completion(banned_token_ids=[5], min_tokens=1)
    tracemalloc.start()
    try:
        check_tokens(body, 262_144, frozenset({1}))
        assert tracemalloc.get_traced_memory()[1] < 100_000
    finally:
        tracemalloc.stop()


@pytest.mark.parametrize(
    ("prompt", "fields"),
    [
        (10, {"max_tokens": 10_000, "n": 10, "logprobs": 9}),
        (5000, {"max_tokens": 10_000, "n": 10, "logprobs": 9}),
        (5000, {"max_tokens": 5000, "n": 10, "logprobs": 9, "echo": True}),
        (10, {"max_tokens": 62_500, "n": 16, "logprobs": 0}),
    ],
)
async def test_a_whole_answer_has_at_most_a_million_logprobs(
    model: ServedModel, prompt: int, fields: dict[str, Any]
) -> None:
    large = with_context(200_000, model.encoder, model.forms)
    fields["prompt"] = [2] * prompt
    assert (await prepared(large, completion(**fields))).requests
    fields["max_tokens"] += 1
    error = await refusal(large, **fields)
    assert (error.param, error.code) == ("logprobs", "answer_too_large")
    tokens = fields["max_tokens"] + (prompt if "echo" in fields else 0)
    total = fields["n"] * tokens * (fields["logprobs"] + 1)
    for figure in (total, MAX_WHOLE_LOGPROBS, fields["n"], tokens, fields["max_tokens"], "stream"):
        assert str(figure) in error.message
    assert (await prepared(large, completion(**fields, stream=True))).requests
    assert (await prepared(large, completion(**fields | {"logprobs": None}))).requests


@pytest.mark.parametrize(
    ("tenant", "form", "most"), [("", {}, 6), ("someone", {}, 4), ("", FORM, 2), ("someone", FORM, 1)]
)
async def test_more_choices_than_the_engine_ever_takes_at_once_are_refused(
    model: ServedModel, tenant: str, form: dict[str, Any], most: int
) -> None:
    """By `share_of`: a tenant leaves others as many places as it has; and forms wait where nothing runs."""
    small = cast("ServedModel", SimpleNamespace(**vars(model) | {"max_running": 4, "max_waiting": 2}))
    body, larger = completion(n=most, **form), completion(n=most + 1, **form)
    theirs = replace(arrival(body), whose=Whose(tenant, None))
    assert len((await prepare(body, theirs, small)).requests) == most
    with pytest.raises(ApiError, match=f"n: {most + 1} was given.* has {most} for one request") as refused:
        await prepare(larger, theirs, small)
    assert (refused.value.status, refused.value.param) == (400, "n")


async def test_logprobs_of_a_whole_chat_are_counted_up_to_its_own_limit(model: ServedModel) -> None:
    large = with_context(100_000, model.encoder, model.forms)
    fields = {
        "model": "m",
        "messages": [{"role": "user", "content": "hi"}],
        "logprobs": True,
        "top_logprobs": 20,
    }
    with pytest.raises(ApiError, match="by max_tokens") as refused:
        await prepared(large, parse_chat(fields))
    assert refused.value.param == "logprobs"
    with pytest.raises(ApiError, match="50000 by max_completion_tokens"):
        await prepared(large, parse_chat(fields | {"max_completion_tokens": 50_000}))
    assert (await prepared(large, parse_chat(fields | {"max_completion_tokens": 40_000}))).requests


@pytest.mark.parametrize(
    ("prompt", "fields", "limit"),
    [
        (10, {}, 16),
        (95, {}, 5),
        (10, {"max_tokens": 90}, 90),
        (99, {"max_tokens": 1}, 1),
        (10, {"max_tokens": 3, "min_tokens": 3}, 3),
    ],
)
async def test_limits(model: ServedModel, prompt: int, fields: dict[str, Any], limit: int) -> None:
    assert (await request(model, prompt=[2] * prompt, **fields)).params.max_tokens == limit


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "figures"),
    [
        (10, {"max_tokens": 91}, "max_tokens", ("91", "10", "100", "90")),
        (100, {}, "prompt", ("100",)),
        (250, {"max_tokens": 1}, "prompt", ("250", "100")),
        (10, {"min_tokens": 17}, "min_tokens", ("17", "16", "max_tokens")),
        (10, {"max_tokens": 5, "min_tokens": 6}, "min_tokens", ("6", "5")),
    ],
)
async def test_beyond_the_limits(
    model: ServedModel, prompt: int, fields: dict[str, Any], param: str, figures: tuple[str, ...]
) -> None:
    error = await refusal(model, prompt=[2] * prompt, **fields)
    assert error.param == param
    assert all(figure in error.message for figure in figures)


@pytest.mark.parametrize("param", ["max_tokens", "min_tokens"])
async def test_an_enormous_limit_is_not_repeated_whole(model: ServedModel, param: str) -> None:
    assert len((await refusal(model, **{param: 10**4000})).message) < 300


async def test_a_chat_beyond_the_context_names_its_own_fields(model: ServedModel) -> None:
    for content, param in (("x", "max_completion_tokens"), ("x" * 100, "messages")):
        body = parse_chat(
            {
                "model": "m",
                "messages": [{"role": "user", "content": content}],
                "max_completion_tokens": CONTEXT,
            }
        )
        with pytest.raises(ApiError) as refused:
            await prepare(body, arrival(body, endpoint="chat_completions"), model)
        assert refused.value.param == param
