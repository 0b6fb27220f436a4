"""What a step takes, by the number of tokens in it: measured, and for sizes between and beyond."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

_LEARN = 0.2

_OUTLIER = 2.0
"""A time counts as at most so many times what was expected: others may have had the processor."""

_TICK = 1e-6
"""Seconds that a step takes at least: of none it could not be said how much longer another one takes."""

_FORGET_STEPS = 400
"""After so many steps a time is forgotten that was not measured again."""

_DOUBT_STEPS = 100
"""So many for each time that it was measured, where these are fewer: it may have been disturbed."""

_STEEP, _STEEP_STEPS, _STEEP_GROWTH = 1.25, 8, 4
"""A time of so many times that of the next smaller size is doubted sooner, as what disturbs a step makes it
slower, and it would not be measured again: after 8 steps, and 4 times as many for each time more. If it was
not so steep when it was measured, after 8: a loaded machine has become quiet since then."""

_FADE = 0.99
"""With each step earlier measurements count less against those of other sizes."""


class StepTimes:
    """What a step takes, by the number of tokens in it.

    Sizes are kept in classes a quarter of a power of two wide. More tokens never take less time: where means
    contradict that, neighbours are taken together, each by how much it counts (isotonic regression; Barlow et
    al. 1972), so that a few steps that were disturbed say little of a size that is measured all the time. Nor
    do more tokens take more time each. The least time that both allow is what other sizes are taken to need,
    so that a size which might pay is tried, and then known. Beyond the largest, time grows as it did last.
    """

    def __init__(self) -> None:
        self._times: dict[int, _Time] = {}
        self._measured = Counter[int]()  # times that are forgotten included
        self._steps = 0
        self._curve: tuple[NDArray[np.float64], NDArray[np.float64]] | None = None

    @property
    def largest(self) -> float:
        """The largest size that is known; 0 where none is."""
        return max((time.tokens for time in self._times.values()), default=0.0)

    def observe(self, tokens: int, seconds: float) -> None:
        """Take note of a step."""
        self._steps += 1
        seconds = max(seconds, _TICK)
        size = _size_class(tokens)
        known = self._times.get(size)
        self._measured[size] += 1
        if known is None:
            self._times[size] = _Time(float(tokens), seconds, self._steps, 1.0)
        else:
            learn = max(_LEARN, 1 / self._measured[size])
            known.tokens += learn * (tokens - known.tokens)
            known.seconds += learn * (min(seconds, _OUTLIER * known.seconds) - known.seconds)
            known.weight = known.weight_at(self._steps) + 1.0
            known.step = self._steps
        self._forget()
        self._curve = None

    def _forget(self) -> None:
        """Let go what is believed no more."""
        smaller = math.inf
        for size in sorted(self._times):
            time = self._times[size]
            above = time.seconds / smaller
            if time.step == self._steps:
                time.above = above
            if self._steps - time.step > self._lasts(size, above):
                del self._times[size]
            else:
                smaller = time.seconds

    def _lasts(self, size: int, above: float) -> int:
        """For how many steps a time is believed that is so many times that of the next smaller size."""
        if above > _STEEP * max(1.0, self._times[size].above):
            return _STEEP_STEPS
        measured = self._measured[size]
        lasts = min(_DOUBT_STEPS * measured, _FORGET_STEPS)
        doubted = _STEEP_STEPS * _STEEP_GROWTH ** min(measured - 1, 4)
        return int(min(lasts, doubted)) if above > _STEEP else lasts

    def of(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds for each number of tokens; all the same where nothing is known."""
        if not self._times:
            return np.ones_like(tokens)
        if self._curve is None:
            self._curve = _curve(self._times.values(), self._steps)
        sizes, seconds = self._curve
        after = np.searchsorted(sizes, tokens)
        upper = np.minimum(after, len(sizes) - 1)
        found = np.maximum(
            np.where(after > 0, seconds[np.maximum(after - 1, 0)], 0.0),
            seconds[upper] * np.minimum(1.0, tokens / sizes[upper]),
        )
        if len(sizes) > 1:
            slope = (seconds[-1] - seconds[-2]) / (sizes[-1] - sizes[-2])
            found += slope * np.maximum(0.0, tokens - sizes[-1])
        return found


@dataclass(slots=True)
class _Time:
    """A running mean of one class: of sizes, and of what they took.

    Attributes:
        step: the latest of them, with a `weight`.
        above: how many times that of the next smaller size it was then.
    """

    tokens: float
    seconds: float
    step: int
    weight: float
    above: float = 0.0

    def weight_at(self, step: int) -> float:
        """How many measurements it counts for."""
        return self.weight * _FADE ** (step - self.step)


def _curve(times: Iterable[_Time], step: int) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes, ascending, and seconds: more tokens never take less."""
    ordered = sorted(times, key=lambda time: time.tokens)
    pools: list[tuple[float, float, int]] = []  # seconds, weight, classes
    for time in ordered:
        seconds, weight, classes = time.seconds, time.weight_at(step), 1
        while pools and pools[-1][0] > seconds:
            other, more, some = pools.pop()
            seconds = (seconds * weight + other * more) / (weight + more)
            weight, classes = weight + more, classes + some
        pools.append((seconds, weight, classes))
    fitted = np.repeat([pool[0] for pool in pools], [pool[2] for pool in pools])
    return np.array([time.tokens for time in ordered]), fitted


def _size_class(tokens: int) -> int:
    return round(4 * math.log2(tokens))
