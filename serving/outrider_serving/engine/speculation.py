"""The proposers that are loaded, and what keeps their failures away from requests."""

from __future__ import annotations

import logging
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


@dataclass(slots=True)
class _Loaded:
    settings: dict[str, Any]
    proposer: Proposer | None


class Speculation:
    """Keeps proposers loaded and told, asks them, and goes on without one that raises.

    A proposer is loaded when it is first needed and stays loaded, so that it knows every running request's
    text when it is needed again. One that raises on an event is loaded anew at its next use. Belongs to the
    thread of the step loop.

    Attributes:
        failures: exceptions raised by proposers so far.
    """

    def __init__(self, build: Build = build_proposer) -> None:
        """Take what makes a proposer from its settings."""
        self.failures = 0
        self._build = build
        self._loaded: dict[Method, _Loaded] = {}

    def propose(
        self, sequences: Iterable[Sequence], arm: ProposerSettings, running: Iterable[Sequence]
    ) -> dict[str, tuple[int, ...]]:
        """Proposals for the sequences that verify in this step.

        Args:
            sequences: those sequences.
            arm: the settings in force; a request's own override of method or depth goes before them.
            running: all sequences whose text has been observed, to tell a proposer that is loaded only now.

        Returns:
            Proposed tokens by request id, within the request's limits; absent where there is no proposal.
        """
        queries: dict[Method, list[Query]] = {}
        for sequence in sequences:
            method = sequence.request.speculation.method or arm.method
            depth = _max_depth(sequence, arm)
            if depth >= arm.min_depth:
                queries.setdefault(method, []).append(Query(sequence.request.id, arm.min_depth, depth))
        proposals: dict[str, tuple[int, ...]] = {}
        for method, batch in queries.items():
            proposals |= self._ask(method, batch, arm, running)
        return proposals

    def observe(self, events: list[Observed]) -> None:
        """Tell every loaded proposer about new text."""
        self._tell(lambda proposer: proposer.observe(events))

    def forget(self, sequences: Iterable[Sequence]) -> None:
        """Tell every loaded proposer that requests have ended."""
        for sequence in sequences:
            self._tell(lambda proposer, ended=sequence.request.id: proposer.forget(ended))  # type: ignore[misc]

    def _ask(
        self, method: Method, batch: list[Query], arm: ProposerSettings, running: Iterable[Sequence]
    ) -> dict[str, tuple[int, ...]]:
        settings = arm if arm.method is method else ProposerSettings(method=method)
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
        """The proposer for these settings, loaded if it is not."""
        loaded = self._loaded.get(settings.method)
        wanted = settings.model_dump(exclude={"min_depth", "max_depth"})
        if loaded is None or loaded.settings != wanted:
            loaded = _Loaded(wanted, self._build(settings))
            if loaded.proposer is not None:
                loaded.proposer.observe([Observed(s.request.id, tuple(s.tokens)) for s in running])
            self._loaded[settings.method] = loaded
        return loaded.proposer

    def _tell(self, call: Callable[[Proposer], None]) -> None:
        for method, loaded in list(self._loaded.items()):
            if loaded.proposer is None:
                continue
            try:
                call(loaded.proposer)
            except Exception:
                self._failed(method, "taking note of text")
                del self._loaded[method]

    def _failed(self, method: Method, doing: str) -> None:
        """Count the exception being handled; log the 1st, 2nd, 4th, 8th ... one."""
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            logger.exception(
                "proposer %s raised in %s (failure %d); steps go on without it", method, doing, self.failures
            )


def _max_depth(sequence: Sequence, arm: ProposerSettings) -> int:
    """The deepest proposal that can be of use: the target adds one token after it."""
    override = sequence.request.speculation.max_depth
    limits = [arm.max_depth, sequence.remaining - 1]
    return min(limits if override is None else [*limits, override])
