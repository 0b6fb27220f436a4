"""What pairs of measurements say about a ratio: its interval, whether it is settled, whether it meets a bar.

**Method.** A pair is one run of each side, one right after the other. Its ratio is that of A's speed to B's,
so whatever slows the machine during a pair slows both. The ratio reported is the geometric mean of the pairs'
ratios; its interval is Student's t interval for the mean of their logarithms, taken back by exp. Every other
pair runs B first, and an even number of pairs is looked at, so that a steady drift of the machine cancels.

Pairs are added until the interval is narrow enough. Stopping by the interval's width, not by where it lies,
keeps its coverage near the nominal one (Chow and Robbins 1965, On the asymptotic theory of fixed-width
sequential confidence intervals for the mean): a bar is never looked at while pairs are taken.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum

from outrider_serving.bench.student import central_quantile

CONFIDENCE = 0.95

LEAST_PAIRS = 10
"""With fewer, whatever their interval says, nothing is settled."""

MOST_PAIRS = 60
"""What is not settled after so many is reported as that."""

HALF_WIDTH_IN_PROCESS = 0.03
HALF_WIDTH_BETWEEN_PROCESSES = 0.05
"""How wide half of an interval may be, as a share of the ratio."""


class Verdict(StrEnum):
    """What the interval of a ratio says about the bar "at least x"."""

    MET = "met"
    FAILED = "failed"
    NOT_SETTLED = "not settled"


@dataclass(frozen=True, slots=True)
class Estimate:
    """What pairs say about a ratio.

    Attributes:
        ratio: geometric mean.
        low, high: ends of the interval at `CONFIDENCE`.
        pairs: how many there were.
    """

    ratio: float
    low: float
    high: float
    pairs: int

    @property
    def half_width(self) -> float:
        """Half of the interval's length as a share of the ratio."""
        return (self.high - self.low) / 2 / self.ratio


@dataclass(frozen=True, slots=True)
class Rule:
    """When to stop.

    Attributes:
        half_width: the widest half of an interval that is settled.
        least: pairs before which it is not looked at.
        most: pairs after which it is given up.

    Raises:
        ValueError: fewer than 2 pairs, which have no interval, or `least` over `most`.
    """

    half_width: float
    least: int = LEAST_PAIRS
    most: int = MOST_PAIRS

    def __post_init__(self) -> None:
        if not 2 <= self.least <= self.most:
            raise ValueError(f"{self.least}..{self.most} pairs: at least 2, and the first at most the second")


def estimate(ratios: Sequence[float]) -> Estimate:
    """The ratio and its interval from those of at least 2 pairs; see the module's docstring.

    Raises:
        ValueError: there are fewer, or one is not positive and finite.
    """
    if len(ratios) < 2 or not all(0 < ratio < math.inf for ratio in ratios):
        raise ValueError(f"an interval needs at least 2 positive ratios, not {list(ratios)}")
    logarithms = [math.log(ratio) for ratio in ratios]
    mean = statistics.fmean(logarithms)
    error = statistics.stdev(logarithms) / math.sqrt(len(ratios))
    reach = central_quantile(CONFIDENCE, len(ratios) - 1) * error
    return Estimate(math.exp(mean), math.exp(mean - reach), math.exp(mean + reach), len(ratios))


def settled(found: Estimate, rule: Rule) -> bool:
    """The interval is narrow enough, from enough pairs."""
    return found.pairs >= LEAST_PAIRS and found.half_width <= rule.half_width


def wants_more(ratios: Sequence[float], rule: Rule) -> bool:
    """Another pair is to be measured."""
    if len(ratios) >= rule.most:
        return False
    if len(ratios) < rule.least or len(ratios) % 2:
        return True
    return not settled(estimate(ratios), rule)


def a_first(pair: int) -> bool:
    """Whether A runs first in the pair of this index: AB, BA, AB, ..."""
    return pair % 2 == 0


def verdict(found: Estimate, bar: float, rule: Rule) -> Verdict:
    """Whether the ratio is at least `bar`.

    It fails where the whole interval lies under the bar. Otherwise it is met only where it is settled.
    """
    if found.high < bar:
        return Verdict.FAILED
    return Verdict.MET if settled(found, rule) else Verdict.NOT_SETTLED
