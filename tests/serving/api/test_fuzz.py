"""Whatever comes in, the answer is an answer or an error of the client's."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import event, given
from hypothesis import strategies as st

from serving.api.process import ServerProcess

CONTEXT = 40

VOCABULARY = 320

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
ids = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)
schemas = st.sampled_from(
    [
        {"type": "object"},
        {"type": "string", "maxLength": 4},
        {"enum": ["a", 1, None]},
        {"type": "array", "items": {"type": "integer"}, "maxItems": 2},
    ]
)
forms = st.one_of(
    st.fixed_dictionaries({"regex": st.sampled_from(["a+", "[ab]{2}", "(a|b)*c"])}),
    st.fixed_dictionaries({"choice": st.lists(st.sampled_from(["a", "ab", "b"]), min_size=1, max_size=3)}),
    st.fixed_dictionaries({"json": schemas}),
)
formats = st.one_of(
    st.fixed_dictionaries({"type": st.sampled_from(["text", "json_object"])}),
    schemas.map(lambda schema: {"type": "json_schema", "json_schema": {"name": "a", "schema": schema}}),
)
message = st.fixed_dictionaries(
    {"role": st.sampled_from(["system", "user", "assistant"]), "content": st.text(max_size=8)}
)
sound: dict[str, st.SearchStrategy[Any]] = {
    "prompt": st.text(min_size=1, max_size=8) | ids,
    "messages": st.lists(message, min_size=1, max_size=1),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1e-300, 1e-8]),
    "top_p": st.floats(0, 1, exclude_min=True),
    "top_k": st.integers(-1, 400),
    "min_p": st.floats(0, 1),
    "presence_penalty": st.floats(-2, 2),
    "frequency_penalty": st.floats(-2, 2),
    "repetition_penalty": st.floats(0.01, 2),
    "logit_bias": st.dictionaries(
        st.integers(0, VOCABULARY - 1).map(str), st.sampled_from([-100, 0.5, 100]), max_size=3
    ),
    "allowed_token_ids": ids,
    "banned_token_ids": ids,
    "stop_token_ids": ids,
    "seed": st.integers(-(2**63), 2**63 - 1),
    "n": st.integers(1, 3),
    "stop": st.text(min_size=1, max_size=3) | st.lists(st.text(min_size=1, max_size=3), max_size=4),
    "max_tokens": st.integers(1, 8),
    "min_tokens": st.integers(0, 2),
    "stream": st.booleans(),
    "logprobs": st.integers(0, 20),
    "echo": st.booleans(),
    "response_format": formats,
    "structured_outputs": forms,
    "timeout": st.just(60),
    "store": st.just(False),
    "speculation": st.fixed_dictionaries(
        {"max_depth": st.integers(1, 64), "positions": st.booleans()},
        optional={"proposer": st.just("ngram")},
    ),
    "ignore_eos": st.booleans(),
    "metadata": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
}
"""Values that are right by themselves."""

required = ("prompt", "messages")
some = st.sets(st.sampled_from(sorted(sound.keys() - set(required))), max_size=5)


def body_of(names: set[str], *, odd: bool) -> st.SearchStrategy[dict[str, Any]]:
    """Bodies that say something of these parameters; where `odd`, not always what they should."""
    of = {name: sound[name] | anything if odd else sound[name] for name in (*required, *names)}
    return st.fixed_dictionaries({"model": st.just("tiny"), **of})


def encoded(body: Any) -> bytes:
    """JSON as Python writes it: with lone surrogates escaped, NaN and Infinity spelled out."""
    return json.dumps(body).encode()


def fields_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """As the endpoint spells them."""
    if path == "/v1/completions":
        return {name: value for name, value in body.items() if name != "messages"}
    fields = {name: value for name, value in body.items() if name not in ("prompt", "echo")}
    if isinstance(likeliest := fields.get("logprobs"), int):
        fields |= {"logprobs": True, "top_logprobs": likeliest}
    return fields


@pytest.fixture(scope="module")
def small(tiny: Path) -> Iterator[ServerProcess]:
    """A server whose context is soon full."""
    process = ServerProcess(str(tiny), "--context-length", str(CONTEXT))
    try:
        yield process.ready()
        # Nothing of it stays behind, and nothing that came was the server's own fault.
        assert process.metric("outrider_requests_running") == 0
        assert process.metric("outrider_requests_waiting") == 0
        assert process.metric("outrider_requests_total", outcome="failed") == 0
    finally:
        process.end()


@pytest.fixture(scope="module")
def client(small: ServerProcess) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=small.url, timeout=60) as made:
        yield made


def answered(client: httpx.Client, path: str, body: dict[str, Any]) -> bool:
    """Whether a body got an answer; else it got an error that says why."""
    answer = client.post(path, content=encoded(fields_of(path, body)))
    assert answer.status_code in (200, 400, 404), answer.text
    assert '"server_error"' not in answer.text
    if answer.status_code == 200:
        return True
    assert answer.json()["error"]["message"]
    return False


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(body=some.flatmap(lambda names: body_of(names, odd=False)))
def test_what_is_right_by_itself(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    event(f"answered: {answered(client, path, body)}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(body=some.flatmap(lambda names: body_of(names, odd=True)))
def test_whatever_is_said(client: httpx.Client, path: str, body: dict[str, Any]) -> None:
    event(f"answered: {answered(client, path, body)}")


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(content=st.binary(max_size=60) | anything.map(encoded))
def test_bytes(client: httpx.Client, path: str, content: bytes) -> None:
    assert client.post(path, content=content).status_code == 400
