"""Draws follow their weights, and impossible outcomes never happen."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from scipy import stats

from outrider_serving.sampling.randomness import GeneratorRandomness


def seeded(seed: int = 0) -> GeneratorRandomness:
    return GeneratorRandomness(np.random.default_rng(seed))


class Fixed:
    """Stands for a generator whose uniform draw is known."""

    def __init__(self, value: float) -> None:
        self.random = lambda: value


def test_certain_events() -> None:
    draws = seeded()
    assert all(draws.bernoulli(1.0) for _ in range(1000))
    assert not any(draws.bernoulli(0.0) for _ in range(1000))


@pytest.mark.parametrize("u", [0.0, 0.5, 1 - 2.0**-53])
def test_weights_of_zero_are_never_drawn(u: float) -> None:
    draws = GeneratorRandomness(Fixed(u))  # type: ignore[arg-type]
    weights = torch.tensor([0, 0, 0.3, 0, 0.1, 0, 0], dtype=torch.float64)
    assert draws.categorical(weights) in (2, 4)


def test_frequencies() -> None:
    draws = seeded(1)
    weights = torch.tensor([1.0, 2.0, 0.0, 5.0], dtype=torch.float64)
    counts = np.bincount([draws.categorical(weights) for _ in range(4000)], minlength=4)
    assert stats.chisquare(counts[[0, 1, 3]], 4000 * np.array([1, 2, 5]) / 8).pvalue > 1e-3


def test_two_sources_are_different() -> None:
    weights = torch.ones(1000, dtype=torch.float64)
    first, second = GeneratorRandomness(), GeneratorRandomness()
    assert [first.categorical(weights) for _ in range(8)] != [second.categorical(weights) for _ in range(8)]
