"""One step: plan, propose, launch the pass; then, when its results are there, verify and commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from outrider_serving.engine.active import Active, Turn
from outrider_serving.engine.containment import each, sound, tried
from outrider_serving.engine.passes import Passes
from outrider_serving.engine.records import RowRecord, StepOutput, StepRecord
from outrider_serving.engine.schedule.scheduler import Plan, Scheduler, Work
from outrider_serving.engine.speculation import Asking, Speculation
from outrider_serving.engine.target.batch import slots_of
from outrider_serving.engine.target.runner import Pass, Runner
from outrider_serving.engine.telling import deltas_of
from outrider_serving.engine.types import Delta, EngineError
from outrider_serving.proposers.base import Advanced, Preempted
from outrider_serving.sampling.grammar import GrammarError
from outrider_serving.sampling.law import NoTokenLeftError
from outrider_serving.sampling.transfer import sent
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


@dataclass(frozen=True, slots=True)
class Step:
    """A step whose pass is launched. To its end it is under the settings that it began with.

    Attributes:
        settings: those in force when it began.
        plan: who takes part.
        turns: those of the plan's work.
        launched: the pass; None where there is none, or it could not be launched.
        waiting: requests that were not running when it was planned.
        clock: has taken the time up to the launch.
        planning: seconds that planning and proposing took.
        proposers: seconds that proposers had taken before it, as `Speculation.seconds` counts them.
    """

    settings: PodSettings
    plan: Plan
    turns: tuple[Turn, ...]
    launched: Pass | None
    waiting: int
    clock: _Clock
    planning: float
    proposers: float


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
        self._passes = Passes(runner, scheduler.pool.page_size)
        self._device = device
        self._clock = clock
        self._page_size = scheduler.pool.page_size
        self._failures_recorded = 0  # of proposers, those between steps too

    def begin(self, settings: PodSettings, active: Mapping[str, Active]) -> Step:
        """Begin a step of every running request, up to the launch of its pass.

        Until `end`, requests may be submitted and cancelled, which the next step is the first to look at.

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
        turns = tuple(_turn(active[work.sequence.request.id], work) for work in plan.work)
        waiting = self._scheduler.waiting
        self._propose(turns, settings)
        planning = clock.lap()
        launched = self._passes.launch(turns, self._speculation.hidden_layers)
        return Step(settings, plan, turns, launched, waiting, clock, planning, seconds)

    def end(self, step: Step) -> StepOutput:
        """What a step did: looks ahead while its pass is under way, waits for it, verifies and commits.

        Raises:
            torch.AcceleratorError: the device is broken, and with it every request.
        """
        settings, plan, turns, clock = step.settings, step.plan, step.turns, step.clock
        self._scheduler.prepare()
        ran = self._passes.wait(turns, step.launched, self._speculation.hidden_layers)
        target = clock.lap()
        if ran is not None:
            self._verify(turns, ran)
        verification = clock.lap()
        deltas = self._commit(turns, ran)
        proposal = self._speculation.seconds - step.proposers  # in what is planned, proposed, committed
        failures = self._speculation.failures
        record = StepRecord(
            arm=settings.in_force,
            generation=settings.generation,
            started=clock.started,
            rows=tuple(map(_record, turns)),
            waiting=step.waiting,
            proposal_seconds=proposal,
            target_seconds=target,
            verification_seconds=verification,
            rest_seconds=step.planning + clock.lap() - proposal,
            proposer_failures=failures - self._failures_recorded,
            preemptions=len(plan.preempted),
        )
        if turns and ran is step.launched:  # else it failed, and some of it was done again
            self._measure(turns, record, settings)
        cancelled = tuple(sequence.request.id for sequence, error in plan.ended if error is None)
        failed = _failures(plan, turns)
        if not turns:
            return StepOutput(None, tuple(deltas), failed, cancelled)
        self._failures_recorded = failures
        return StepOutput(record, tuple(deltas), failed, cancelled)

    def prepare(self, settings: PodSettings, active: Mapping[str, Active]) -> None:
        """Load and close proposers as the settings want it; every step begins so. See `begin`."""
        every = (one.sequence for one in active.values())
        self._speculation.prepare(settings, self._scheduler.sequences, every)

    def _measure(self, turns: Sequence[Turn], record: StepRecord, settings: PodSettings) -> None:
        """Tell the rule for depth of a step; of its time where no text was read, and nothing failed."""
        outcomes = [
            self._speculation.outcome(turn.sequence, turn.proposal, len(turn.kept), settings.proposer)
            for turn in sound(turns)
            if turn.verifies
        ]
        self._speculation.observe_outcomes(filter(None, outcomes))
        if all(turn.verifies and turn.tokens == 1 and turn.error is None for turn in turns):
            self._speculation.time(record.tokens, record.busy_seconds)

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
        self._speculation.observe(lambda: [Preempted(sequence.request.id) for sequence in plan.preempted])
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
                expected=turn.active.expected,
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
            self._speculation.observe(lambda: each(sound(turns), lambda turn: self._advanced(turn, ran)))
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
        self._runner.move(*sent([np.array(sources), np.array(targets)], self._device))

    @staticmethod
    def _deltas(turns: Sequence[Turn], ran: Pass) -> list[Delta]:
        """What is told; where there is no memory for all logprobs at once, of one request after the other."""
        deltas = tried((), lambda: deltas_of(turns, ran))
        if deltas is None:
            deltas = [delta for found in each(turns, lambda turn: deltas_of([turn], ran)) for delta in found]
        return deltas

    def _advanced(self, turn: Turn, ran: Pass) -> Advanced:
        hidden: dict[int, Tensor] = {}
        if ran.hidden:
            (rows,) = sent([np.array(turn.rows())], self._device)
            hidden = {layer: states[rows] for layer, states in ran.hidden.items()}
        return Advanced(
            request_id=turn.sequence.request.id,
            start=turn.context,
            ran=tuple(turn.ran()),
            hidden=hidden,
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
        source=turn.proposal.source,
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
