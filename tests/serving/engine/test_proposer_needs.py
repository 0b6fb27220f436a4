"""What proposers get of the target: hidden states, pages for layers of their own, and memory."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch

from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Surroundings
from outrider_serving.settings import Arm, Method, PodSettings, Proposer
from serving.engine import proposers
from serving.engine.support import (
    Bench,
    bench,
    building,
    building_two,
    own_attention,
    reference,
    request,
    two_arms,
)
from serving.engine.test_greedy import PROMPTS, SHAPES, TOKENS

SHARED = list(range(100, 121))
"""Begins several prompts."""


def known(loaded: LoadedModel, prompts: list[list[int]]) -> list[list[int]]:
    return [[*prompt, *reference(loaded, prompt, TOKENS, eos=False)] for prompt in prompts]


@torch.inference_mode()
def hidden_states(loaded: LoadedModel, text: list[int]) -> tuple[torch.Tensor, ...]:
    with own_attention(loaded):
        out = loaded.model(torch.tensor([text]), use_cache=False, output_hidden_states=True)
    return tuple(layer[0] for layer in out.hidden_states)


@pytest.mark.parametrize("shape", SHAPES)
def test_every_row_of_hidden_states_is_that_of_transformers(tiny: LoadedModel, shape: str) -> None:
    """Through chunks, accepted paths of trees, hits of the prefix cache, and preemption."""
    prompts = [*PROMPTS, [*SHARED, 4], [*SHARED, 5, 6]]
    proposer = proposers.HiddenReader(known(tiny, prompts), (1, 3))
    engine = bench(tiny, Proposer(max_depth=4), build=building(proposer), **SHAPES[shape])
    checked = reused = 0
    for _ in range(2):  # the second time, prompts are in the cache
        engine.run(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts))
        for request_id, layers in proposer.rows.items():
            states = hidden_states(tiny, proposer.whole[request_id])
            first = proposer.reused[request_id]
            for layer, rows in layers.items():
                wanted = states[layer][first : first + len(rows)]
                assert len(wanted) == len(rows) >= TOKENS
                torch.testing.assert_close(torch.stack(rows), wanted, rtol=0, atol=1e-5)
                checked += len(rows)
            reused += first
        proposer.rows.clear()
    assert checked > 0
    assert reused > 0
    assert sum(row.accepted for record in engine.records for row in record.rows) > 0


@pytest.mark.parametrize("shape", SHAPES)
def test_layers_of_its_own_lie_in_the_pages_of_the_text(tiny_llama: LoadedModel, shape: str) -> None:
    prompts = [*PROMPTS, [*SHARED, 4], [*SHARED, 5, 6]]
    proposer = proposers.OwnPages(known(tiny_llama, prompts))
    engine = bench(
        tiny_llama, Proposer(max_depth=4), build=building(proposer), proposer_bytes=1 << 20, **SHAPES[shape]
    )
    for _ in range(2):
        engine.run(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts))
    assert engine.core.proposer_trouble is None
    assert sum(record.proposer_failures for record in engine.records) == 0
    assert proposer.ledger.checked > 0
    assert {begin.missing for begin in proposer.begins} == {0}
    assert max(begin.reused for begin in proposer.begins) > 0


def test_a_prefix_that_lacks_the_layers_of_the_arm_in_force_is_read_again(tiny_llama: LoadedModel) -> None:
    prompts = [[*SHARED, 4], [*SHARED, 5], [*SHARED, 6]]
    texts = known(tiny_llama, prompts)
    own = proposers.OwnPages(texts)
    wanted = [request(p, max_tokens=TOKENS, ignore_eos=True) for p in prompts]
    engine = bench(tiny_llama, settings_of(Method.NONE), build=building(own), proposer_bytes=1 << 20)
    results = engine.run(wanted[0])  # its pages hold the target's keys and values only
    engine.core.set_settings(settings_of(Method.NGRAM))
    results += engine.run(wanted[1])
    results += engine.run(wanted[2])
    assert [result.deltas[0].reused for result in results] == [0, 0, 20]
    assert [begin.missing for begin in own.begins] == [0, 0]
    assert results[1].accepted > 0
    assert results[2].accepted > 0
    for prompt, result in zip(prompts, results, strict=True):
        assert [*prompt, *result.tokens] in texts


def test_a_proposer_not_in_force_sits_out_what_it_lacks(tiny_llama: LoadedModel) -> None:
    """The arm changes while a request runs that began without the other's layers: no proposal, no harm."""
    prompt = [*SHARED, 4]
    texts = known(tiny_llama, [prompt])
    own = proposers.OwnPages(texts)
    engine = bench(tiny_llama, settings_of(Method.NONE), build=building(own), proposer_bytes=1 << 20)
    (result,) = engine.submit(request(prompt, max_tokens=TOKENS, ignore_eos=True))
    for _ in range(3):
        engine.step()
    engine.core.set_settings(settings_of(Method.NGRAM))
    finish(engine)
    assert [*prompt, *result.tokens] == texts[0]
    assert [begin.missing for begin in own.begins] == [len(prompt) + 2]
    assert (own.ledger.asked, result.proposed) == (0, 0)


class Heavy(proposers.OwnPages):
    """Its weights take memory, so it loads beside the steps, when `may_load` is set."""

    def __init__(self, texts: list[list[int]], weights: int) -> None:
        super().__init__(texts, weights=weights)
        self.may_load = threading.Event()
        self.closed = False

    def load(self, surroundings: Surroundings) -> None:
        assert self.may_load.wait(30)
        super().load(surroundings)

    def close(self) -> None:
        self.closed = True


LAYER_BYTES = 256 * 4 * 3 * 8
"""Of `OwnPages`: pages x tokens x (key and value sizes) x float64."""


def test_a_heavy_proposer_loads_and_leaves_while_requests_run(tiny_llama: LoadedModel) -> None:
    texts = known(tiny_llama, PROMPTS)
    heavy = Heavy(texts, weights=1000)
    engine = bench(
        tiny_llama, two_arms("first"), build=building_two(heavy, heavy), proposer_bytes=1000 + LAYER_BYTES
    )
    one = settings_of(Method.NGRAM)
    engine.core.set_settings(one)
    first = engine.submit(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in PROMPTS))
    for _ in range(4):
        engine.step()
    assert engine.core.proposer_free == 0  # taken from the moment at which it begins to load
    heavy.may_load.set()
    finish(engine)
    second = engine.run(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in PROMPTS))
    assert sum(result.accepted for result in second) > 0
    third = engine.submit(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in PROMPTS))
    engine.step()
    engine.core.set_settings(settings_of(Method.NONE))
    finish(engine)
    assert heavy.closed
    assert engine.core.proposer_free == 1000 + LAYER_BYTES
    for results in (first, second, third):
        assert [[*p, *r.tokens] for p, r in zip(PROMPTS, results, strict=True)] == texts


def settings_of(method: Method) -> PodSettings:
    return PodSettings(
        generation=2, arms={"stable": Arm(proposer=Proposer(method=method, max_depth=4))}, in_force="stable"
    )


def finish(engine: Bench) -> None:
    while engine.core.busy:
        engine.step()


def test_what_does_not_fit_is_refused_with_both_figures(
    tiny_llama: LoadedModel, caplog: pytest.LogCaptureFixture
) -> None:
    texts = known(tiny_llama, PROMPTS)
    heavy = Heavy(texts, weights=3 << 20)
    engine = bench(tiny_llama, Proposer(max_depth=4), build=building(heavy), proposer_bytes=2 << 20)
    results = engine.run(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in PROMPTS))
    assert [[*p, *r.tokens] for p, r in zip(PROMPTS, results, strict=True)] == texts
    trouble = engine.core.proposer_trouble
    assert trouble is not None
    assert "proposer ngram needs 0.00295 GiB of memory, but 0.00195 GiB are left" in trouble
    assert trouble in caplog.text
    assert sum(result.proposed for result in results) == 0


def test_memory_of_one_is_for_the_next(tiny_llama: LoadedModel) -> None:
    texts = known(tiny_llama, PROMPTS)
    first, second = Heavy(texts, weights=1000), Heavy(texts, weights=900)
    first.may_load.set()
    second.may_load.set()
    arms = two_arms().arms
    engine = bench(
        tiny_llama,
        PodSettings(generation=0, arms={"first": arms["first"]}, in_force="first"),
        build=building_two(first, second),
        proposer_bytes=1000 + LAYER_BYTES,
    )
    how: dict[str, Any] = {"max_tokens": 200, "ignore_eos": True}
    engine.run(request(PROMPTS[0], **how))
    assert engine.core.proposer_free == 0
    engine.core.set_settings(PodSettings(generation=1, arms={"second": arms["second"]}, in_force="second"))
    engine.run(request(PROMPTS[0], **how))
    engine.run(request(PROMPTS[0], **how))  # the one before began without it
    assert first.closed
    assert engine.core.proposer_free == 100
    assert second.ledger.asked > 0
