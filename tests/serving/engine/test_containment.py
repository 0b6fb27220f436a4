"""What fails after a target pass fails the requests whose work it was, and leaves nothing wrong behind."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from outrider_serving.engine import passes, telling
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.runner import ModelRunner, Pass
from outrider_serving.engine.types import EngineError
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling import verification
from serving.engine import proposers
from serving.engine.support import NONE, Bench, bench, building, reference, request, run

PROMPT = [5, 6, 7, 8] * 4
OTHER = [9, 8, 7] * 3

Fails = Callable[..., bool]


def without_memory(monkeypatch: pytest.MonkeyPatch, place: Any, name: str, fails: Fails) -> None:
    """Let a function find no memory where `fails` says so of its arguments."""
    real = getattr(place, name)

    def called(*arguments: Any) -> Any:
        if fails(*arguments):
            raise torch.OutOfMemoryError("CUDA out of memory")
        return real(*arguments)

    monkeypatch.setattr(place, name, called)


def test_logprobs_for_which_there_is_no_memory_fail_their_request_alone(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_memory(monkeypatch, telling, "token_logprobs", lambda _logits, _tokens, top: 20 in top)
    engine = bench(tiny_llama)
    plain, few, many = engine.run(request(OTHER), request(OTHER, logprobs=1), request(PROMPT, logprobs=20))
    assert isinstance(many.error, EngineError)
    assert not many.tokens
    expected = reference(tiny_llama, OTHER, 32)
    assert (plain.tokens, few.tokens) == (expected, expected)
    assert len(few.logprobs) == len(expected)
    assert engine.core.pages.held == 0


def test_a_verification_without_memory_is_done_one_by_one(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    without_memory(monkeypatch, verification, "highest", lambda logits: len(logits) > 1)
    results = run(tiny_llama, *(request(prompt, speculation=NONE) for prompt in (PROMPT, OTHER)))
    assert [result.tokens for result in results] == [reference(tiny_llama, p, 32) for p in (PROMPT, OTHER)]


def test_the_requests_of_a_move_that_fails_fail_alone(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = [*PROMPT, *reference(tiny_llama, PROMPT, 32)]
    without_memory(monkeypatch, KVStore, "move", lambda *_: True)
    engine = bench(tiny_llama, build=building(proposers.Bushy([text])))
    moved, plain = engine.run(request(PROMPT), request(OTHER, speculation=NONE))
    assert isinstance(moved.error, EngineError)
    assert plain.tokens == reference(tiny_llama, OTHER, 32)
    assert engine.core.pages.held == 0


def test_passes_that_cannot_be_joined_fail_their_requests_and_no_later_one(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = bench(tiny_llama)
    with monkeypatch.context() as short:
        without_memory(short, ModelRunner, "run", lambda _self, batch, _layers: len(batch.segments) > 1)
        without_memory(short, passes, "joined", lambda _passes: True)
        results = engine.run(request(PROMPT), request(OTHER))
    assert all(isinstance(result.error, EngineError) for result in results)
    assert engine.run(request(PROMPT))[0].tokens == reference(tiny_llama, PROMPT, 32)


def spoil_first_pass(monkeypatch: pytest.MonkeyPatch) -> None:
    """The first pass leaves values in its pages that are no numbers."""
    real, passes = ModelRunner.run, iter(range(1_000_000))

    def called(self: ModelRunner, batch: Any, layers: Any = ()) -> Pass:
        ran = real(self, batch, layers)
        if next(passes) == 0:
            for _, values in self._store.pairs:
                values[batch.slots] = float("nan")
        return ran

    monkeypatch.setattr(ModelRunner, "run", called)


def cached(engine: Bench) -> int:
    return engine.core.pages.cached


@pytest.mark.parametrize("private", [False, True])
def test_what_failed_a_request_is_not_passed_on_with_its_pages(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, private: bool
) -> None:
    spoil_first_pass(monkeypatch)
    prompt = [*range(10, 60)]
    engine = bench(tiny_llama, step_tokens=16)
    (failed,) = engine.run(request(prompt, private=private))
    assert isinstance(failed.error, EngineError)
    assert cached(engine) == 0
    (later,) = engine.run(request(prompt))
    assert later.tokens == reference(tiny_llama, prompt, 32)
    engine.core._scheduler.pool.check()


def test_a_request_that_took_over_bad_pages_ends_their_spreading(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The one that wrote them has ended without a look at them."""
    prompt = [*range(10, 60)]
    engine = bench(tiny_llama, step_tokens=64)
    engine.run(request(prompt, max_tokens=1))
    for _, values in engine.core._stepper._runner._store.pairs:
        values.fill_(float("nan"))
    assert isinstance(engine.run(request(prompt))[0].error, EngineError)
    assert cached(engine) == 0
    assert engine.run(request(prompt))[0].tokens == reference(tiny_llama, prompt, 32)


def test_a_prompt_that_is_scored_leaves_the_rest_of_the_pass_to_others(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, step_tokens=256)
    scored, other = engine.submit(
        request([*range(5, 305)], max_tokens=1, prompt_logprobs=1),
        request([*range(100, 250)], max_tokens=1, tenant="other"),
    )
    engine.step()
    assert [row.tokens for row in engine.records[0].rows] == [64, 150]
    assert other.ended
    while not scored.ended:
        engine.step()
    assert [record.rows[0].tokens for record in engine.records] == [64, 64, 64, 64, 44]
    assert len(scored.deltas[0].prompt_logprobs) == 299


def test_pages_that_were_found_are_counted_also_where_the_first_turn_is_a_later_one(
    tiny_llama: LoadedModel,
) -> None:
    warm = [11] * 40
    engine = bench(tiny_llama, build=building(proposers.Fixed(5)), step_tokens=16, max_running=8)
    engine.run(request(warm, max_tokens=1))
    engine.records.clear()
    engine.submit(request([7, 8], max_tokens=60, ignore_eos=True))
    engine.step()
    engine.step()
    results = engine.run(
        request([*range(50, 120)], max_tokens=4, ignore_eos=True),
        request(warm, max_tokens=4, ignore_eos=True),
    )
    told = sum(result.deltas[0].reused for result in results)
    assert told == sum(row.reused for record in engine.records for row in record.rows) == 36
