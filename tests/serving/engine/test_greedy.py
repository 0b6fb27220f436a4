"""Greedy output is that of transformers' `generate`, whoever proposes, however requests are batched."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider_serving.engine.types import SpeculationOverride
from outrider_serving.models.loading import LoadedModel
from outrider_serving.settings import Method, NgramSettings, Proposer
from outrider_serving.suffix.indexes import twin_indexes
from serving.engine import proposers
from serving.engine.suffixes import warm_suffix
from serving.engine.support import (
    NEAR_TIE,
    NGRAM,
    NONE,
    Bench,
    bench,
    building,
    building_two,
    narrowest,
    reference,
    request,
    sampled,
    two_arms,
)

PROMPTS = [
    [5, 6, 7, 8] * 3,
    list(range(10, 40)),
    [(7 * n * n + 3) % 300 + 2 for n in range(61)],
    [9],
]
TOKENS = 24

Texts = list[list[int]]
Make = Callable[[Texts], object]

PROPOSERS: dict[str, Make] = {
    "oracle": proposers.Oracle,
    "partly wrong": lambda known: proposers.Oracle(known, wrong=3),
    "always wrong": lambda known: proposers.Oracle(known, wrong=1),
    "bushy": proposers.Bushy,
    "drawn": lambda _: proposers.Drawn(320),
    "drawn, one wide": lambda _: proposers.Drawn(320, width=1),
    "drawn on a support": lambda _: proposers.Drawn(320, width=3, support=9),
    "stops by itself": lambda _: proposers.SelfStopping(320),
    "end tokens": lambda _: proposers.Fixed(1, 1, 0),
    "raises": lambda known: proposers.Raising(known, lambda _, call: call % 3 == 0),
    "raises always": lambda known: proposers.Raising(known, lambda _name, _call: True),
    "slow": proposers.Slow,
    "hidden states": lambda known: proposers.HiddenReader(known, (1, 3)),
    "own pages": proposers.OwnPages,
    "suffix": warm_suffix,
    "suffix, trees": partial(warm_suffix, width=3),
    "suffix, in plain Python": partial(warm_suffix, width=2, indexes=twin_indexes),
    "suffix, of other text": lambda known: warm_suffix([text[::-1] for text in known]),
}

SHAPES: dict[str, dict[str, Any]] = {
    "one by one": {"max_running": 1, "step_tokens": 64},
    "together": {"max_running": 8, "step_tokens": 256},
    "in small chunks": {"max_running": 3, "step_tokens": 7},
    "preempted": {"max_running": 8, "step_tokens": 256, "pages": 36},
}


@pytest.fixture(scope="session")
def expected(tiny: LoadedModel) -> Texts:
    """The outputs of `generate`; no token of them was decided by a gap that floating point could close."""
    outputs = [list(reference(tiny, prompt, TOKENS, eos=False)) for prompt in PROMPTS]
    gaps = [narrowest(tiny, prompt, out) for prompt, out in zip(PROMPTS, outputs, strict=True)]
    assert min(gaps) > NEAR_TIE
    return outputs


def outputs(engine: Bench, between: Callable[[], None] = lambda: None) -> Texts:
    wanted = [request(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS]
    return [list(result.tokens) for result in engine.run(*wanted, between=between)]


@pytest.mark.parametrize(("name", "shape"), sampled(PROPOSERS, SHAPES))
def test_whoever_proposes(tiny: LoadedModel, expected: Texts, name: str, shape: str) -> None:
    known = [[*prompt, *out] for prompt, out in zip(PROMPTS, expected, strict=True)]
    proposer = PROPOSERS[name](known)
    engine = bench(
        tiny, Proposer(max_depth=5), build=building(proposer), proposer_bytes=1 << 20, **SHAPES[shape]
    )
    assert outputs(engine) == expected
    assert sum(record.preemptions for record in engine.records) > 0 or shape != "preempted"
    assert sum(record.committed for record in engine.records) == TOKENS * len(PROMPTS)


@pytest.mark.parametrize("shape", SHAPES)
def test_each_method(tiny: LoadedModel, expected: Texts, shape: str) -> None:
    for method in Method:
        assert outputs(bench(tiny, Proposer(method=method), **SHAPES[shape])) == expected


def test_two_proposers_with_the_one_in_force_changing_at_every_step(
    tiny: LoadedModel, expected: Texts
) -> None:
    known = [[*prompt, *out] for prompt, out in zip(PROMPTS, expected, strict=True)]
    first, second = proposers.OwnPages(known), proposers.HiddenReader(known, (0, 2))
    engine = bench(tiny, two_arms(), build=building_two(first, second), proposer_bytes=1 << 20)
    turns = 0

    def turn() -> None:
        nonlocal turns
        turns += 1
        engine.core.set_settings(two_arms("first" if turns % 2 else "second"))

    assert outputs(engine, turn) == expected
    assert {record.arm for record in engine.records} == {"first", "second"}
    by_arm = {
        arm: sum(sum(r.accepted for r in rec.rows) for rec in engine.records if rec.arm == arm)
        for arm in ("first", "second")
    }
    assert min(by_arm.values()) > 0


prompts = st.one_of(
    st.lists(st.integers(2, 319), min_size=1, max_size=40),
    st.lists(st.integers(2, 319), min_size=1, max_size=6).map(lambda phrase: phrase * 6),
)
ngram_settings = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 12)).map(
    lambda n: Proposer(max_depth=n[2], ngram=NgramSettings(min_match=n[0], max_match=n[0] + n[1]))
)


@given(prompt=prompts, proposer=ngram_settings, step_tokens=st.integers(2, 64))
def test_any_prompt(tiny: LoadedModel, prompt: list[int], proposer: Proposer, step_tokens: int) -> None:
    wanted = reference(tiny, prompt, TOKENS)
    assume(narrowest(tiny, prompt, wanted) > NEAR_TIE)
    engine = bench(tiny, proposer, step_tokens=step_tokens, max_running=2)
    plain, ngram = engine.run(
        request(prompt, max_tokens=TOKENS, speculation=NONE), request(prompt, max_tokens=TOKENS)
    )
    assert plain.tokens == wanted
    assert ngram.tokens == wanted
    assert plain.proposed == 0
    assert plain.steps == len(wanted)


def test_proposals_that_are_right_are_kept(tiny: LoadedModel, expected: Texts) -> None:
    known = [[*prompt, *out] for prompt, out in zip(PROMPTS, expected, strict=True)]
    for kind in (proposers.Oracle, proposers.Bushy):
        engine = bench(tiny, Proposer(max_depth=5), build=building(kind(known)))
        results = engine.run(*(request(p, max_tokens=TOKENS, ignore_eos=True) for p in PROMPTS))
        assert [(result.steps, result.accepted) for result in results] == [(4, 20)] * len(PROMPTS)


def test_the_depth_of_a_request_goes_before_that_of_the_arm(tiny: LoadedModel) -> None:
    prompt = [5, 6, 7] * 8
    override = SpeculationOverride(method=Method.NGRAM, max_depth=2)
    engine = bench(tiny, Proposer(method=Method.NONE))
    (result,) = engine.run(request(prompt, speculation=override, ignore_eos=True))
    depths = {row.depth for record in engine.records for row in record.rows}
    assert max(depths) == 2
    assert result.proposed == sum(row.proposed for record in engine.records for row in record.rows) > 0


def test_a_request_may_ask_for_more_depth_than_the_arm(tiny: LoadedModel, expected: Texts) -> None:
    """Its neighbours have the arm's; in a tree, more depth is more nodes as well."""
    known = [[*prompt, *out] for prompt, out in zip(PROMPTS, expected, strict=True)]
    for kind in (proposers.Oracle, proposers.Bushy):
        engine = bench(tiny, Proposer(max_depth=2), build=building(kind(known)))
        deep, plain = engine.run(
            request(
                PROMPTS[1], speculation=SpeculationOverride(max_depth=6), max_tokens=TOKENS, ignore_eos=True
            ),
            request(PROMPTS[0], max_tokens=TOKENS, ignore_eos=True),
        )
        assert [list(deep.tokens), list(plain.tokens)] == [expected[1], expected[0]]
        depths = [max(delta.depth for delta in result.deltas) for result in (deep, plain)]
        assert depths == [6, 2]
        assert deep.steps < plain.steps


def test_a_method_that_a_request_asks_for_has_the_settings_of_the_arm(tiny: LoadedModel) -> None:
    prompt = [5, 6, 7, 8, 5, 6]  # the end matches over two tokens, not over three
    proposed = []
    for least in (2, 3):
        arm = Proposer(method=Method.NONE, ngram=NgramSettings(min_match=least, max_match=4))
        (result,) = bench(tiny, arm).run(request(prompt, max_tokens=2, speculation=NGRAM))
        proposed.append(result.deltas[0].proposed)
    assert proposed == [1, 0]


def test_a_request_that_asks_for_less_than_the_least_depth_of_the_arm_gets_it(
    tiny: LoadedModel, expected: Texts
) -> None:
    oracle = proposers.Oracle([[*PROMPTS[1], *expected[1]]])
    engine = bench(tiny, Proposer(min_depth=4, max_depth=8), build=building(oracle))
    wish = SpeculationOverride(max_depth=2)
    (result,) = engine.run(request(PROMPTS[1], speculation=wish, max_tokens=TOKENS, ignore_eos=True))
    assert list(result.tokens) == expected[1]
    assert {row.depth for record in engine.records for row in record.rows} == {2}
    assert result.accepted == 16


def test_max_tokens_from_one_to_more_than_a_proposal(tiny: LoadedModel, expected: Texts) -> None:
    depth = 5
    known = [[*PROMPTS[1], *expected[1]]]
    for most in range(1, depth + 3):
        for kind in (proposers.Oracle, proposers.Bushy):
            engine = bench(tiny, Proposer(max_depth=depth), build=building(kind(known)))
            (result,) = engine.run(request(PROMPTS[1], max_tokens=most, ignore_eos=True))
            assert list(result.tokens) == expected[1][:most]
            assert result.finish_reason == "length"


def test_the_last_position_of_the_context(tiny: LoadedModel) -> None:
    prompt = [(5 * n) % 300 + 2 for n in range(tiny.context_length - 20)]
    wanted = reference(tiny, prompt, 20, eos=False)
    assert narrowest(tiny, prompt, wanted) > NEAR_TIE
    oracle = proposers.Oracle([[*prompt, *wanted]])
    (result,) = bench(tiny, Proposer(max_depth=8), build=building(oracle)).run(
        request(prompt, max_tokens=20, ignore_eos=True)
    )
    assert result.tokens == wanted
    with pytest.raises(ValueError, match=r"exceed the context length \(512\)"):
        bench(tiny).run(request(prompt, max_tokens=21))
