"""One step: plan, propose, run, verify, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import torch

from outrider_serving.engine.active import Active, Turn
from outrider_serving.engine.containment import each, sound, tried
from outrider_serving.engine.records import RowRecord, StepOutput, StepRecord
from outrider_serving.engine.schedule.scheduler import Plan, Scheduler, Work
from outrider_serving.engine.speculation import Asking, Speculation
from outrider_serving.engine.target.batch import Piece, pack, slots_of
from outrider_serving.engine.target.runner import Pass, Runner, joined
from outrider_serving.engine.telling import deltas_of
from outrider_serving.engine.types import Delta, EngineError
from outrider_serving.proposers.base import Advanced, Preempted
from outrider_serving.sampling.grammar import GrammarError
from outrider_serving.sampling.law import NoTokenLeftError
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.sampling.verification import VerifyRow, verify
from outrider_serving.settings import PodSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Clock:
    """Adds up the seconds of the parts of a step."""

    started: float = field(default_factory=time.monotonic)
    last: float = 0.0

    def lap(self) -> float:
        """Seconds since the last lap."""
        now = time.monotonic()
        last, self.last = self.last or self.started, now
        return now - last


class Stepper:
    """Runs steps over the scheduler's requests. Belongs to the thread of the step loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculation: Speculation,
        runner: Runner,
        device: torch.device,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the parts; `clock` is what deadlines are measured by."""
        self._scheduler = scheduler
        self._speculation = speculation
        self._runner = runner
        self._device = device
        self._clock = clock
        self._page_size = scheduler.pool.page_size
        self._failures_recorded = 0  # of proposers, those between steps too

    def step(self, settings: PodSettings, active: Mapping[str, Active]) -> StepOutput:
        """One step of every running request.

        Args:
            settings: those in force during the step.
            active: every request in the engine, by id.

        Raises:
            torch.AcceleratorError: the device is broken, and with it every request.
        """
        clock, seconds = _Clock(), self._speculation.seconds
        plan = self._plan(settings, active)
        for sequence in plan.began:
            active[sequence.request.id].begin()
        turns = [_turn(active[work.sequence.request.id], work) for work in plan.work]
        waiting = self._scheduler.waiting
        self._propose(turns, settings)
        rest = clock.lap()
        ran = self._run(turns)
        target = clock.lap()
        if ran is not None:
            self._verify(turns, ran)
        verification = clock.lap()
        deltas = self._commit(turns, ran)
        proposal = self._speculation.seconds - seconds  # within what is planned, proposed and committed
        failures = self._speculation.failures
        record = StepRecord(
            arm=settings.in_force,
            generation=settings.generation,
            started=clock.started,
            rows=tuple(map(_record, turns)),
            waiting=waiting,
            proposal_seconds=proposal,
            target_seconds=target,
            verification_seconds=verification,
            rest_seconds=rest + clock.lap() - proposal,
            proposer_failures=failures - self._failures_recorded,
            preemptions=len(plan.preempted),
        )
        self._measure(turns, record, settings)
        cancelled = tuple(sequence.request.id for sequence, error in plan.ended if error is None)
        failed = _failures(plan, turns)
        if not turns:
            return StepOutput(None, tuple(deltas), failed, cancelled)
        self._failures_recorded = failures
        return StepOutput(record, tuple(deltas), failed, cancelled)

    def prepare(self, settings: PodSettings, active: Mapping[str, Active]) -> None:
        """Load and close proposers as the settings want it; every step begins so. See `step`."""
        every = (one.sequence for one in active.values())
        self._speculation.prepare(settings, self._scheduler.sequences, every)

    def _measure(self, turns: Sequence[Turn], record: StepRecord, settings: PodSettings) -> None:
        """Tell the rule for depth of a step, unless texts were read or something failed in it."""
        if turns and all(turn.verifies and turn.tokens == 1 and turn.error is None for turn in turns):
            outcomes = [
                self._speculation.outcome(turn.sequence, turn.proposal, len(turn.kept), settings.proposer)
                for turn in turns
                if len(turn.proposal)
            ]
            tokens = sum(turn.tokens + len(turn.proposal) for turn in turns)
            self._speculation.took(tokens, record.busy_seconds, outcomes)

    def _plan(self, settings: PodSettings, active: Mapping[str, Active]) -> Plan:
        """Who takes part, and with how much; proposers are told who begins, waits again or is gone."""
        self.prepare(settings, active)
        arm = settings.proposer
        self._speculation.choose_depths(self._scheduler.sequences, arm)
        plan = self._scheduler.plan(
            self._clock(),
            lambda sequence: self._speculation.nodes_wanted(sequence, arm),
            lambda sequence: self._speculation.required_marks(sequence, arm),
        )
        self._speculation.forget(sequence.request.id for sequence, _ in plan.ended)
        self._speculation.observe([Preempted(sequence.request.id) for sequence in plan.preempted])
        self._speculation.began(plan.began)
        return plan

    def _propose(self, turns: Sequence[Turn], settings: PodSettings) -> None:
        """Proposals for the requests that verify and have room for them."""
        asking = [
            Asking(t.sequence, t.nodes, t.active.law, t.active.law.noise, t.active.proposing)
            for t in turns
            if t.verifies and t.nodes
        ]
        proposals = self._speculation.propose(asking, settings.proposer)
        for turn in turns:
            if (proposal := proposals.get(turn.sequence.request.id)) is not None:
                turn.proposal = proposal

    def _run(self, turns: Sequence[Turn]) -> Pass | None:
        """One target pass over all pending and proposed tokens; None where there is nothing to run.

        Where it fails, each request is run alone, so that what is wrong with one fails no other.
        """
        if not turns:
            return None
        ran = tried((), lambda: self._pass(turns))
        return self._run_alone(turns) if ran is None else ran

    def _pass(self, turns: Sequence[Turn]) -> Pass:
        pieces = [Piece(t.pending, t.proposal, t.context, t.sequence.pages, t.asks_logits) for t in turns]
        batch = pack(pieces, self._page_size, self._runner.batches_on)
        for turn, segment in zip(turns, batch.segments, strict=True):
            turn.first, turn.root = segment.first, segment.logits + turn.asks_logits - 1
        return self._runner.run(batch, sorted(self._speculation.hidden_layers))

    def _run_alone(self, turns: Sequence[Turn]) -> Pass | None:
        passes: list[Pass] = []
        tokens = rows = 0
        for turn in turns:
            turn.proposal = Proposal()  # which may be what there was no memory for
            alone = tried([turn], partial(self._alone, turn))
            if alone is not None:
                turn.first, turn.root = turn.first + tokens, turn.root + rows
                tokens += turn.tokens
                rows += len(alone.logits)
                passes.append(alone)
        return tried(turns, lambda: joined(passes)) if passes else None

    def _alone(self, turn: Turn) -> Pass:
        return self._pass([turn]).copy()  # the next one's pass may overwrite it

    def _verify(self, turns: Sequence[Turn], ran: Pass) -> None:
        """Which proposed tokens are kept, and the target's own token."""
        verifying = [turn for turn in sound(turns) if turn.verifies]
        rows = [
            VerifyRow(
                law=turn.active.law,
                proposal=turn.proposal,
                root=turn.root,
                noise=turn.active.law.noise,
                randomness=turn.active.verifying,
            )
            for turn in verifying
        ]
        for turn, verdict in zip(verifying, verify(rows, ran.logits), strict=True):
            if isinstance(verdict, Exception):
                logger.error("request %s failed", turn.sequence.request.id, exc_info=verdict)
                turn.error = verdict
            else:
                turn.verdict = verdict

    def _commit(self, turns: Sequence[Turn], ran: Pass | None) -> list[Delta]:
        """Add tokens to texts, keep their keys and values, tell the proposers, free what has ended."""
        for turn in turns:
            if turn.verdict is not None:
                tried([turn], turn.commit)  # a grammar may not be able to follow
        for turn in sound(turns):
            turn.sequence.computed = turn.context + turn.tokens + len(turn.kept)
        deltas: list[Delta] = []
        if ran is not None:
            self._gather([turn for turn in sound(turns) if turn.moves()])
            self._speculation.observe(each(sound(turns), lambda turn: self._advanced(turn, ran)))
            deltas = self._deltas(sound(turns), ran)
        for turn in sound(turns):
            self._scheduler.settle(turn.sequence, self._speculation.page_marks(turn.sequence.request.id))
        ended = [turn for turn in turns if turn.ended]
        for turn in ended:
            self._scheduler.finish(turn.sequence, failed=turn.error is not None)
        self._speculation.forget(turn.sequence.request.id for turn in ended)
        return deltas

    def _gather(self, turns: Sequence[Turn]) -> None:
        """Move the keys and values of accepted nodes to where the text has them: nothing, for chains.

        Where it fails none is tried again, as some may have been moved.
        """
        if turns:
            tried(turns, lambda: self._move(turns))

    def _move(self, turns: Sequence[Turn]) -> None:
        sources: list[int] = []
        targets: list[int] = []
        for turn in turns:
            moves = turn.moves()
            slots = slots_of(turn.sequence.pages, self._page_size, 0, max(move[0] for move in moves) + 1)
            sources.extend(int(slots[source]) for source, _ in moves)
            targets.extend(int(slots[target]) for _, target in moves)
        self._runner.move(
            torch.tensor(sources, device=self._device), torch.tensor(targets, device=self._device)
        )

    @staticmethod
    def _deltas(turns: Sequence[Turn], ran: Pass) -> list[Delta]:
        """What is told; where there is no memory for all logprobs at once, of one request after the other."""
        deltas = tried((), lambda: deltas_of(turns, ran))
        if deltas is None:
            deltas = [delta for found in each(turns, lambda turn: deltas_of([turn], ran)) for delta in found]
        return deltas

    def _advanced(self, turn: Turn, ran: Pass) -> Advanced:
        rows = turn.rows()
        return Advanced(
            request_id=turn.sequence.request.id,
            start=turn.context,
            ran=tuple(turn.ran()),
            hidden={layer: states[rows] for layer, states in ran.hidden.items()},
            pages=tuple(turn.sequence.pages),
            committed=turn.committed,
        )


def _turn(active: Active, work: Work) -> Turn:
    """A request's turn, as planned."""
    sequence = active.sequence
    found, active.found = active.found, 0
    return Turn(
        active=active,
        context=sequence.computed,
        tokens=work.tokens,
        verifies=work.verifies,
        nodes=work.nodes,
        asks_logits=work.tokens if sequence.scores_prompt else int(work.verifies),
        found=found,
    )


def _record(turn: Turn) -> RowRecord:
    return RowRecord(
        request_id=turn.sequence.request.id,
        labels=turn.sequence.request.labels,
        tokens=turn.tokens + len(turn.proposal),
        context=turn.context,
        proposed=len(turn.proposal),
        depth=turn.proposal.depth,
        accepted=len(turn.kept),
        committed=len(turn.committed),
        reused=turn.found,
        finished=turn.ended,
        failed=turn.error is not None,
    )


def _failures(plan: Plan, turns: Sequence[Turn]) -> tuple[tuple[str, EngineError], ...]:
    """Requests that ended with an error: their deadline, or what failed them in the step."""
    expired = [(sequence.request.id, error) for sequence, error in plan.ended if error is not None]
    failed = [(turn.sequence.request.id, _told(turn.error)) for turn in turns if turn.error is not None]
    return (*expired, *failed)


def _told(error: Exception) -> EngineError:
    """What is told of what failed a request: how a step works is for the log only."""
    match error:
        case NoTokenLeftError():
            return EngineError(str(error))
        case GrammarError():
            return EngineError(f"the grammar cannot be followed any further: {error}")
        case _:
            return EngineError(f"the engine failed: {type(error).__name__}")
