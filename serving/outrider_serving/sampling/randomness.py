"""Where the draws of rejection sampling come from: one source that a test can replace."""

from __future__ import annotations

from typing import Protocol

import numpy as np
import torch
from torch import Tensor


class Randomness(Protocol):
    """Independent draws."""

    def bernoulli(self, p: float) -> bool:
        """True with probability p."""
        ...

    def categorical(self, weights: Tensor) -> int:
        """An index, with probability proportional to its weight.

        Args:
            weights: float64 [n], not negative, of positive sum.
        """
        ...

    def draw(self, weights: Tensor) -> Tensor:
        """`categorical`, left on the device of the weights: int64 [1]. Nothing waits for it."""
        ...


class GeneratorRandomness:
    """Draws from a numpy generator; without one, from a new generator seeded by the operating system."""

    def __init__(self, generator: np.random.Generator | None = None) -> None:
        """Take the generator, which nothing else may use."""
        self._generator = generator or np.random.default_rng()

    def bernoulli(self, p: float) -> bool:
        """True with probability p, to within 2 ** -53."""
        return bool(self._generator.random() < p)

    def categorical(self, weights: Tensor) -> int:
        """An index by inversion of the cumulated weights; never one of weight 0."""
        return int(self.draw(weights))

    def draw(self, weights: Tensor) -> Tensor:
        """The index as int64 [1], on the device of the weights."""
        mass = weights.cumsum(0)
        # The share is at most 1 - 2 ** -53, of which no product rounds up to the whole mass.
        return torch.searchsorted(mass, self._generator.random() * mass[-1:], right=True)
