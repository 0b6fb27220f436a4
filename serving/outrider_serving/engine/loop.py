"""The step loop's one step: schedule, propose, run, verify, commit."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_serving.engine.records import RowRecord, StepRecord
from outrider_serving.engine.runner import ModelRunner
from outrider_serving.engine.scheduler import Scheduler, Work
from outrider_serving.engine.speculation import Speculation
from outrider_serving.engine.types import EngineError
from outrider_serving.proposers.base import Observed
from outrider_serving.sampling.verification import Verdict, verify
from outrider_serving.settings import PodSettings

logger = logging.getLogger(__name__)


@dataclass(slots=True)
class _Row:
    """One request on its way through a step; each part of the step sets the next field."""

    work: Work
    context: int
    proposal: tuple[int, ...] = ()
    logits: Tensor | None = None
    verdict: Verdict | None = None
    committed: int = 0
    error: Exception | None = None

    @property
    def ended(self) -> bool:
        """The request has failed or is complete."""
        return self.error is not None or self.work.sequence.finish_reason is not None

    def record(self) -> RowRecord:
        """What is reported of the row."""
        return RowRecord(
            request_id=self.work.sequence.request.id,
            labels=self.work.sequence.request.labels,
            tokens=self.work.tokens + len(self.proposal),
            context=self.context,
            proposed=len(self.proposal),
            accepted=min(self.verdict.accepted, self.committed) if self.verdict else 0,
            committed=self.committed,
            finished=self.ended,
            failed=self.error is not None,
        )


class _Clock:
    """Adds up the seconds of the parts of a step."""

    def __init__(self) -> None:
        self.started = self._last = time.monotonic()

    def lap(self) -> float:
        """Seconds since the last lap."""
        last, self._last = self._last, time.monotonic()
        return self._last - last


class Stepper:
    """Runs steps over the scheduler's requests. Belongs to the thread of the step loop."""

    def __init__(
        self,
        scheduler: Scheduler,
        speculation: Speculation,
        runner: ModelRunner,
        eos_token_ids: frozenset[int],
    ) -> None:
        """Take the parts; see `step`."""
        self._scheduler = scheduler
        self._speculation = speculation
        self._runner = runner
        self._eos_token_ids = eos_token_ids

    def step(self, settings: PodSettings) -> StepRecord:
        """One step of every running request; chunks and errors go to the sinks.

        Args:
            settings: those in force during the step.

        Raises:
            torch.AcceleratorError: the device is broken, and with it every request.
        """
        clock, failures = _Clock(), self._speculation.failures
        rows = self._schedule()
        rest = clock.lap()
        self._propose(rows, settings)
        proposal = clock.lap()
        self._each(rows, self._run)
        target = clock.lap()
        self._each(rows, self._verify)
        verification = clock.lap()
        records = self._commit(rows)
        return StepRecord(
            arm=settings.in_force,
            generation=settings.generation,
            started=clock.started,
            rows=records,
            waiting=self._scheduler.waiting,
            proposal_seconds=proposal,
            target_seconds=target,
            verification_seconds=verification,
            rest_seconds=rest + clock.lap(),
            proposer_failures=self._speculation.failures - failures,
        )

    def _schedule(self) -> list[_Row]:
        """Drop cancelled requests, admit waiting ones, and plan the step."""
        self._speculation.forget(self._scheduler.take_cancelled())
        admitted = self._scheduler.admit()
        self._speculation.observe([Observed(s.request.id, tuple(s.tokens)) for s in admitted])
        return [_Row(work, work.sequence.kv.length) for work in self._scheduler.schedule()]

    def _propose(self, rows: list[_Row], settings: PodSettings) -> None:
        """Proposals for the rows that verify, from the proposer in force or the request's own."""
        verifying = [row.work.sequence for row in rows if row.work.verifies]
        proposals = self._speculation.propose(verifying, settings.proposer, self._scheduler.sequences)
        for row in rows:
            if row.work.verifies:
                row.proposal = proposals.get(row.work.sequence.request.id, ())

    def _run(self, row: _Row) -> None:
        """The target pass over pending and proposed tokens, with logits where something is verified."""
        sequence = row.work.sequence
        pending = sequence.tokens[row.context : row.context + row.work.tokens]
        row.logits = self._runner.run([*pending, *row.proposal], sequence.kv, keep=len(row.proposal) + 1)

    def _verify(self, row: _Row) -> None:
        """Which proposed tokens are kept, and the target's own token."""
        if row.work.verifies:
            assert row.logits is not None
            sequence = row.work.sequence
            row.verdict = verify(
                row.logits,
                row.proposal,
                sequence.request.params,
                position=sequence.usage.completion_tokens,
                randomness=sequence.randomness,
            )

    def _commit(self, rows: list[_Row]) -> tuple[RowRecord, ...]:
        """Add tokens to texts, hand out chunks and errors, tell the proposers, take out what has ended."""
        self._each(rows, self._commit_row)
        for row in rows:
            if row.error is not None:
                row.work.sequence.sink.fail(EngineError(f"the engine failed: {type(row.error).__name__}"))
        ended = [row.work.sequence for row in rows if row.ended]
        self._speculation.observe(
            [
                Observed(row.work.sequence.request.id, tuple(row.work.sequence.tokens[-row.committed :]))
                for row in rows
                if row.committed and not row.ended
            ]
        )
        self._scheduler.remove(ended)
        self._speculation.forget(ended)
        return tuple(row.record() for row in rows)

    def _commit_row(self, row: _Row) -> None:
        """Keep the keys and values of what was kept, and emit the chunk."""
        sequence = row.work.sequence
        if row.verdict is None:
            sequence.kv.length += row.work.tokens
            return
        accepted = row.verdict.accepted
        sequence.kv.length += row.work.tokens + accepted
        chunk = sequence.commit(
            row.verdict.tokens,
            proposed=len(row.proposal),
            accepted=accepted,
            eos_token_ids=self._eos_token_ids,
        )
        row.committed = len(chunk.token_ids)
        sequence.sink.put(chunk)

    @staticmethod
    def _each(rows: list[_Row], do: Callable[[_Row], None]) -> None:
        """Do one part of the step for every row; an exception fails that row alone, a broken device all."""
        for row in rows:
            if row.error is not None:
                continue
            try:
                do(row)
            except torch.AcceleratorError:
                raise
            except Exception as error:
                logger.exception("request %s failed", row.work.sequence.request.id)
                row.error = error
