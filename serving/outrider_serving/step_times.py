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
"""After so many it is where it was measured only once: it may have been disturbed."""


class StepTimes:
    """What a step takes, by the number of tokens in it.

    Sizes are kept in classes a quarter of a power of two wide. Of other sizes it is known that more tokens
    never take less time, and never more time each; the least time that this allows is what they are taken to
    need, so that a size which might pay is tried, and then known. Beyond the largest, time grows as it did
    last.
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
            self._times[size] = _Time(float(tokens), seconds, self._steps)
        else:
            learn = max(_LEARN, 1 / self._measured[size])
            known.tokens += learn * (tokens - known.tokens)
            known.seconds += learn * (min(seconds, _OUTLIER * known.seconds) - known.seconds)
            known.step = self._steps
        old = [one for one, time in self._times.items() if self._steps - time.step > self._lasts(one)]
        for one in old:
            del self._times[one]
        self._curve = None

    def _lasts(self, size: int) -> int:
        """For how many steps a time is believed."""
        return _DOUBT_STEPS if self._measured[size] == 1 else _FORGET_STEPS

    def of(self, tokens: NDArray[np.float64]) -> NDArray[np.float64]:
        """Expected seconds for each number of tokens; all the same where nothing is known."""
        if not self._times:
            return np.ones_like(tokens)
        if self._curve is None:
            self._curve = _curve(self._times.values())
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
    """A running mean of one class: of sizes, and of what they took; `step` is the latest."""

    tokens: float
    seconds: float
    step: int


def _curve(times: Iterable[_Time]) -> tuple[NDArray[np.float64], NDArray[np.float64]]:
    """Sizes, ascending, and seconds: more tokens never take less."""
    ordered = sorted(times, key=lambda time: time.tokens)
    seconds = np.maximum.accumulate([time.seconds for time in ordered])
    return np.array([time.tokens for time in ordered]), seconds


def _size_class(tokens: int) -> int:
    return round(4 * math.log2(tokens))
