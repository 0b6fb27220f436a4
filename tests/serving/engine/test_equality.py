"""Speculation changes no token: tiny models in float64, against transformers' generate and against itself."""

from __future__ import annotations

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.types import SpeculationOverride
from outrider_serving.models.loading import LoadedModel
from outrider_serving.settings import Method, NgramSettings, Proposer
from serving.engine.support import NGRAM, NONE, Oracle, building, engine_of, reference, request, run

prompts = st.one_of(
    st.lists(st.integers(2, 319), min_size=1, max_size=40),
    st.lists(st.integers(2, 319), min_size=1, max_size=6).map(lambda phrase: phrase * 6),
)
ngram_settings = st.tuples(st.integers(1, 4), st.integers(0, 3), st.integers(1, 12)).map(
    lambda n: Proposer(max_depth=n[2], ngram=NgramSettings(min_match=n[0], max_match=n[0] + n[1]))
)


@given(prompt=prompts, proposer=ngram_settings)
def test_greedy_output_is_that_of_generate(tiny: LoadedModel, prompt: list[int], proposer: Proposer) -> None:
    expected = reference(tiny, prompt, 24)
    with engine_of(tiny, proposer) as engine:
        plain, ngram = run(
            engine, request(prompt, max_tokens=24, speculation=NONE), request(prompt, max_tokens=24)
        )
    assert plain.tokens == expected
    assert ngram.tokens == expected
    assert plain.usage.proposed_tokens == 0
    assert plain.usage.verification_steps == len(expected)


@given(
    prompt=prompts,
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.3, 1.0, 1.8]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    proposer=ngram_settings,
)
def test_seeded_output_does_not_depend_on_speculation(
    tiny: LoadedModel, prompt: list[int], seed: int, temperature: float, top_p: float, proposer: Proposer
) -> None:
    how: Any = {"seed": seed, "temperature": temperature, "top_p": top_p}
    with engine_of(tiny, proposer) as engine:
        plain, ngram = run(engine, request(prompt, speculation=NONE, **how), request(prompt, **how))
    assert ngram.tokens == plain.tokens
    assert ngram.text == plain.text


def test_proposals_that_are_right_are_kept_whatever_the_parameters(tiny: LoadedModel) -> None:
    prompt = list(range(10, 40))
    sampled: Any = {"temperature": 1, "seed": 4}
    for how in ({}, sampled):
        with engine_of(tiny) as engine:
            (plain,) = run(engine, request(prompt, speculation=NONE, ignore_eos=True, **how))
        oracle = Oracle([(*prompt, *plain.tokens)])
        with engine_of(tiny, Proposer(max_depth=7), build=building(oracle)) as engine:
            (fast,) = run(engine, request(prompt, ignore_eos=True, **how))
        assert fast.tokens == plain.tokens
        assert (fast.usage.verification_steps, fast.usage.accepted_tokens) == (4, 28)
        assert not oracle.texts


def test_proposals_that_are_partly_wrong_change_nothing(tiny: LoadedModel) -> None:
    prompt = list(range(10, 40))
    for wrong in range(1, 7):
        expected = reference(tiny, prompt, 32)
        oracle = Oracle([(*prompt, *expected)], wrong)
        with engine_of(tiny, build=building(oracle)) as engine:
            (result,) = run(engine, request(prompt))
        assert result.tokens == expected


def test_prompts_longer_than_a_chunk_of_prefill(tiny: LoadedModel) -> None:
    for length in (255, 256, 257, 400):
        prompt = [(7 * n * n + 3) % 300 + 2 for n in range(length)]
        with engine_of(tiny) as engine:
            results = run(engine, *(request(prompt, speculation=how) for how in (NONE, NGRAM)))
        assert [result.tokens for result in results] == [reference(tiny, prompt, 32)] * 2


def test_many_requests_at_once_get_what_each_gets_alone(tiny: LoadedModel) -> None:
    wanted: list[Any] = [
        {
            "prompt": [n + 2, 5, n + 2, 5, n + 2],
            "max_tokens": 10 + n,
            "temperature": n % 2,
            "seed": n,
            "top_p": 0.9,
        }
        for n in range(20)
    ]
    with engine_of(tiny, max_running=7) as engine:
        together = run(engine, *(request(**how) for how in wanted))
    with engine_of(tiny) as engine:
        alone = [run(engine, request(**how))[0] for how in wanted]
    assert [result.tokens for result in together] == [result.tokens for result in alone]
    assert [result.text for result in together] == [result.text for result in alone]


def test_depth_of_a_request_goes_before_that_of_the_arm(tiny: LoadedModel) -> None:
    prompt = [5, 6, 7] * 8
    override = SpeculationOverride(method=Method.NGRAM, max_depth=2)
    records: list[int] = []
    with engine_of(
        tiny, Proposer(method=Method.NONE), on_step=lambda step: records.extend(r.proposed for r in step.rows)
    ) as engine:
        (result,) = run(engine, request(prompt, speculation=override))
    assert result.tokens == reference(tiny, prompt, 32)
    assert max(records) <= 2
    assert result.usage.proposed_tokens == sum(records) > 0


def test_a_method_that_a_request_asks_for_has_the_settings_of_the_arm(tiny: LoadedModel) -> None:
    prompt = [5, 6, 7, 8, 5, 6]  # the end matches over two tokens, not over three
    proposed = []
    for least in (2, 3):
        arm = Proposer(method=Method.NONE, ngram=NgramSettings(min_match=least, max_match=4))
        with engine_of(tiny, arm) as engine:
            (result,) = run(engine, request(prompt, max_tokens=2, speculation=NGRAM))
        proposed.append(result.chunks[0].usage.proposed_tokens)
    assert proposed == [1, 0]


def test_a_request_that_asks_for_less_than_the_least_depth_of_the_arm_gets_it(tiny: LoadedModel) -> None:
    prompt = list(range(10, 40))
    known = (*prompt, *reference(tiny, prompt, 32, eos=False))
    arm = Proposer(min_depth=4, max_depth=8)
    records: list[int] = []
    with engine_of(
        tiny,
        arm,
        build=building(Oracle([known])),
        on_step=lambda step: records.extend(r.proposed for r in step.rows),
    ) as engine:
        wish = SpeculationOverride(max_depth=2)
        (result,) = run(engine, request(prompt, speculation=wish, ignore_eos=True))
    assert result.tokens == known[len(prompt) :]
    assert set(records[1:-2]) == {2}
    assert result.usage.accepted_tokens > 16
