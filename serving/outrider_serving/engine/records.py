"""What the step loop reports of each step: the only source of metrics, logs and the depth rule."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_serving.engine.types import Delta, EngineError, Labels


@dataclass(frozen=True, slots=True)
class RowRecord:
    """One request's part of a step.

    Attributes:
        request_id: the request.
        labels: its telemetry labels, fixed at arrival.
        tokens: tokens run through the target: prompt tokens, the last committed token, proposed tokens.
        context: tokens that were already in the store of keys and values.
        proposed: proposed tokens verified, over all branches; 0 within a prompt.
        depth: length of the longest path among them.
        accepted: proposed tokens that were kept.
        committed: tokens committed: `accepted` plus the target's own, less what came after an end of
            sequence or max_tokens; 0 for a part of the prompt and for a row that failed.
        reused: prompt tokens found in pages that were there already, in the row with which a request begins
            or begins anew; 0 in all others.
        finished: the request ended with this step, whether completed or failed.
        failed: the target pass or verification raised, which failed the request.
        source: where its proposal was found, if its proposer looks in several places.
    """

    request_id: str
    labels: Labels
    tokens: int
    context: int
    proposed: int
    depth: int
    accepted: int
    committed: int
    reused: int = 0
    finished: bool = False
    failed: bool = False
    source: str = ""


@dataclass(frozen=True, slots=True)
class PageCounts:
    """Pages of keys and values. What is neither held nor cached is empty.

    Attributes:
        total: all of them.
        held: in use by requests.
        cached: held by none, but kept for requests that begin with the same text.
    """

    total: int = 0
    held: int = 0
    cached: int = 0


@dataclass(frozen=True, slots=True)
class GraphCounts:
    """Passes of the target that are replayed from graphs; none where no pass is.

    Attributes:
        captured: captures so far: one for each size, and again for hidden states that came to be wanted.
        fallbacks: sizes that could not be captured, so that their passes run without.
    """

    captured: int = 0
    fallbacks: int = 0


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One step of the loop. Its busy seconds are the sum of the four parts.

    Attributes:
        arm: the arm in force, and
        generation: the generation of the settings in force, both during the whole step.
        started: time.monotonic() at its start.
        rows: the requests that took part.
        waiting: requests not yet running when the step was scheduled.
        proposal_seconds: in proposers: loading between steps, making proposals, taking note of texts.
        target_seconds: from the launch of the target pass until its results are there, and what was done
            meanwhile: taking messages, looking ahead.
        verification_seconds: distributions, draws and comparison.
        rest_seconds: everything else: scheduling, handing over of deltas.
        proposer_failures: exceptions raised by proposers in the step, or since the one before; the rows
            concerned went on without proposals.
        preemptions: requests that lost their pages in this step, and wait again.
    """

    arm: str
    generation: int
    started: float
    rows: tuple[RowRecord, ...]
    waiting: int
    proposal_seconds: float
    target_seconds: float
    verification_seconds: float
    rest_seconds: float
    proposer_failures: int = 0
    preemptions: int = 0

    @property
    def busy_seconds(self) -> float:
        """How long the step took."""
        return self.proposal_seconds + self.target_seconds + self.verification_seconds + self.rest_seconds

    @property
    def tokens(self) -> int:
        """Tokens run through the target."""
        return sum(row.tokens for row in self.rows)

    @property
    def committed(self) -> int:
        """Tokens committed."""
        return sum(row.committed for row in self.rows)

    @property
    def proposed_by_position(self) -> tuple[int, ...]:
        """How many rows had a proposed token at depth 1, 2, ...; empty when nothing was proposed."""
        return _by_position([row.depth for row in self.rows])

    @property
    def accepted_by_position(self) -> tuple[int, ...]:
        """How many rows kept their proposed token at depth 1, 2, ...; as long as the longest accepted run."""
        return _by_position([row.accepted for row in self.rows])


@dataclass(frozen=True, slots=True)
class StepOutput:
    """What one step did.

    Attributes:
        record: None where no request took part.
        deltas: what it added to which request.
        failures: requests that ended with an error, by id.
        cancelled: requests that ended because nobody reads them any more.
    """

    record: StepRecord | None
    deltas: tuple[Delta, ...] = ()
    failures: tuple[tuple[str, EngineError], ...] = ()
    cancelled: tuple[str, ...] = ()


def _by_position(depths: list[int]) -> tuple[int, ...]:
    """How many of the paths reach depth 1, 2, ..."""
    positions = range(1, max(depths, default=0) + 1)
    return tuple(sum(depth >= position for depth in depths) for position in positions)
