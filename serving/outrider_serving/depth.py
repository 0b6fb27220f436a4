"""How deep to propose now: as deep as measured step times and acceptance say that it pays.

A step over n tokens takes t(n) seconds, which is measured. A row whose first proposed token is accepted with
chance a, and each later one with chance b, given that those before it were, commits 1 + a + ab + ... +
ab^(d-1) tokens in expectation at depth d (with a = b: Leviathan et al. 2023, arXiv 2211.17192, equation 1).
So the k-th proposed token of a row is worth ab^(k-1); it is there with the chance that the row has something
to propose. What is asked for are the most valuable tokens of all rows, as many as maximise expected committed
tokens per second; none is a normal answer, and the usual one where a step's time grows with every token.

Estimates age: a time that was not measured for long is forgotten, and a row that proposes nothing is tried
again, so that neither is given up for good. Tries of such rows may take `PROBES` of the time.
"""

from __future__ import annotations

from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple, Protocol, TypeAlias

import numpy as np
from numpy.typing import NDArray

from outrider_serving.step_times import StepTimes

PROBES = 0.01
"""Share of the time that proposals may take which are only made to see whether they are accepted now."""

_PROBE_DEPTH = 2

_REST_STEPS = 8
"""For so many steps it is not thought about again that nothing is worth proposing, unless a try succeeds or a
row begins that has something worth it."""

_FADE = 0.9
_KIND_FADE = 0.98
"""Each outcome, and each token that was decided on, lets earlier ones count less: of a row, and of a kind."""

_WORTH_IT = 1.1
"""Proposals are made where so many times what no proposals give is expected. What they give comes now to one
row and now to another, while the rows of a batch wait for each other; and less is within what times and
chances are known to."""

_PRIOR_WEIGHT = 3.0
_GROWTH = 2.0
"""How many times larger than all that are known a step may be."""


MAX_KINDS = 1024
"""Of more, those longest without an outcome are forgotten."""

Kind: TypeAlias = Hashable


class Row(NamedTuple):
    """A row that can propose.

    Attributes:
        request_id: whose it is.
        kind: what its proposals come from, and whose they are: rows learn from those of their kind alone.
        longest: the deepest proposal of use to it.
        shortest: the least deep one that is of use.
    """

    request_id: str
    kind: Kind
    longest: int
    shortest: int = 1


class Outcome(NamedTuple):
    """What became of a row that might propose.

    Attributes:
        request_id: whose it is.
        kind: see `Row`.
        depth: tokens on the longest path of its proposal; 0 where it had nothing to propose.
        accepted: how many of them were kept.
    """

    request_id: str
    kind: Kind
    depth: int
    accepted: int


class DepthRule(Protocol):
    """Says how deep each row may propose; belongs to the thread of the steps."""

    @property
    def rests(self) -> bool:
        """No row that has begun is to propose in the next step: it need not be asked about any."""
        ...

    def choose(self, rows: Sequence[Row], running: int, beginning: bool = False, /) -> Mapping[str, int]:
        """The depth of each row in the next step, by request id.

        Args:
            rows: those that can propose.
            running: all that are in the step, which have a token each to run without proposals.
            beginning: these are not all that can, but begin with the step, after the others were chosen for.
        """
        ...

    def observe(self, outcomes: Iterable[Outcome], /) -> None:
        """Take note of a step: what became of the rows that might propose."""
        ...

    def time(self, tokens: int, seconds: float, /) -> None:
        """Take note of how long it took, if every row verified in it, and had one token of its text to run.

        Args:
            tokens: all of its target pass.
            seconds: the whole step took.
        """
        ...

    def forget(self, request_ids: Iterable[str], /) -> None:
        """Requests have ended."""
        ...


class FullDepth:
    """Always as deep as the settings allow."""

    rests = False

    def choose(self, rows: Sequence[Row], _running: int, _beginning: bool = False, /) -> Mapping[str, int]:
        """The longest of each."""
        return {row.request_id: row.longest for row in rows}

    def observe(self, _outcomes: Iterable[Outcome], /) -> None:
        """Nothing is learned."""

    def time(self, _tokens: int, _seconds: float, /) -> None:
        """Nothing is learned."""

    def forget(self, _request_ids: Iterable[str], /) -> None:
        """Nothing is kept."""


@dataclass(slots=True)
class _Share:
    """How many of how many, of which old ones count less and less."""

    some: float = 0.0
    all: float = 0.0

    def add(self, some: int, whole: int, fade: float) -> None:
        """Take note of more."""
        faded = fade**whole
        self.some = self.some * faded + some
        self.all = self.all * faded + whole

    def of(self, prior: float) -> float:
        """The share; with few seen, near the prior."""
        return (self.some + prior * _PRIOR_WEIGHT) / (self.all + _PRIOR_WEIGHT)


class _Estimate(NamedTuple):
    """The chances that there is a proposal, and that its first token and each later one are accepted."""

    ready: float
    first: float
    later: float


_START = _Estimate(1.0, 0.5, 0.5)


@dataclass(slots=True)
class _Record:
    """What became of a row's proposals, or of a kind's."""

    kind: Kind
    fade: float = _FADE
    ready: _Share = field(default_factory=_Share)
    first: _Share = field(default_factory=_Share)
    later: _Share = field(default_factory=_Share)
    idle: int = 0  # steps since it was last asked

    def add(self, outcome: Outcome) -> None:
        """A refused token is the last one that was decided on."""
        self.idle = 0
        self.ready.add(int(outcome.depth > 0), 1, self.fade)
        if outcome.depth:
            decided = min(outcome.accepted + 1, outcome.depth)
            self.first.add(min(outcome.accepted, 1), 1, self.fade)
            self.later.add(max(outcome.accepted - 1, 0), decided - 1, self.fade)

    def estimate(self, prior: _Estimate) -> _Estimate:
        """Chances above 0, and below 1 where the prior's are."""
        return _Estimate(self.ready.of(prior.ready), self.first.of(prior.first), self.later.of(prior.later))


@dataclass(slots=True)
class MeasuredDepth:
    """The rule that the module describes."""

    times: StepTimes = field(default_factory=StepTimes)
    _rows: dict[str, _Record] = field(default_factory=dict)
    _kinds: dict[Kind, _Record] = field(default_factory=dict)  # the one with the latest outcome is the last
    _credit: float = 0.0
    _rest: int = 0  # steps for which the rows that are known do not propose

    @property
    def rests(self) -> bool:
        """See `DepthRule.rests`."""
        return self._rest > 0

    def choose(self, rows: Sequence[Row], running: int, beginning: bool = False, /) -> Mapping[str, int]:
        """See `DepthRule.choose`."""
        if not rows:
            return {}
        depths = self._deepest(rows, running)
        if depths.any():
            self._rest = 0
        elif not beginning:
            self._rest = _REST_STEPS
        self._probe(rows, depths, running)
        return {row.request_id: int(depth) for row, depth in zip(rows, depths, strict=True)}

    def _deepest(self, rows: Sequence[Row], running: int) -> NDArray[np.intp]:
        """How deep each row is to propose, without a thought of tries."""
        worth, ready, whose = self._worth(rows)
        shortest = np.array([row.shortest for row in rows])
        most = max(int(_GROWTH * max(running, self.times.largest)) - running, shortest.max())
        order = np.argsort(-worth, kind="stable")[:most]
        expected = running + np.concatenate([[0.0], np.cumsum((ready * worth)[order])])
        seconds = self.times.of(running + np.concatenate([[0.0], np.cumsum(ready[order])]))
        rates = expected / seconds
        best = int(np.argmax(rates))
        taken = order[: best if rates[best] >= _WORTH_IT * rates[0] else 0]
        depths = np.bincount(whose[taken], minlength=len(rows))
        return np.where(depths < shortest, 0, depths)

    def observe(self, outcomes: Iterable[Outcome], /) -> None:
        """See `DepthRule.observe`."""
        self._rest = max(0, self._rest - 1)
        for record in self._rows.values():
            record.idle += 1
        for outcome in outcomes:
            if outcome.request_id in self._rows:  # else it has ended
                self._rows[outcome.request_id].add(outcome)
            kind = self._kinds.pop(outcome.kind, None) or _Record(outcome.kind, _KIND_FADE)
            kind.add(outcome)
            self._kinds[outcome.kind] = kind
            if len(self._kinds) > MAX_KINDS:
                del self._kinds[next(iter(self._kinds))]
            if outcome.accepted:
                self._rest = 0
            elif not outcome.depth:  # a try that cost nothing, and said little
                self._rest //= 2

    def time(self, tokens: int, seconds: float, /) -> None:
        """See `DepthRule.time`."""
        self.times.observe(tokens, seconds)
        self._credit = min(self._credit + PROBES * seconds, seconds)

    def forget(self, request_ids: Iterable[str], /) -> None:
        """See `DepthRule.forget`."""
        for request_id in request_ids:
            self._rows.pop(request_id, None)

    def _worth(
        self, rows: Sequence[Row]
    ) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.intp]]:
        """What each token that might be proposed is worth if it is, the chance that it is, and its row."""
        longest = np.array([row.longest for row in rows])
        estimates = np.array(self._estimates(rows))
        whose = np.repeat(np.arange(len(rows)), longest)
        before = np.arange(len(whose)) - np.repeat(np.cumsum(longest) - longest, longest)
        ready, first, later = estimates[whose].T
        worth = first * later**before
        start = 0
        for row in rows:  # the first ones come together or not at all
            if row.shortest > 1:
                together = slice(start, start + row.shortest)
                worth[together] = worth[together].mean()
            start += row.longest
        return worth, ready, whose

    def _estimates(self, rows: Sequence[Row]) -> list[_Estimate]:
        """Of each row, near its kind's where little is known of it."""
        kinds = {row.kind: self._kinds.get(row.kind) for row in rows}
        priors = {kind: known.estimate(_START) if known else _START for kind, known in kinds.items()}
        return [self._record(row).estimate(priors[row.kind]) for row in rows]

    def _record(self, row: Row) -> _Record:
        """What is known of a row's proposals of its kind."""
        record = self._rows.get(row.request_id)
        if record is None or record.kind != row.kind:
            record = self._rows[row.request_id] = _Record(row.kind)
        return record

    def _probe(self, rows: Sequence[Row], depths: NDArray[np.intp], running: int) -> None:
        """Let the row that has been silent for longest try again, if its try is paid for."""
        silent = [n for n, row in enumerate(rows) if depths[n] == 0 and row.longest > 0]
        if not silent:
            return
        chosen = max(silent, key=lambda n: self._rows[rows[n].request_id].idle)
        depth = max(rows[chosen].shortest, min(_PROBE_DEPTH, rows[chosen].longest))
        now = running + float(depths.sum())
        before, after = self.times.of(np.array([now, now + depth]))
        if after - before <= self._credit:
            self._credit -= max(0.0, float(after - before))
            self._rows[rows[chosen].request_id].idle = 0
            depths[chosen] = depth
