"""The proposers that are loaded, and what keeps their failures away from requests."""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

from outrider_serving.engine.sequence import Sequence
from outrider_serving.proposers.base import Observed, Proposer, Query
from outrider_serving.proposers.registry import build_proposer
from outrider_serving.settings import Method
from outrider_serving.settings import Proposer as ProposerSettings

logger = logging.getLogger(__name__)

Build = Callable[[ProposerSettings], Proposer | None]


_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 64.0
"""Seconds from a load that failed to the next try; each further failure doubles them."""


@dataclass(slots=True)
class _Loaded:
    """What became of the newest load of a method.

    Attributes:
        settings: those it was loaded for.
        proposer: None where the method has none, or the load failed.
        pause: seconds to wait after the failure; 0 where there was none.
        retry_at: when to load anew, by the clock.
    """

    settings: dict[str, Any]
    proposer: Proposer | None
    pause: float = 0.0
    retry_at: float = math.inf


class Speculation:
    """Keeps proposers loaded and told, asks them, and goes on without one that raises.

    A proposer is loaded when it is first needed and stays loaded, so that it knows every running request's
    text when it is needed again. One that cannot be loaded, or that raises on an event, is loaded anew at its
    first use after a pause; other settings are tried at once. Belongs to the thread of the step loop.

    Attributes:
        failures: exceptions raised by proposers so far.
    """

    def __init__(self, build: Build = build_proposer, clock: Callable[[], float] = time.monotonic) -> None:
        """Take what makes a proposer from its settings, and the clock of the pauses, in seconds."""
        self.failures = 0
        self._build = build
        self._clock = clock
        self._loaded: dict[Method, _Loaded] = {}

    def propose(
        self, sequences: Iterable[Sequence], arm: ProposerSettings, running: Iterable[Sequence]
    ) -> dict[str, tuple[int, ...]]:
        """Proposals for the sequences that verify in this step.

        Args:
            sequences: those sequences.
            arm: the settings in force; a request's own override of method or depth goes before them. Where it
                asks for less depth than the arm's least, its depth is the least as well.
            running: all sequences whose text has been observed, to tell a proposer that is loaded only now.

        Returns:
            Proposed tokens by request id, within the request's limits; absent where there is no proposal.
        """
        queries: dict[Method, list[Query]] = {}
        for sequence in sequences:
            method = sequence.request.speculation.method or arm.method
            shortest, longest = _depths(sequence, arm)
            if longest >= shortest:
                queries.setdefault(method, []).append(Query(sequence.request.id, shortest, longest))
        proposals: dict[str, tuple[int, ...]] = {}
        for method, batch in queries.items():
            proposals |= self._ask(method, batch, arm, running)
        return proposals

    def observe(self, events: list[Observed]) -> None:
        """Tell every loaded proposer about new text."""
        self._tell(lambda proposer: proposer.observe(events))

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Tell every loaded proposer that requests have ended."""
        ended = [sequence.request.id for sequence in sequences]

        def forget_all(proposer: Proposer) -> None:
            for request_id in ended:
                proposer.forget(request_id)

        self._tell(forget_all)

    def _ask(
        self, method: Method, batch: list[Query], arm: ProposerSettings, running: Iterable[Sequence]
    ) -> dict[str, tuple[int, ...]]:
        settings = arm.model_copy(update={"method": method})
        try:
            proposer = self._ensure(settings, running)
            if proposer is None:
                return {}
            proposals = zip(batch, proposer.propose(batch), strict=True)
            kept = ((query, proposal.tokens[: query.max_depth]) for query, proposal in proposals)
            return {query.request_id: tokens for query, tokens in kept if len(tokens) >= query.min_depth}
        except Exception:
            self._failed(method, "a step")
            return {}

    def _ensure(self, settings: ProposerSettings, running: Iterable[Sequence]) -> Proposer | None:
        """The proposer for these settings, loaded if it is not; None during a pause after a failure."""
        wanted = settings.model_dump(exclude={"min_depth", "max_depth"})
        last = self._loaded.get(settings.method)
        if last is None or last.settings != wanted:
            last = _Loaded(wanted, None, retry_at=-math.inf)
        if self._clock() >= last.retry_at:
            try:
                last = _Loaded(wanted, self._load(settings, running))
            except Exception:
                last = self._paused(last)
                raise
            finally:
                self._loaded[settings.method] = last
        return last.proposer

    def _load(self, settings: ProposerSettings, running: Iterable[Sequence]) -> Proposer | None:
        proposer = self._build(settings)
        if proposer is not None:
            proposer.observe([Observed(s.request.id, tuple(s.tokens)) for s in running])
        return proposer

    def _paused(self, failed: _Loaded) -> _Loaded:
        """Nothing loaded until a pause is over: the first one, or twice the last."""
        pause = min(2 * failed.pause, _LONGEST_PAUSE) or _FIRST_PAUSE
        return _Loaded(failed.settings, None, pause, self._clock() + pause)

    def _tell(self, call: Callable[[Proposer], None]) -> None:
        for method, loaded in list(self._loaded.items()):
            if loaded.proposer is None:
                continue
            try:
                call(loaded.proposer)
            except Exception:
                self._failed(method, "taking note of text")
                self._loaded[method] = self._paused(loaded)

    def _failed(self, method: Method, doing: str) -> None:
        """Count the exception being handled; log the 1st, 2nd, 4th, 8th ... one."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.exception(
                "proposer %s raised in %s (failure %d); steps go on without it", method, doing, self.failures
            )


def _depths(sequence: Sequence, arm: ProposerSettings) -> tuple[int, int]:
    """The shortest proposal worth verifying, and the longest of use: the target adds one token after it."""
    override = sequence.request.speculation.max_depth
    longest = arm.max_depth if override is None else min(arm.max_depth, override)
    return min(arm.min_depth, longest), min(longest, sequence.remaining - 1)
