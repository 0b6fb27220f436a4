"""Labels fixed at arrival, and figures of the context."""

from typing import Any

import pytest

from outrider_serving.api.errors import ApiError
from outrider_serving.api.parse import parse_chat, parse_completion
from outrider_serving.api.prepare import DEFAULT_COMPLETION_TOKENS, Arrival, arrive, engine_request
from outrider_serving.engine.types import Labels, Request, SamplingClass, SpeculationOverride
from outrider_serving.settings import Method, Objective, PodSettings, Workload, default_settings

OWN = Objective(ttft_milliseconds=1, tpot_milliseconds=1)
DEFAULT = Objective(ttft_milliseconds=2, tpot_milliseconds=2)
SETTINGS = PodSettings(
    generation=7,
    arms=default_settings().arms,
    in_force="stable",
    workloads=[Workload(name="agents", objective=OWN), Workload(name="chat")],
    objective=DEFAULT,
)


def arrival(header: str | None = None, **fields: Any) -> Arrival:
    return arrive(
        parse_completion({"model": "m", "prompt": "a"} | fields),
        SETTINGS,
        request_id="id",
        endpoint="completions",
        tenant="red",
        workload_header=header,
        received=1.0,
    )


def request(prompt: int, context: int = 100, default: int | None = None, **fields: Any) -> Request:
    body = parse_completion({"model": "m", "prompt": "a"} | fields)
    return engine_request(
        arrival(**fields), body, tuple(range(prompt)), context_length=context, default_limit=default
    )


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
    made = arrival(header, metadata=metadata)
    assert made.labels == Labels(workload, "completions", SamplingClass.SAMPLED, "stable", 7)
    assert made.objective == objective


def test_the_sampling_class() -> None:
    assert arrival(temperature=0).labels.sampling_class is SamplingClass.GREEDY


def test_everything_reaches_the_engine() -> None:
    made = request(
        3,
        temperature=0.5,
        top_p=0.9,
        seed=4,
        stop="x",
        max_tokens=5,
        ignore_eos=True,
        speculation={"proposer": "ngram", "max_depth": 2},
    )
    assert made.prompt == (0, 1, 2)
    params = made.params
    assert (params.max_tokens, params.temperature, params.top_p, params.seed) == (5, 0.5, 0.9, 4)
    assert (params.stop, params.ignore_eos) == (("x",), True)
    assert made.speculation == SpeculationOverride(Method.NGRAM, 2)
    assert (made.id, made.tenant, made.received) == ("id", "red", 1.0)


@pytest.mark.parametrize(
    ("prompt", "default", "fields", "limit"),
    [
        (10, None, {}, 90),
        (10, DEFAULT_COMPLETION_TOKENS, {}, 16),
        (95, DEFAULT_COMPLETION_TOKENS, {}, 5),
        (10, DEFAULT_COMPLETION_TOKENS, {"max_tokens": 90}, 90),
        (99, None, {"max_tokens": 1}, 1),
    ],
)
def test_limits(prompt: int, default: int | None, fields: dict[str, Any], limit: int) -> None:
    assert request(prompt, default=default, **fields).params.max_tokens == limit


@pytest.mark.parametrize(
    ("prompt", "fields", "param", "figures"),
    [
        (10, {"max_tokens": 91}, "max_tokens", ("91", "10", "100", "90")),
        (100, {}, "prompt", ("100",)),
        (250, {"max_tokens": 1}, "prompt", ("250", "100")),
    ],
)
def test_beyond_the_context(
    prompt: int, fields: dict[str, Any], param: str, figures: tuple[str, ...]
) -> None:
    with pytest.raises(ApiError) as refused:
        request(prompt, **fields)
    assert (refused.value.status, refused.value.param) == (400, param)
    assert all(figure in refused.value.message for figure in figures)


def test_an_enormous_limit_is_not_repeated_whole() -> None:
    with pytest.raises(ApiError) as refused:
        request(10, max_tokens=10**4000)
    assert len(refused.value.message) < 300


def test_a_chat_beyond_the_context_names_its_own_fields() -> None:
    body = parse_chat(
        {"model": "m", "messages": [{"role": "user", "content": "x"}], "max_completion_tokens": 99}
    )
    made = arrive(
        body,
        SETTINGS,
        request_id="id",
        endpoint="chat_completions",
        tenant="",
        workload_header=None,
        received=0.0,
    )
    with pytest.raises(ApiError) as refused:
        engine_request(made, body, (1, 2), context_length=100, default_limit=None)
    assert refused.value.param == "max_completion_tokens"
    with pytest.raises(ApiError) as refused:
        engine_request(made, body, tuple(range(100)), context_length=100, default_limit=None)
    assert refused.value.param == "messages"
