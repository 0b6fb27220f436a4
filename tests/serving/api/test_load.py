"""More requests than there is room for, and requests that take too long: on a real server."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from serving.api.conftest import Start
from serving.api.process import ServerProcess, eventually


def ask(server: ServerProcess, tokens: int, **more: Any) -> openai.types.Completion | openai.APIStatusError:
    extra = {"ignore_eos": True, "speculation": {"proposer": "none"}, **more}
    try:
        return server.client().completions.create(
            model="tiny", prompt="a b c", max_tokens=tokens, extra_body=extra
        )
    except openai.APIStatusError as error:
        return error


def test_a_full_queue_refuses_with_retry_after_and_recovers(tiny: Path, start: Start) -> None:
    server = start(str(tiny), "--served-name", "tiny", "--max-running", "1", "--max-waiting", "2").ready()
    with ThreadPoolExecutor(12) as crowd:
        answers = list(crowd.map(lambda _: ask(server, 400), range(12)))
    refused = [answer for answer in answers if isinstance(answer, openai.APIStatusError)]
    served = [answer for answer in answers if not isinstance(answer, openai.APIStatusError)]
    assert len(served) >= 3
    assert refused
    for error in refused:
        assert (error.status_code, error.code) == (429, "queue_full")
        assert int(error.response.headers["retry-after"]) >= 1
    assert all(answer.usage and answer.usage.completion_tokens == 400 for answer in served)
    assert server.metric("outrider_requests_total", outcome="refused") == len(refused)
    assert not isinstance(ask(server, 4), openai.APIStatusError)


def test_prompts_that_wait_to_be_encoded_are_bounded_too(tiny: Path, start: Start) -> None:
    server = start(str(tiny), "--served-name", "tiny", "--max-running", "1", "--max-waiting", "2").ready()
    long = [{"role": "user", "content": "the cat " * 100_000}]

    def converse(_: int) -> openai.APIStatusError:
        with pytest.raises(openai.APIStatusError) as refused:
            server.client().chat.completions.create(model="tiny", messages=long, max_tokens=1)
        return refused.value

    with ThreadPoolExecutor(12) as crowd:
        refused = list(crowd.map(converse, range(12)))
    assert {error.code for error in refused} == {"queue_full", "context_length_exceeded"}
    busy = [error for error in refused if error.status_code == 429]
    assert all(int(error.response.headers["retry-after"]) >= 1 for error in busy)
    assert server.metric("outrider_requests_total", outcome="refused") == len(busy)
    assert not isinstance(ask(server, 4), openai.APIStatusError)


def test_forms_that_wait_to_be_checked_are_bounded_too(tiny: Path, start: Start) -> None:
    server = start(str(tiny), "--served-name", "tiny", "--max-waiting", "2").ready()
    # A second's work, at the end of which it is found to have no instance.
    items = [{"type": "integer", "minimum": 1234567 * n, "maximum": 98765432123 * n} for n in range(1300)]
    items.append({"type": "integer", "minimum": 2, "maximum": 1})
    hopeless = {"json": {"type": "array", "prefixItems": items, "minItems": len(items)}}

    def constrained(form: dict[str, Any]) -> openai.types.Completion | openai.APIStatusError:
        # Ids do not wait to be encoded.
        return ask(server, 1, prompt=[5, 6], structured_outputs=form, ignore_eos=False)

    with ThreadPoolExecutor(12) as crowd:
        answers = list(crowd.map(constrained, [hopeless] * 12))
    errors = [error for error in answers if isinstance(error, openai.APIStatusError)]
    busy = [error for error in errors if error.status_code == 429]
    checked = [error for error in errors if error.param == "structured_outputs.json"]
    assert len(busy) + len(checked) == 12
    assert busy
    assert len(checked) >= 3
    assert all(error.code == "queue_full" and error.response.headers["retry-after"] for error in busy)
    assert server.metric("outrider_requests_total", outcome="refused") == len(busy)
    assert not isinstance(constrained({"regex": "a"}), openai.APIStatusError)


def test_a_timeout_is_a_504_or_the_last_event_and_counts_as_missed(tiny: Path, start: Start) -> None:
    server = start(str(tiny), "--served-name", "tiny").ready()
    late = ask(server, 6000, timeout=0.4)
    assert isinstance(late, openai.APIStatusError)
    assert (late.status_code, late.code) == (504, "timeout")
    stream = server.client().completions.create(
        model="tiny",
        prompt="a",
        max_tokens=6000,
        stream=True,
        extra_body={"ignore_eos": True, "timeout": 0.4},
    )
    with pytest.raises(openai.APIError, match="timeout"):
        assert [chunk.choices[0].text for chunk in stream] == []
    assert server.metric("outrider_requests_total", outcome="timed_out") == 2
    eventually(lambda: server.metric("outrider_requests_running") == 0)
