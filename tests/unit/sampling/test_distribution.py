"""The distribution of a request's parameters is the one that a naive full sort gives."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.sampling.distribution import distribution


def naive(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    """Softmax, full sort by descending probability then id, shortest prefix of mass top_p, renormalised."""
    z = logits.double().numpy() / temperature
    p = np.exp(z - z.max())
    p /= p.sum()
    if top_p >= 1:
        return dict(enumerate(p.tolist()))
    kept: dict[int, float] = {}
    mass = 0.0
    for token in sorted(range(len(p)), key=lambda t: (-p[t], t)):
        kept[token] = p[token]
        mass += p[token]
        if mass >= top_p:
            break
    return {token: q / mass for token, q in kept.items()}


def as_dict(logits: torch.Tensor, temperature: float, top_p: float) -> dict[int, float]:
    found = distribution(logits, temperature, top_p)
    return {found.token(index): prob for index, prob in enumerate(found.probs.tolist())}


@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 700, 5000]),
    temperature=st.floats(0.05, 5),
    top_p=st.floats(0.01, 0.999),
    spread=st.sampled_from([0.1, 1.0, 10.0]),
)
def test_nucleus_is_that_of_a_full_sort(
    seed: int, size: int, temperature: float, top_p: float, spread: float
) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    found, expected = as_dict(logits, temperature, top_p), naive(logits, temperature, top_p)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-9)


@given(
    logits=st.lists(st.sampled_from([0.0, 1.0, 2.0, -30.0]), min_size=1, max_size=400),
    top_p=st.floats(0.01, 0.99),
)
def test_among_equally_probable_tokens_the_lower_id_comes_first(logits: list[float], top_p: float) -> None:
    expected = naive(torch.tensor(logits), 1.0, top_p)
    found = as_dict(torch.tensor(logits), 1.0, top_p)
    # With many ties the sum can reach top_p one token earlier or later, by rounding alone.
    shorter, longer = sorted((list(found), list(expected)), key=len)
    assert longer[: len(shorter)] == shorter
    assert len(longer) - len(shorter) <= 1
    if len(shorter) < len(longer):
        assert sum(naive(torch.tensor(logits), 1.0, 1.0)[t] for t in shorter) == pytest.approx(
            top_p, abs=1e-12
        )


def test_uniform_logits_of_a_large_vocabulary() -> None:
    found = distribution(torch.zeros(262_144, dtype=torch.bfloat16), 1.0, 0.25)
    assert found.ids is not None
    assert found.ids.tolist() == list(range(65_536))


def test_more_equally_probable_tokens_than_are_looked_at_first() -> None:
    logits = torch.full((5000,), -40.0)
    equal = torch.arange(4999, 0, -7)[:700]
    logits[equal] = 5.0
    found = distribution(logits, 1.0, 300.5 / 700)
    assert found.ids is not None
    assert found.ids.tolist() == sorted(equal.tolist())[:301]


def test_top_p_1_leaves_the_whole_vocabulary() -> None:
    logits = torch.tensor([0.0, -50.0, 3.0])
    found = distribution(logits, 2.0, 1.0)
    assert found.ids is None
    assert torch.equal(found.probs, torch.softmax(logits.double() / 2, -1))


def test_a_tiny_top_p_leaves_the_most_probable_token() -> None:
    found = distribution(torch.tensor([0.0, 2.0, 1.0]), 1.0, 1e-9)
    assert (found.token(0), found.probs.tolist()) == (1, [1.0])


@pytest.mark.parametrize("temperature", [1e-5, 1e-2, 100.0])
def test_extreme_temperatures_stay_finite(temperature: float) -> None:
    found = distribution(torch.tensor([1000.0, 999.0, -1000.0]), temperature, 1.0)
    assert bool(torch.isfinite(found.probs).all())
    assert float(found.probs.sum()) == pytest.approx(1.0)


@pytest.mark.parametrize("top_p", [0.5, 1.0])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("temperature", [5e-324, 1e-308, 1e-300, 1e-40])
def test_next_to_temperature_0_only_the_best_are_left(
    temperature: float, dtype: torch.dtype, top_p: float
) -> None:
    one = distribution(torch.tensor([90.0, 99.5, -1000.0, 99.0], dtype=dtype), temperature, top_p)
    assert [one.prob(token) for token in range(4)] == [0, 1, 0, 0]
    tied = distribution(torch.tensor([2.0, 1.0, 2.0], dtype=dtype), temperature, 1.0)
    assert tied.probs.tolist() == [0.5, 0, 0.5]


def test_the_least_difference_counts_next_to_temperature_0() -> None:
    assert distribution(torch.tensor([0.0, 1e-45]), 5e-324, 1.0).probs.tolist() == [0, 1]


def test_tokens_that_are_ruled_out_stay_so() -> None:
    logits = torch.tensor([float("-inf"), 0.0, float("-inf")])
    for temperature in (5e-324, 1.0, 1e308):
        assert distribution(logits, temperature, 1.0).probs.tolist() == [0, 1, 0]


def test_prob_of_tokens_inside_and_outside_the_support() -> None:
    logits = torch.log(torch.tensor([0.1, 0.5, 0.4]))
    found = distribution(logits, 1.0, 0.8)
    assert [found.prob(token) for token in range(3)] == pytest.approx([0.0, 5 / 9, 4 / 9])
    assert [found.index(token) for token in range(3)] == [None, 0, 1]
