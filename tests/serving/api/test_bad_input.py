"""What cannot be answered gets a clear error that names the field, and the server goes on."""

import gzip
import json
import socket
from collections.abc import Iterator
from typing import Any

import httpx
import openai
import pytest

from serving.api.conftest import KEY
from serving.api.process import ServerProcess

TURN = {"role": "user", "content": "x"}
GOOD = {"model": "tiny", "prompt": "a", "max_tokens": 1}


@pytest.fixture(autouse=True)
def _goes_on(server: ServerProcess) -> Iterator[None]:
    yield
    assert post(server, GOOD).status_code == 200


def post(server: ServerProcess, body: Any, path: str = "/v1/completions", **headers: str) -> httpx.Response:
    content = body if isinstance(body, bytes) else json.dumps(body).encode()
    headers = {"authorization": f"Bearer {KEY}"} | headers
    return httpx.post(server.url + path, content=content, headers=headers, timeout=30)


def error(answer: httpx.Response, status: int = 400) -> dict[str, Any]:
    assert answer.status_code == status, answer.text
    found = answer.json()["error"]
    assert found.keys() == {"message", "type", "param", "code"}
    assert found["message"]
    return dict(found)


@pytest.mark.parametrize(
    ("body", "param", "says"),
    [
        ({"prompt": "a"}, "model", "required"),
        (GOOD | {"temperature": 9}, "temperature", "9 was given"),
        (GOOD | {"max_tokens": 0}, "max_tokens", "greater than or equal to 1"),
        (GOOD | {"max_tokens": 8192}, "max_tokens", "8192"),
        (GOOD | {"prompt": ""}, "prompt", "empty"),
        (GOOD | {"prompt": []}, "prompt", "empty"),
        (GOOD | {"prompt": [320]}, "prompt", "0 to"),
        (GOOD | {"prompt": [-1]}, "prompt", "0 to"),
        (GOOD | {"prompt": [2**70]}, "prompt", "0 to"),
        (GOOD | {"prompt": "ab " * 20_000}, "prompt", "8192"),
        (GOOD | {"prompt": 5}, "prompt", "string"),
        (GOOD | {"n": 17}, "n", "less than or equal to 16"),
        (GOOD | {"top_k": -2}, "top_k", "greater than or equal to -1"),
        (GOOD | {"best_of": 2}, "best_of", "not supported"),
        (GOOD | {"suffix": "x"}, "suffix", "not supported"),
        (GOOD | {"logit_bias": {"320": 1}}, "logit_bias", "0 to 319"),
        (GOOD | {"allowed_token_ids": [1], "min_tokens": 1}, "allowed_token_ids", "no token is left"),
        (GOOD | {"min_tokens": 2}, "min_tokens", "at most 1 tokens"),
        (GOOD | {"store": True}, "store", "false or null"),
        (GOOD | {"structured_outputs": {"regex": "("}}, "structured_outputs.regex", "regular expression"),
        (
            GOOD | {"structured_outputs": {"json": {"type": "string", "pattern": 5}}},
            "structured_outputs.json",
            "schema",
        ),
    ],
)
def test_a_field_at_fault_is_named(server: ServerProcess, body: Any, param: str, says: str) -> None:
    found = error(post(server, body))
    assert found["param"] == param
    assert says in found["message"]


def test_a_model_that_is_not_served(server: ServerProcess) -> None:
    found = error(post(server, GOOD | {"model": "gpt-4"}), 404)
    assert (found["param"], found["code"]) == ("model", "model_not_found")
    assert "'tiny'" in found["message"]


@pytest.mark.parametrize(
    ("raw", "code"),
    [(b'{"model": ', "invalid_json"), (b'{"model": "\xff"}', "invalid_utf8"), (b"", "invalid_json")],
)
def test_bytes_that_are_no_json(server: ServerProcess, raw: bytes, code: str) -> None:
    assert error(post(server, raw))["code"] == code


def test_two_megabytes_of_prompt(server: ServerProcess) -> None:
    assert error(post(server, GOOD | {"prompt": "x" * 2_000_000}), 413)["code"] == "request_too_large"
    with pytest.raises(openai.APIStatusError) as refused:
        server.client(KEY).completions.create(model="tiny", prompt="x" * 2_000_000)
    assert refused.value.status_code == 413


def test_two_megabytes_in_pieces_of_undeclared_length(server: ServerProcess) -> None:
    pieces = (b"x" * 10_000 for _ in range(200))
    answer = httpx.post(
        server.url + "/v1/completions",
        content=pieces,
        headers={"authorization": f"Bearer {KEY}"},
        timeout=30,
    )
    assert "1048576" in error(answer, 413)["message"]


def test_a_body_that_never_comes(server: ServerProcess) -> None:
    host, port = server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as connection:
        connection.sendall(
            b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 100\r\n"
            b"authorization: Bearer " + KEY.encode() + b"\r\n\r\n{"
        )


def test_unknown_routes_and_methods(server: ServerProcess) -> None:
    error(post(server, GOOD, "/v1/embeddings"), 404)
    error(server.get("/v1/completions"), 405)


def test_the_content_type_does_not_matter(server: ServerProcess) -> None:
    assert post(server, GOOD, **{"content-type": "text/plain"}).status_code == 200


def test_a_template_that_refuses(server: ServerProcess) -> None:
    body = {"model": "tiny", "messages": [TURN, {"role": "robot", "content": "x"}]}
    found = error(post(server, body, "/v1/chat/completions"))
    assert found["param"] == "messages[1].role"


def test_a_compressed_body_is_refused_by_name(server: ServerProcess) -> None:
    body = gzip.compress(json.dumps(GOOD).encode())
    found = error(post(server, body, **{"content-encoding": "gzip"}), 415)
    assert found["code"] == "unsupported_encoding"
    assert "gzip" in found["message"]
    assert post(server, GOOD, **{"content-encoding": "identity"}).status_code == 200
