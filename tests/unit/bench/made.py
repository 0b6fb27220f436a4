"""Runs, sides and comparisons that a test makes up."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from outrider_serving.bench.breakdown import Breakdown
from outrider_serving.bench.coverage import Written
from outrider_serving.bench.results import Run, Stream
from outrider_serving.bench.workloads import Job, Sampling, Workload

JOB = Job(Workload("open", ("A prompt",)), tokens=4)
DRAWN = Job(Workload("open", ("A prompt",)), tokens=4, sampling=Sampling(temperature=1.0))


def run(
    seconds: float, output: Sequence[int] | str = (1, 2, 3, 4), *, breakdown: Breakdown | None = None
) -> Run:
    """One stream of 4 tokens, two of which came at half of its time."""
    whole = output if isinstance(output, str) else tuple(output)
    return Run((Stream(whole, 4, (seconds / 2, seconds), proposed=4, accepted=2, prompt=(7,)),), breakdown)


@dataclass
class MadeSide:
    """A side whose n-th run, counted from 0 with the one that warms up, is what `runs` says."""

    name: str
    runs: Callable[[int], Run]
    calls: list[str] = field(default_factory=list)
    count: int = 0
    stored: tuple[Written, ...] = ()

    def prepare(self, job: Job) -> tuple[Written, ...]:
        self.calls.append(f"prepare {self.name}")
        return self.stored

    def run(self, job: Job) -> Run:
        self.calls.append(self.name)
        self.count += 1
        return self.runs(self.count - 1)

    def close(self) -> None:
        self.calls.append(f"close {self.name}")
