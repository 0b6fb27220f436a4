"""Quantiles of Student's t distribution, for whole degrees of freedom."""

from __future__ import annotations

import math

_HALVINGS = 60
"""Of an angle in (0, pi / 2), which leaves nothing that a float could tell apart."""


def central_quantile(probability: float, freedom: int) -> float:
    """The t for which P(-t < T < t) is `probability`.

    Args:
        probability: in [0, 1).
        freedom: degrees of freedom, at least 1.

    Raises:
        ValueError: one of them is out of range.
    """
    if not 0 <= probability < 1 or freedom < 1:
        raise ValueError(f"no quantile of t for probability {probability} and {freedom} degrees of freedom")
    low, high = 0.0, math.pi / 2
    for _ in range(_HALVINGS):
        middle = (low + high) / 2
        if _central_probability(middle, freedom) < probability:
            low = middle
        else:
            high = middle
    return math.sqrt(freedom) * math.tan(low)


def _central_probability(angle: float, freedom: int) -> float:
    """P(-t < T < t) where angle = atan(t / sqrt(freedom)).

    Abramowitz and Stegun, Handbook of Mathematical Functions, 26.7.3 (odd) and 26.7.4 (even): a sum of powers
    of the cosine, each term from the one before.
    """
    odd = freedom % 2
    cosine = math.cos(angle)
    term, total = (cosine if odd else 1.0), 0.0
    for power in range(odd, freedom - 1, 2):
        total += term
        term *= cosine**2 * (power + 1) / (power + 2)
    total *= math.sin(angle)
    return 2 / math.pi * (angle + total) if odd else total
