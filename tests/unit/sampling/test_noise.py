"""The noise of coupled verification: exponential, independent in each part of its key, equal everywhere."""

from __future__ import annotations

import itertools
import math

import numpy as np
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider_serving.sampling.noise import NoiseKey, exponentials

CPU = torch.device("cpu")
ALPHA = 1e-4
"""Level of every statistical test here; seeds are fixed, so a test passes always or never."""


def uniforms(key: NoiseKey, n: int) -> np.ndarray:
    return np.asarray(np.exp(-exponentials(key, n, None, CPU).numpy()))


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
    words = [reference_word(key, token) >> 11 for token in ids]
    expected = [-math.log(word * 2.0**-53) if word else math.inf for word in words]
    found = exponentials(key, 0, torch.tensor(ids), CPU).tolist()
    assert all(math.isclose(a, b, rel_tol=1e-15) for a, b in zip(found, expected, strict=True))


def test_a_subset_of_the_tokens_gets_the_same_noise() -> None:
    key = NoiseKey(7, 0, 3)
    ids = torch.tensor([5, 0, 999, 31])
    assert torch.equal(exponentials(key, 1000, None, CPU)[ids], exponentials(key, 1000, ids, CPU))


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
            values = [float(exponentials(key, 0, ids, CPU)) for key in keys]
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
