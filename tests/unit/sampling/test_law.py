"""What a request's parameters do to the law of its next token, compared with a naive reference."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.types import EngineError, SamplingParams
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.law import NoTokenLeftError, TokenLaw, best, distributions
from outrider_serving.sampling.noise import NoiseKey
from unit.sampling.reference import edited_logits, law_of

ENDS = frozenset({2, 4})


def law(vocabulary: int, prompt: Sequence[int] = (), output: Sequence[int] = (), **values: Any) -> TokenLaw:
    made = TokenLaw(SamplingParams(99, **values), prompt, vocab_size=vocabulary, ends=ENDS)
    made.append(output)
    return made


def as_dict(p: Distribution) -> dict[int, float]:
    return {p.token(index): prob for index, prob in enumerate(p.probs.tolist()) if prob > 0}


@st.composite
def parameters(draw: st.DrawFn) -> SamplingParams:
    token = st.integers(0, 6)
    maybe = st.booleans()
    return SamplingParams(
        99,
        min_tokens=draw(st.integers(0, 8)),
        temperature=draw(st.sampled_from([0.0, 0.3, 1.0, 2.0])),
        top_k=draw(st.sampled_from([0, 1, 3, 100])),
        top_p=draw(st.sampled_from([0.3, 0.95, 1.0])),
        min_p=draw(st.sampled_from([0.0, 0.1, 1.0])),
        presence_penalty=draw(st.sampled_from([0.0, -2.0, 0.7])),
        frequency_penalty=draw(st.sampled_from([0.0, -2.0, 1.3])),
        repetition_penalty=draw(st.sampled_from([1.0, 0.1, 1.9])),
        logit_bias=tuple(draw(st.dictionaries(token, st.floats(-100, 100), max_size=3)).items()),
        allowed_token_ids=(1, *draw(st.sets(token))) if draw(maybe) else None,
        banned_token_ids=tuple(draw(st.sets(token.filter(lambda t: t != 1), max_size=4))),
    )


@given(
    params=parameters(),
    seed=st.integers(0, 10**6),
    size=st.sampled_from([7, 8, 70, 500]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    texts=st.tuples(*[st.lists(st.integers(0, 6), max_size=6)] * 3),
)
def test_the_law_is_that_of_the_reference(
    params: SamplingParams, seed: int, size: int, dtype: torch.dtype, texts: tuple[list[int], ...]
) -> None:
    prompt, output, path = texts
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)).mul(3).to(dtype)
    made = TokenLaw(params, prompt, vocab_size=size, ends=ENDS)
    made.append(output)
    edited = edited_logits(logits.double().tolist(), params, prompt, output + path, ENDS)
    expected, found = law_of(edited, params), as_dict(made.distribution(logits, path))
    assert found == pytest.approx(expected, rel=1e-9)
    assert best(logits[None], [(made, path)]) == [int(np.argmax(edited))]


@given(
    params=parameters(),
    texts=st.tuples(*[st.lists(st.integers(0, 6), max_size=5)] * 3),
    seed=st.integers(0, 10**6),
)
def test_a_proposed_path_counts_as_if_it_were_committed(
    params: SamplingParams, texts: tuple[list[int], ...], seed: int
) -> None:
    prompt, output, path = texts
    logits = torch.randn(40, generator=torch.Generator().manual_seed(seed))
    proposed, committed, at_once = (TokenLaw(params, prompt, vocab_size=40, ends=ENDS) for _ in range(3))
    for token in output:
        proposed.append([token])
    committed.append(output)
    committed.append(path)
    at_once.append(output + path)
    wanted = as_dict(at_once.distribution(logits))
    for _ in range(2):  # looking changes nothing
        assert as_dict(proposed.distribution(logits, path)) == wanted
    assert as_dict(committed.distribution(logits)) == wanted


@given(seed=st.integers(0, 10**6), rows=st.lists(parameters(), min_size=2, max_size=6))
def test_rows_of_a_batch_do_not_influence_each_other(seed: int, rows: list[SamplingParams]) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(size=(len(rows), 301)))
    at = []
    for params in rows:
        made = TokenLaw(params, rng.integers(7, size=4).tolist(), vocab_size=301, ends=ENDS)
        made.append(rng.integers(7, size=3).tolist())
        at.append((made, tuple(rng.integers(7, size=rng.integers(3)).tolist())))
    before = logits.clone()
    together, bests = distributions(logits, at), best(logits, at)
    for row, where in enumerate(at):
        alone = distributions(logits[row : row + 1], [where])[0]
        assert torch.equal(together[row].probs, alone.probs)
        assert as_dict(together[row]) == as_dict(alone)
        assert best(logits[row : row + 1], [where]) == [bests[row]]
    assert torch.equal(logits, before)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_min_tokens_holds_back_every_ending_token_exactly_so_long(temperature: float) -> None:
    logits = torch.tensor([0.0, 0.0, 9.0, 0.0, 8.0])
    made = law(5, min_tokens=3, temperature=temperature)
    for committed in range(5):
        for ahead in range(4):
            p = made.distribution(logits, [0] * ahead)
            held = committed + ahead < 3
            assert (p.prob(2) == 0) == held
            assert (p.prob(4) == 0) == (held or temperature == 0)
        made.append([0])


def test_penalties_see_prompt_and_output_as_they_should() -> None:
    logits = torch.tensor([2.0, -2.0, 2.0, 2.0])
    where = {"prompt": [0, 1], "output": [2, 2]}
    ratio = {
        "repetition": law(4, **where, repetition_penalty=2.0).distribution(logits),
        "frequency": law(4, **where, frequency_penalty=0.5).distribution(logits),
        "presence": law(4, **where, presence_penalty=0.5).distribution(logits),
    }
    against_the_unseen = {
        name: [math.log(p.prob(token) / p.prob(3)) for token in range(3)] for name, p in ratio.items()
    }
    assert against_the_unseen["repetition"] == pytest.approx([-1, -6, -1])
    assert against_the_unseen["frequency"] == pytest.approx([0, -4, -1])
    assert against_the_unseen["presence"] == pytest.approx([0, -4, -0.5])


def test_no_bias_brings_a_banned_token_back() -> None:
    p = law(5, logit_bias=((1, 100.0),), banned_token_ids=(1,)).distribution(torch.zeros(5))
    assert as_dict(p) == pytest.approx({0: 0.25, 2: 0.25, 3: 0.25, 4: 0.25})


def test_a_constraint_is_asked_along_the_path_and_told_of_what_is_committed() -> None:
    class Recorder:
        def __init__(self) -> None:
            self.asked: list[tuple[int, ...]] = []
            self.told: list[int] = []

        def mask(self, path: Sequence[int]) -> torch.Tensor:
            self.asked.append(tuple(path))
            return torch.tensor([False, True, False, True])

        def advance(self, tokens: Sequence[int]) -> None:
            self.told += tokens

    recorder = Recorder()
    made = TokenLaw(SamplingParams(9), (), vocab_size=4, ends=frozenset(), constraint=recorder)
    made.append([3, 1])
    assert as_dict(made.distribution(torch.zeros(4), [1])) == {1: 0.5, 3: 0.5}
    assert (recorder.asked, recorder.told) == ([(1,)], [3, 1])
    assert not made.plain


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_request_that_rules_out_every_token_is_told_so(temperature: float) -> None:
    nothings: list[dict[str, Any]] = [
        {"allowed_token_ids": (2,), "min_tokens": 1},
        {"allowed_token_ids": (1,), "banned_token_ids": (1,)},
    ]
    for nothing in nothings:
        ask = [(law(5, temperature=temperature, **nothing), ()), (law(5), ())]
        with pytest.raises(NoTokenLeftError, match="no token is left"):
            best(torch.zeros(2, 5), ask)
        with pytest.raises(NoTokenLeftError):
            distributions(torch.zeros(2, 5), ask)
    assert issubclass(NoTokenLeftError, EngineError)


def test_a_broken_target_gives_no_token() -> None:
    with pytest.raises(NoTokenLeftError):
        law(2).distribution(torch.tensor([0.0, math.nan]))


def test_logits_of_another_vocabulary_are_refused() -> None:
    with pytest.raises(ValueError, match="6 logits where the vocabulary has 5"):
        law(5).distribution(torch.zeros(6))


def test_what_edits_nothing_is_plain() -> None:
    assert law(9, temperature=0.0, top_k=3, top_p=0.5, min_p=0.1, seed=1, logprobs=2).plain
    edits: list[dict[str, Any]] = [
        {"presence_penalty": 1.0},
        {"frequency_penalty": 1.0},
        {"repetition_penalty": 1.1},
        {"logit_bias": ((1, 1.0),)},
        {"allowed_token_ids": (1,)},
        {"banned_token_ids": (1,)},
        {"min_tokens": 2},
    ]
    assert not any(law(9, **edit).plain for edit in edits)
    assert law(9, output=[1, 1], min_tokens=2).plain


def test_greedy_takes_the_lowest_of_the_best() -> None:
    logits = torch.tensor([1.0, 3.0, 3.0, 2.0], dtype=torch.bfloat16)
    assert best(logits[None], [(law(4), ())]) == [int(logits.argmax())] == [1]
    assert as_dict(law(4, temperature=0.0).distribution(logits)) == {1: 1.0}
    assert best(logits[None], [(law(4, banned_token_ids=(1,)), ())]) == [2]


def test_top_p_1_leaves_the_whole_vocabulary() -> None:
    logits = torch.tensor([0.0, -50.0, 3.0])
    found = law(3, temperature=2.0).distribution(logits)
    assert found.ids is None
    assert torch.equal(found.probs, torch.softmax((logits.double() - 3) / 2, -1))


@pytest.mark.parametrize("temperature", [1e-5, 1e-2, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    found = law(3, temperature=temperature).distribution(torch.tensor([1000.0, 999.0, -1000.0]))
    assert bool(torch.isfinite(found.probs).all())
    assert float(found.probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-40])
def test_next_to_temperature_0_only_the_best_are_left(
    temperature: float, dtype: torch.dtype, top_p: float
) -> None:
    cold = law(4, temperature=temperature, top_p=top_p)
    one = cold.distribution(torch.tensor([90.0, 99.5, -1000.0, 99.0], dtype=dtype))
    assert as_dict(one) == {1: 1.0}
    tied = law(3, temperature=temperature).distribution(torch.tensor([2.0, 1.0, 2.0], dtype=dtype))
    assert tied.probs.tolist() == [0.5, 0, 0.5]


def test_the_least_difference_counts_next_to_temperature_0() -> None:
    assert law(2, temperature=5e-324).distribution(torch.tensor([0.0, 1e-45])).probs.tolist() == [0, 1]


def test_tokens_that_the_target_rules_out_stay_so() -> None:
    logits = torch.tensor([-math.inf, 0.0, -math.inf])
    for temperature in (5e-324, 1.0, 1e308):
        found = law(3, temperature=temperature, repetition_penalty=2.0, prompt=[0]).distribution(logits)
        assert found.probs.tolist() == [0, 1, 0]


def test_the_noise_of_a_seeded_request_moves_with_its_output() -> None:
    seeded = law(9, output=[1, 1], seed=5, choice=3)
    assert seeded.noise == NoiseKey(5, 3, 2)
    seeded.append([1])
    assert seeded.noise == NoiseKey(5, 3, 3)
    assert law(9).noise is None
    assert law(9, seed=5, temperature=0.0).noise is None


@pytest.mark.parametrize("size", [1, 2, 50_257, 151_936])
def test_a_vocabulary_of_any_size(size: int) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(size))
    made = TokenLaw(
        SamplingParams(9, presence_penalty=1.0, top_p=0.9), (0,), vocab_size=size, ends=frozenset({10**6})
    )
    made.append([0])
    expected = law_of(
        edited_logits(logits.double().tolist(), made.params, (0,), [0], frozenset()), made.params
    )
    assert as_dict(made.distribution(logits)) == pytest.approx(expected, rel=1e-8)
