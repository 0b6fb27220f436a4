"""Whatever comes in, the answer is an answer or an error of the client's."""

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api.app import create_app
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TextEncoder
from outrider_serving.engine.engine import Engine
from outrider_serving.models.loading import load_model
from outrider_serving.settings import ModelState, default_settings
from serving.tiny import make_tiny_model

CONTEXT = 40

anything = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=8),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=8), inner, max_size=3),
    max_leaves=6,
)
message = st.fixed_dictionaries(
    {
        "role": st.sampled_from(["system", "user", "assistant", "tool"]),
        "content": st.text(max_size=20) | anything,
    }
)
plausible = {
    "model": st.sampled_from(["tiny", "tiny", "tiny", "other"]),
    "prompt": st.text(max_size=30) | st.lists(st.integers(-1, 400), max_size=50),
    "messages": st.lists(message, max_size=3),
    "temperature": st.floats(0, 2) | st.sampled_from([0, 1e-300, 1e-8]),
    "top_p": st.floats(0, 1),
    "seed": st.integers(-(2**63), 2**63),
    "stop": st.text(max_size=3) | st.lists(st.text(max_size=3), max_size=20),
    "max_tokens": st.integers(-1, CONTEXT),
    "stream": st.booleans(),
    "stream_options": st.fixed_dictionaries({"include_usage": st.booleans()}),
    "speculation": st.fixed_dictionaries(
        {"proposer": st.sampled_from(["none", "ngram"]), "max_depth": st.integers(0, 65)}
    ),
    "ignore_eos": st.booleans(),
    "metadata": st.dictionaries(st.text(max_size=8), st.text(max_size=8), max_size=2),
}
values = st.fixed_dictionaries(
    {"model": st.just("tiny"), "prompt": plausible["prompt"], "messages": plausible["messages"]},
    optional={
        name: value | anything
        for name, value in plausible.items()
        if name not in ("model", "prompt", "messages")
    },
)


def encoded(body: Any) -> bytes:
    """JSON as Python writes it: with lone surrogates escaped, NaN and Infinity spelled out."""
    return json.dumps(body).encode()


def fields_of(path: str, body: dict[str, Any]) -> dict[str, Any]:
    """Without the prompt of the other endpoint, so that most bodies get past the names."""
    other = "messages" if path == "/v1/completions" else "prompt"
    return {name: value for name, value in body.items() if name != other}


@pytest.fixture(scope="module")
def serving(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Serving]:
    path: Path = make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_length=CONTEXT)
    loaded = load_model(str(path))
    engine = Engine(loaded, default_settings())
    engine.start()
    encoder = TextEncoder(loaded.tokenizer, vocab_size=loaded.vocab_size)
    made = Serving(served_name="tiny", settings=default_settings(), keys=None)
    state = ModelState(name="tiny", revision="r", dtype=loaded.dtype, context_length=loaded.context_length)
    made.serve(ServedModel(state, engine, encoder))
    yield made
    made.close()


@pytest.fixture(scope="module")
def runner() -> Iterator[asyncio.Runner]:
    with asyncio.Runner() as made:
        yield made


async def post(serving: Serving, path: str, content: bytes) -> httpx.Response:
    transport = httpx.ASGITransport(create_app(serving))
    async with httpx.AsyncClient(transport=transport, base_url="http://m") as client:
        return await client.post(path, content=content)


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(body=values)
def test_objects(serving: Serving, runner: asyncio.Runner, path: str, body: dict[str, Any]) -> None:
    answer = runner.run(post(serving, path, encoded(fields_of(path, body))))
    assert answer.status_code in (200, 400, 404), answer.text
    assert '"server_error"' not in answer.text
    if answer.status_code != 200:
        assert answer.json()["error"]["message"]


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@given(content=st.binary(max_size=60) | anything.map(encoded))
def test_bytes(serving: Serving, runner: asyncio.Runner, path: str, content: bytes) -> None:
    assert runner.run(post(serving, path, content)).status_code == 400
