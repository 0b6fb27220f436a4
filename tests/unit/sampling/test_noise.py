"""The noise of coupled verification: exponential, independent in each part of its key, equal everywhere."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import integrate, stats

from outrider_serving.sampling.noise import NoiseKey, _variates, exponentials

ALPHA = 1e-4
"""Level of every statistical test here; seeds are fixed, so a test passes always or never."""


def uniforms(key: NoiseKey, n: int) -> np.ndarray:
    return np.asarray(np.exp(-exponentials([key], torch.arange(n))[0].numpy()))


def share_below(e: float) -> float:
    """The share of words whose variate is below e, by bisection: variates grow with words."""
    low, high = 0, 2**63
    while low < high:
        middle = (low + high) // 2
        if float(_variates(torch.tensor([middle]))) < e:
            low = middle + 1
        else:
            high = middle
    return low / 2**63


def reference_word(key: tuple[int, ...], token: int) -> int:
    """SplitMix64 in plain integers, written from the paper."""
    word = 2**64 - 1

    def mix(z: int, a: int, m: int, b: int, n: int, c: int) -> int:
        z = ((z ^ (z >> a)) * m) & word
        z = ((z ^ (z >> b)) * n) & word
        return z ^ (z >> c)

    state = 0
    for part in key:
        state = mix(
            ((state ^ (part % 2**64)) + 0x9E3779B97F4A7C15) & word,
            30,
            0xBF58476D1CE4E5B9,
            27,
            0x94D049BB133111EB,
            31,
        )
    gamma = mix((state + 0x9E3779B97F4A7C15) & word, 33, 0xFF51AFD7ED558CCD, 33, 0xC4CEB9FE1A85EC53, 33) | 1
    if (gamma ^ (gamma >> 1)).bit_count() < 24:
        gamma ^= 0xAAAAAAAAAAAAAAAA
    counter = (state + (token + 1) * gamma) & word
    return mix(counter, 30, 0xBF58476D1CE4E5B9, 27, 0x94D049BB133111EB, 31)


@given(seed=st.integers(-(2**70), 2**70), choice=st.integers(0, 9), position=st.integers(0, 10**6))
def test_bits_are_those_of_plain_integer_arithmetic(seed: int, choice: int, position: int) -> None:
    key = NoiseKey(seed, choice, position)
    ids = [0, 1, 77, 262_143]
    values = [(reference_word(key, token) >> 1) * 2.0**-63 + 2.0**-64 for token in ids]
    expected = [-math.log1p(-min(value, 1 - 2.0**-53)) for value in values]
    found = exponentials([key], torch.tensor(ids))[0].tolist()
    assert all(math.isclose(a, b, rel_tol=1e-15) for a, b in zip(found, expected, strict=True))


def test_a_subset_of_the_tokens_gets_the_same_noise() -> None:
    key = NoiseKey(7, 0, 3)
    ids = torch.tensor([5, 0, 999, 31])
    assert torch.equal(exponentials([key], torch.arange(1000))[:, ids], exponentials([key], ids))


def test_positions_of_a_batch_get_the_noise_of_their_own_keys() -> None:
    keys = [NoiseKey(7, 0, 3), NoiseKey(7, 0, 4), NoiseKey(-1, 2, 0)]
    ids = torch.tensor([[5, 0, 999], [1, 2, 3], [4, 4, 4]])
    for batched in (ids, ids[0]):
        found = exponentials(keys, batched)
        for row, key in enumerate(keys):
            own = batched[row] if batched.ndim == 2 else batched
            assert torch.equal(found[row], exponentials([key], own)[0])


def test_variates_are_exponential_far_into_both_tails() -> None:
    for e in np.logspace(-15, 1.5, 60):
        assert share_below(e) == pytest.approx(-math.expm1(-e), rel=1e-12, abs=2.0**-63)
    assert 1 - share_below(36.0) == pytest.approx(math.exp(-36.0), abs=2.0**-53)


@pytest.mark.parametrize("p", [0.5, 1e-3, 1e-6, 1e-9, 1e-12])
def test_a_clock_of_any_rate_rings_first_as_often_as_it_should(p: float) -> None:
    """The chance that the clock of a token of probability p rings before that of all others together.

    Given that the others' rings at e, it is the share of words with a variate below e p / (1 - p).
    """
    chance, _ = integrate.quad(lambda e: np.exp(-e) * share_below(e * p / (1 - p)), 0, 50, limit=200)
    assert chance == pytest.approx(p, rel=1e-6)


def test_variates_are_neither_0_nor_infinite() -> None:
    least, greatest = _variates(torch.tensor([0, 2**63 - 1])).tolist()
    assert least == 2.0**-64
    assert greatest == pytest.approx(53 * math.log(2))


def test_seeds_are_taken_modulo_two_to_the_64() -> None:
    assert np.array_equal(uniforms(NoiseKey(-1, 0, 0), 8), uniforms(NoiseKey(2**64 - 1, 0, 0), 8))


def test_values_over_a_vocabulary_are_uniform_before_the_logarithm() -> None:
    for seed, position in itertools.product((0, 1, 2**63, -5), (0, 1, 1000)):
        assert stats.kstest(uniforms(NoiseKey(seed, 0, position), 262_144), "uniform").pvalue > ALPHA


def test_values_of_one_token_are_uniform_over_seeds_choices_and_positions() -> None:
    for token in (0, 1, 262_143):
        ids = torch.tensor([token])
        for vary in range(3):
            keys = (NoiseKey(*(n if part == vary else 3 for part in range(3))) for n in range(4000))
            values = exponentials(list(keys), ids)[:, 0].numpy()
            assert stats.kstest(values, "expon").pvalue > ALPHA


def test_neighbouring_keys_and_tokens_are_independent() -> None:
    """Chi-square on an 8 x 8 table of pairs: next seed, choice, position, token, and swapped components."""
    n = 100_000
    base = uniforms(NoiseKey(1, 2, 3), n)
    others = {
        "seed": uniforms(NoiseKey(2, 2, 3), n),
        "choice": uniforms(NoiseKey(1, 3, 3), n),
        "position": uniforms(NoiseKey(1, 2, 4), n),
        "swapped": uniforms(NoiseKey(2, 1, 3), n),
        "token": np.roll(base, 1),
    }
    for name, other in others.items():
        table = np.histogram2d(base, other, bins=8, range=[[0, 1], [0, 1]])[0]
        assert stats.chi2_contingency(table).pvalue > ALPHA, name


def test_every_bit_is_fair_and_flips_half_of_the_others() -> None:
    words = (uniforms(NoiseKey(11, 0, 0), 20_000) * 2**52).astype(np.uint64)
    bits = (words[:, None] >> np.arange(8, 52, dtype=np.uint64)) & np.uint64(1)
    assert np.abs(bits.mean(0) - 0.5).max() < 0.02
    flips = (bits[:-1] != bits[1:]).mean(0)
    assert np.abs(flips - 0.5).max() < 0.02
