"""A server as a side: what is asked of it, and what is made of its streams."""

import socket
from collections.abc import Sequence
from typing import Any

import pytest

from outrider_serving.bench.http_side import Endpoint, HttpSide, parse_address
from outrider_serving.bench.results import BenchError
from outrider_serving.bench.workloads import Job, Sampling, Workload, parse_workload
from unit.bench.server import Script, serving, text, usage

OPEN = Job(parse_workload("open"), tokens=3)


def side(address: str, key: str | None = None) -> HttpSide:
    return HttpSide("a", Endpoint(parse_address(address), key))


def test_a_stream_becomes_its_text_its_arrivals_and_its_usage() -> None:
    speculation = {"verification_steps": 2, "proposed_tokens": 8, "accepted_tokens": 1}
    script = Script([text("one two"), text(" three"), text(""), usage(3, speculation=speculation), "[DONE]"])
    with serving(script) as address:
        run = side(address).run(OPEN)
    (stream,) = run.streams
    assert (stream.output, stream.tokens, stream.proposed, stream.accepted) == ("one two three", 3, 8, 1)
    assert len(stream.arrivals) == 2
    assert 0 < stream.arrivals[0] <= stream.arrivals[1] == run.seconds


def test_other_servers_do_not_tell_of_speculation() -> None:
    with serving(Script([text("a"), usage(3), "[DONE]"])) as address:
        (stream,) = side(address).run(OPEN).streams
    assert (stream.proposed, stream.accepted) == (None, None)


def test_usage_may_come_with_the_last_text() -> None:
    with serving(Script([text("a"), text("b") | {"usage": {"completion_tokens": 3}}, "[DONE]"])) as address:
        assert side(address).run(OPEN).tokens == 3


def test_a_greedy_request() -> None:
    script = Script([text("a"), usage(3), "[DONE]"])
    with serving(script) as address:
        side(address).run(OPEN)
    assert script.bodies == [
        {
            "model": "scripted",
            "prompt": OPEN.workload.prompts[0],
            "max_tokens": 3,
            "temperature": 0.0,
            "ignore_eos": True,
            "store": False,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
    ]


def test_what_is_stored_is_asked_for_before_and_may_be_remembered() -> None:
    script = Script([text("a"), usage(3), "[DONE]"])
    job = Job(Workload("agent", ("later", "last"), at_once=1, stored=("first", "second")), tokens=3)
    with serving(script) as address:
        assert side(address).prepare(job) == ()
        run = side(address).run(job)
    assert {body["prompt"]: body.get("store") for body in script.bodies} == {
        "first": None,
        "second": None,
        "later": False,
        "last": False,
    }
    first, second = run.streams
    assert first.began < first.arrivals[-1] <= second.began


def test_no_connection_waits_for_its_turn_until_the_server_closes_it() -> None:
    script = Script([text("a"), usage(3), "[DONE]"], seconds=0.2, patience=0.3)
    job = Job(Workload("agent", tuple("abcd"), at_once=1), tokens=3)
    with serving(script) as address:
        run = side(address).run(job)
    assert [body["prompt"] for body in script.bodies] == list("abcd")
    assert len(run.streams) == 4


def test_sampled_requests_of_a_batch_have_seeds_of_their_own() -> None:
    script = Script([text("a"), usage(3), "[DONE]"])
    job = Job(parse_workload("batch4"), 3, Sampling(0.8, top_p=0.9, seed=5))
    with serving(script) as address:
        run = side(address).run(job)
    assert len(run.streams) == 4
    assert sorted(body["seed"] for body in script.bodies) == [5, 6, 7, 8]
    assert {(body["temperature"], body["top_p"]) for body in script.bodies} == {(0.8, 0.9)}
    asked = {body["seed"] - 5: body["prompt"] for body in script.bodies}
    assert tuple(asked[n] for n in range(4)) == job.workload.prompts


def test_a_key_and_a_path_before_v1() -> None:
    script = Script([text("a"), usage(3), "[DONE]"])
    with serving(script) as address:
        side(f"{address}/team/v1/", key="secret").run(OPEN)
    assert [path for path, _, _ in script.asked] == ["/team/v1/models", "/team/v1/completions"]
    assert {headers["Authorization"] for _, headers, _ in script.asked} == {"Bearer secret"}


@pytest.mark.parametrize(
    ("events", "says"),
    [
        ([text("a"), usage(2), "[DONE]"], "request 0 gave 2 tokens, but 3 were asked for"),
        ([text("a"), "[DONE]"], "the stream has no usage"),
        ([usage(3), "[DONE]"], "the stream has no text"),
        ([text("a"), usage(3)], "ended without"),
        ([text("a"), {"error": {"message": "the engine failed"}}], "the engine failed"),
        (["{"], "is not understood"),
        (["[]"], "is not understood"),
        ([{"choices": [{"delta": "chat"}]}], "is not understood"),
    ],
)
def test_streams_that_measure_nothing(events: Sequence[dict[str, Any] | str], says: str) -> None:
    with serving(Script(events)) as address, pytest.raises(BenchError, match=says):
        side(address).run(OPEN)


def test_an_answer_of_another_status() -> None:
    script = Script([], status=429)
    with (
        serving(script) as address,
        pytest.raises(BenchError, match=r"/v1/completions answered 429: .*try later"),
    ):
        side(address).run(OPEN)


@pytest.mark.parametrize("models", [{}, {"data": []}, [], {"data": [{}]}])
def test_a_server_without_a_model(models: Any) -> None:
    with serving(Script([], models=models)) as address, pytest.raises(BenchError, match="names no model"):
        side(address)


def test_nobody_listens() -> None:
    with socket.socket() as bound:
        bound.bind(("127.0.0.1", 0))
        address = f"http://127.0.0.1:{bound.getsockname()[1]}"
        with pytest.raises(BenchError, match=f"a: {address} cannot be reached"):
            side(address)


@pytest.mark.parametrize(
    "given", ["", "localhost:8000", "ftp://a", "http://", "http://a:0", "http://a:x", "http://a?b"]
)
def test_what_is_no_address(given: str) -> None:
    with pytest.raises(ValueError, match="is not an address as http://HOST:PORT"):
        parse_address(given)
