"""Where the time of an engine's steps goes, from its step records."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import astuple, dataclass

from outrider_serving.engine.records import StepRecord


@dataclass(frozen=True, slots=True)
class Breakdown:
    """Sums over decoding steps: those in which no request had more of its text to read than one token.

    Attributes:
        steps: how many.
        rows: requests in them.
        tokens: tokens run through the target.
        proposal, target, verification, rest: seconds, as in `StepRecord`.
    """

    steps: int = 0
    rows: int = 0
    tokens: int = 0
    proposal: float = 0.0
    target: float = 0.0
    verification: float = 0.0
    rest: float = 0.0

    def __add__(self, other: Breakdown) -> Breakdown:
        return Breakdown(*(one + two for one, two in zip(astuple(self), astuple(other), strict=True)))

    @property
    def busy(self) -> float:
        """Seconds of all parts."""
        return self.proposal + self.target + self.verification + self.rest

    @property
    def outside_target(self) -> float:
        """Share of the time that is not the target's; 0 where there were no steps."""
        return 1 - self.target / self.busy if self.busy else 0.0


def break_down(records: Iterable[StepRecord]) -> Breakdown:
    """The parts of the decoding steps among these; steps that read prompts are left out."""
    return sum((_of(record) for record in records if _decodes(record)), Breakdown())


def _decodes(record: StepRecord) -> bool:
    return all(row.tokens == 1 + row.proposed for row in record.rows)


def _of(record: StepRecord) -> Breakdown:
    return Breakdown(
        steps=1,
        rows=len(record.rows),
        tokens=record.tokens,
        proposal=record.proposal_seconds,
        target=record.target_seconds,
        verification=record.verification_seconds,
        rest=record.rest_seconds,
    )
