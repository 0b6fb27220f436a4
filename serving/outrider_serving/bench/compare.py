"""Runs two sides in interleaved pairs until their ratio is settled."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from outrider_serving.bench.coverage import Coverage, Written, examine
from outrider_serving.bench.pairs import Estimate, Rule, a_first, estimate, wants_more
from outrider_serving.bench.results import Difference, Run, Summary, first_difference, summarise
from outrider_serving.bench.sides import Side, alone
from outrider_serving.bench.workloads import Job


@dataclass(frozen=True, slots=True)
class Pair:
    """One run of each side, right after one another; `a_first` says in which order."""

    a: Run
    b: Run
    a_first: bool

    @property
    def ratio(self) -> float:
        """A's speed by B's."""
        return self.a.speed / self.b.speed


@dataclass(frozen=True, slots=True)
class Equality:
    """Whether both sides generated the same.

    Attributes:
        pairs: how many pairs were looked at.
        different: in how many of them the outputs differed.
        first: where, in the first such pair.
    """

    pairs: int
    different: int
    first: Difference | None


@dataclass(frozen=True, slots=True)
class Comparison:
    """A workload on both sides.

    Attributes:
        pairs: in the order in which they ran; at least 2.
        equality: None where outputs may differ, since they are drawn anew each time.
        coverage: how much of what A wrote in the first pair was seen before; None where nothing was stored,
            or it is not known.
    """

    job: Job
    a: str
    b: str
    pairs: tuple[Pair, ...]
    equality: Equality | None
    coverage: Coverage | None = None

    @property
    def ratios(self) -> list[float]:
        """A's speed by B's, of each pair."""
        return [pair.ratio for pair in self.pairs]

    @property
    def estimate(self) -> Estimate:
        """What the pairs say."""
        return estimate(self.ratios)

    @property
    def summaries(self) -> tuple[Summary, Summary]:
        """Figures of A and of B."""
        return summarise([pair.a for pair in self.pairs]), summarise([pair.b for pair in self.pairs])


def compare(
    a: Side,
    b: Side,
    job: Job,
    rule: Rule,
    told: Callable[[Pair], None] = lambda _: None,
    begins: Callable[[str], None] = lambda _: None,
) -> Comparison:
    """Measure one workload: a run of each side to warm up, then pairs until the rule is content.

    `told` gets every pair as it is measured, `begins` a few words on each thing that comes before the pairs.

    Raises:
        BenchError: a side could not do its work.
    """
    stored, _ = (_prepare(side, job, begins) for side in (a, b))
    for side in (a, b):
        begins(f"warming up, side {side.name}")
        alone(partial(side.run, job))
    pairs: list[Pair] = []
    while wants_more([pair.ratio for pair in pairs], rule):
        pairs.append(_measure(a, b, job, a_first(len(pairs))))
        told(pairs[-1])
    equality = _equality(pairs) if job.sampling.repeats else None
    return Comparison(job, a.name, b.name, tuple(pairs), equality, _coverage(pairs[0].a, stored))


def _prepare(side: Side, job: Job, begins: Callable[[str], None]) -> Sequence[Written]:
    if job.workload.stored:
        begins(f"preparing: {len(job.workload.stored)} earlier requests, side {side.name}")
    return alone(partial(side.prepare, job))


def _coverage(run: Run, stored: Sequence[Written]) -> Coverage | None:
    written = run.written
    return None if written is None or not stored else examine(stored, written)


def _measure(a: Side, b: Side, job: Job, a_goes_first: bool) -> Pair:
    first, second = (a, b) if a_goes_first else (b, a)
    one, other = alone(partial(first.run, job)), alone(partial(second.run, job))
    return Pair(one, other, a_first=True) if a_goes_first else Pair(other, one, a_first=False)


def _equality(pairs: Sequence[Pair]) -> Equality:
    found = [first_difference(pair.a, pair.b) for pair in pairs]
    differences = [difference for difference in found if difference is not None]
    return Equality(len(pairs), len(differences), differences[0] if differences else None)
