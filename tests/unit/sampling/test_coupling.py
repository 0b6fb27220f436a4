"""The coupled token is a fixed function of the distribution and the key, and has the distribution's law."""

from __future__ import annotations

from collections import defaultdict

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling import coupling
from outrider_serving.sampling.coupling import coupled_token, coupled_tokens
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.noise import NoiseKey, _variates
from unit.sampling.exhaustive import (
    VOCABULARY,
    Proposing,
    RandomTrees,
    Setting,
    law_of_output,
    law_of_target,
    nothing,
)
from unit.sampling.reference import Text, random_target


def dense(seed: int, size: int = 1000) -> Distribution:
    weights = np.random.default_rng(seed).dirichlet(np.full(size, 0.1))
    return Distribution(None, torch.from_numpy(weights))


@pytest.mark.parametrize("proposing", [nothing, RandomTrees(1, drawn=0.0)])
def test_coupled_outputs_have_the_law_of_the_target(proposing: Proposing) -> None:
    """Chi-square of the joint law of two positions over 2,000 fixed seeds."""
    n, target = 2000, random_target(5, VOCABULARY, certain=0)
    counts: dict[Text, float] = defaultdict(float)
    for seed in range(n):
        setting = Setting(SamplingParams(2, seed=seed, ignore_eos=True), target=target)
        counts[next(iter(law_of_output(setting, proposing)))] += 1
    expected = law_of_target(Setting(SamplingParams(2, ignore_eos=True), target=target))
    likely = [text for text, prob in expected.items() if prob * n >= 5]
    observed, wanted = [counts[text] for text in likely], [expected[text] * n for text in likely]
    rest = (n - sum(observed), n - sum(wanted))
    assert stats.chisquare([*observed, rest[0] + 1], [*wanted, rest[1] + 1]).pvalue > 1e-3


@given(seed=st.integers(0, 2**64), position=st.integers(0, 10**6), size=st.integers(1, 60))
def test_tokens_without_probability_are_never_chosen(seed: int, position: int, size: int) -> None:
    probs = torch.zeros(60, dtype=torch.float64)
    support = torch.randperm(60, generator=torch.Generator().manual_seed(size))[:size]
    probs[support] = 1 / size
    assert probs[coupled_token(Distribution(None, probs), NoiseKey(seed, 0, position))] > 0


def test_no_variate_is_so_extreme_that_probability_0_could_win(monkeypatch: pytest.MonkeyPatch) -> None:
    extremes = _variates(torch.tensor([0, 2**63 - 1]))
    monkeypatch.setattr(coupling, "exponentials", lambda keys, ids: extremes[None])
    certain = Distribution(None, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert coupled_token(certain, NoiseKey(0, 0, 0)) == 1


def test_a_support_gives_the_same_token_as_the_whole_vocabulary() -> None:
    for seed in range(50):
        p = dense(seed)
        ids = torch.from_numpy(np.random.default_rng(seed).permutation(1000))
        key = NoiseKey(seed, 0, 3)
        assert coupled_token(Distribution(ids, p.probs[ids]), key) == coupled_token(p, key)


@given(kinds=st.lists(st.sampled_from([0, 1, 3, 50]), min_size=1, max_size=8), seed=st.integers(0, 1000))
def test_a_batch_gives_each_position_its_own_token(kinds: list[int], seed: int) -> None:
    ps = [
        Distribution(torch.randperm(1000)[:size], torch.full((size,), 1 / size, dtype=torch.float64))
        if size
        else dense(seed + n)
        for n, size in enumerate(kinds)
    ]
    keys = [NoiseKey(seed, n, 2 * n) for n in range(len(ps))]
    assert coupled_tokens(ps, keys) == [coupled_token(p, key) for p, key in zip(ps, keys, strict=True)]


def test_tokens_of_other_choices_positions_and_seeds_differ() -> None:
    p = Distribution(None, torch.full((1000,), 1e-3, dtype=torch.float64))
    for part in range(3):
        tokens = {coupled_token(p, NoiseKey(*(n if part == k else 1 for k in range(3)))) for n in range(20)}
        assert len(tokens) > 15
