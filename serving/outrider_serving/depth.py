"""How deep to propose now: as deep as measured step times and acceptance say that it pays.

A step over n tokens takes t(n) seconds, which is measured. A row whose proposed tokens are each accepted
with chance a, given that those before them were, commits 1 + a + a^2 + ... + a^d tokens in expectation at
depth d (Leviathan et al. 2023, arXiv 2211.17192, equation 1). So the k-th proposed token of a row is worth
a^k. What is proposed are the most valuable tokens of all rows, as many as maximise expected committed tokens
per second; none is a normal answer, and the usual one where a step's time grows with every token.

Estimates age: a time that was not measured for long is forgotten, and a row that proposes nothing is tried
again, so that neither is given up for good. Tries of such rows may take `PROBES` of the time.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol

import numpy as np
from numpy.typing import NDArray

PROBES = 0.01
"""Share of the time that proposals may take which are only made to see whether they are accepted now."""

_PROBE_DEPTH = 2
_LEARN = 0.2
_OUTLIER = 2.0
"""A time counts as at most so many times what was expected: others may have had the processor."""

_FORGET_STEPS = 400
"""After so many steps a time is forgotten that was not measured again."""
_DOUBT_STEPS = 25
"""After so many it is where it was measured only once: it may have been disturbed. Each time more, four times
as many."""

_FADE = 0.9
_PRIOR = 0.5
_PRIOR_WEIGHT = 3.0
_GROWTH = 2.0
"""How many times larger than all that are known a step may be."""


class Row(NamedTuple):
    """A row that can propose.

    Attributes:
        request_id: whose it is.
        kind: what its proposals come from: rows of a kind learn from each other.
        longest: the deepest proposal of use to it.
    """

    request_id: str
    kind: str
    longest: int


class Outcome(NamedTuple):
    """What became of a proposal: `depth` tokens on its longest path, of which `accepted` were kept."""

    request_id: str
    kind: str
    depth: int
    accepted: int


class DepthRule(Protocol):
    """Says how deep each row may propose; belongs to the thread of the steps."""

    def choose(self, rows: Sequence[Row], tokens: int, /) -> Mapping[str, int]:
        """The depth of each row in the next step, by request id.

        Args:
            rows: those that can propose.
            tokens: those of the step without proposals.
        """
        ...

    def observe(self, tokens: int, seconds: float, outcomes: Iterable[Outcome], /) -> None:
        """Take note of a step in which every row verified, and had one token of its text to run.

        Args:
            tokens: all of its target pass.
            seconds: the whole step took.
            outcomes: of the rows that proposed.
        """
        ...

    def forget(self, request_ids: Iterable[str], /) -> None:
        """Requests have ended."""
        ...


class FullDepth:
    """Always as deep as the settings allow."""

    def choose(self, rows: Sequence[Row], _tokens: int, /) -> Mapping[str, int]:
        """The longest of each."""
        return {row.request_id: row.longest for row in rows}

    def observe(self, _tokens: int, _seconds: float, _outcomes: Iterable[Outcome], /) -> None:
        """Nothing is learned."""

    def forget(self, _request_ids: Iterable[str], /) -> None:
        """Nothing is kept."""


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
        return min(_FORGET_STEPS, _DOUBT_STEPS << 2 * min(self._measured[size] - 1, 4))

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


@dataclass(slots=True)
class _Acceptance:
    """Accepted tokens among those that were decided on, of which old ones count less and less."""

    accepted: float = 0.0
    decided: float = 0.0
    idle: int = 0  # steps since the last proposal

    def add(self, outcome: Outcome) -> None:
        """A refused token is the last one that was decided on."""
        decided = min(outcome.accepted + 1, outcome.depth)
        fade = _FADE**decided
        self.accepted = self.accepted * fade + outcome.accepted
        self.decided = self.decided * fade + decided
        self.idle = 0

    def chance(self, prior: float) -> float:
        """Of a proposed token, given that those before it were accepted; between 0 and 1, neither of them."""
        return (self.accepted + prior * _PRIOR_WEIGHT) / (self.decided + _PRIOR_WEIGHT)


@dataclass(slots=True)
class MeasuredDepth:
    """The rule that the module describes."""

    times: StepTimes = field(default_factory=StepTimes)
    _rows: dict[str, _Acceptance] = field(default_factory=dict)
    _kinds: dict[str, _Acceptance] = field(default_factory=dict)
    _credit: float = 0.0

    def choose(self, rows: Sequence[Row], tokens: int, /) -> Mapping[str, int]:
        """See `DepthRule.choose`."""
        if not rows:
            return {}
        worth, whose = self._worth(rows)
        most = int(_GROWTH * max(tokens, self.times.largest)) - tokens
        order = np.argsort(-worth, kind="stable")[:most]
        expected = len(rows) + np.concatenate([[0.0], np.cumsum(worth[order])])
        seconds = self.times.of(tokens + np.arange(len(expected), dtype=np.float64))
        taken = order[: int(np.argmax(expected / seconds))]
        depths = np.bincount(whose[taken], minlength=len(rows))
        self._probe(rows, depths, tokens, float(seconds[len(taken)]))
        return {row.request_id: int(depth) for row, depth in zip(rows, depths, strict=True)}

    def observe(self, tokens: int, seconds: float, outcomes: Iterable[Outcome], /) -> None:
        """See `DepthRule.observe`."""
        self.times.observe(tokens, seconds)
        self._credit = min(self._credit + PROBES * seconds, seconds)
        for acceptance in self._rows.values():
            acceptance.idle += 1
        for outcome in outcomes:
            self._rows.setdefault(outcome.request_id, _Acceptance()).add(outcome)
            self._kinds.setdefault(outcome.kind, _Acceptance()).add(outcome)

    def forget(self, request_ids: Iterable[str], /) -> None:
        """See `DepthRule.forget`."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def _worth(self, rows: Sequence[Row]) -> tuple[NDArray[np.float64], NDArray[np.intp]]:
        """What each token that could be proposed is worth, and its row."""
        longest = np.array([row.longest for row in rows])
        chances = np.array([self._chance(row) for row in rows])
        whose = np.repeat(np.arange(len(rows)), longest)
        depth = np.arange(len(whose)) - np.repeat(np.cumsum(longest) - longest, longest) + 1
        return chances[whose] ** depth, whose

    def _chance(self, row: Row) -> float:
        kind = self._kinds.get(row.kind)
        prior = _PRIOR if kind is None else kind.chance(_PRIOR)
        own = self._rows.setdefault(row.request_id, _Acceptance())
        return own.chance(prior)

    def _probe(self, rows: Sequence[Row], depths: NDArray[np.intp], tokens: int, seconds: float) -> None:
        """Let the row that has been silent for longest try again, if its try is paid for."""
        silent = [n for n, row in enumerate(rows) if depths[n] == 0 and row.longest > 0]
        if not silent:
            return
        chosen = max(silent, key=lambda n: self._rows[rows[n].request_id].idle)
        depth = min(_PROBE_DEPTH, rows[chosen].longest)
        after = self.times.of(np.array([float(tokens + depths.sum() + depth)]))[0]
        if after - seconds <= self._credit:
            self._credit -= max(0.0, float(after - seconds))
            self._rows[rows[chosen].request_id].idle = 0
            depths[chosen] = depth
