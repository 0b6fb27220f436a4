"""The proposers that are loaded, and what keeps their failures away from requests."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial

from outrider_serving import depth
from outrider_serving.depth import DepthRule, Kind, Outcome
from outrider_serving.engine.residence import Build, Grant, Residence
from outrider_serving.engine.schedule.sequence import Sequence as Running
from outrider_serving.engine.target.memory import ProposerMemoryError
from outrider_serving.engine.types import Request
from outrider_serving.proposers.base import Advanced, Event, Preempted, Row
from outrider_serving.sampling.fault import proposal_fault
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.reading import together
from outrider_serving.settings import Method, PodSettings
from outrider_serving.settings import Proposer as ProposerSettings

logger = logging.getLogger(__name__)

_NOTHING = 1, 0
"""The shortest and the longest proposal of a request that is not to propose."""


@dataclass(frozen=True, slots=True)
class Asking:
    """A request that may get a proposal in this step. Set by the step loop.

    Attributes:
        sequence: the request; all its pending tokens are run in this step.
        nodes: for how many proposed tokens there is room.
        law, noise, randomness: see `proposers.base.Row`.
    """

    sequence: Running
    nodes: int
    law: TokenLaw
    noise: NoiseKey | None
    randomness: Randomness


class Speculation:
    """Keeps the arms' proposers loaded and told, asks the one in force, and goes on without one that raises.

    The proposer of every arm is loaded as soon as the settings name it, so that it knows every running
    request's text when it comes into force; one that a request asks for by itself is loaded then. When the
    settings change, a proposer that neither an arm nor a request wants is closed. Belongs to the
    thread of the steps.

    Attributes:
        failures: exceptions raised by proposers so far, and proposals that are not trees of known tokens.
        seconds: spent in proposers so far, whatever they did.
    """

    def __init__(
        self,
        grant: Grant,
        *,
        vocab_size: int,
        build: Build,
        depths: DepthRule,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Start without any proposer.

        Args:
            grant: gives proposers their memory and surroundings.
            vocab_size: proposed tokens are below it.
            build: makes a proposer from its settings; None from the method that proposes nothing.
            depths: how deep to propose, within what settings and requests allow.
            clock: of the pauses after failures, in seconds.
        """
        self.failures = 0
        self.seconds = 0.0
        self._grant = grant
        self._vocab_size = vocab_size
        self._build = build
        self._clock = clock
        self._depths = depths
        self._spans: dict[str, tuple[int, int]] = {}
        self._asked: set[str] = set()
        self._settings: PodSettings | None = None
        self._residences: dict[str, Residence] = {}

    @property
    def hidden_layers(self) -> frozenset[int]:
        """The hidden states of the target that loaded proposers want."""
        return frozenset(layer for r in self._loaded() for layer in r.needs.hidden_layers)

    @property
    def trouble(self) -> str | None:
        """Why a proposer is not loaded, by name; None where all are."""
        return next((r.trouble for r in self._residences.values() if r.trouble), None)

    def due_in(self, settings: PodSettings) -> float | None:
        """Seconds until `prepare` may have something to do; None where it has nothing more to do."""
        if settings is not self._settings:
            return 0.0
        waits = (residence.due_in for residence in self._residences.values())
        return min((wait for wait in waits if wait is not None), default=None)

    def expect(self, request: Request, settings: PodSettings) -> None:
        """A request has arrived, which may ask for a proposer of its own: it is loaded with the next step."""
        self._residence(settings.proposer, request.speculation.method or settings.proposer.method)

    def prepare(self, settings: PodSettings, running: Sequence[Running], every: Iterable[Running]) -> None:
        """Load and close proposers as the settings want it, between two steps.

        Args:
            settings: those in force.
            running: the requests that have begun: a proposer that is new is told of them.
            every: these and those that wait: what they ask for is kept.
        """
        if settings is not self._settings:
            self._settings = settings
            wanted = {_name(arm.proposer, arm.proposer.method) for arm in settings.arms.values()}
            wanted |= {self._residence_of(sequence, settings.proposer).name for sequence in every}
            for name in self._residences.keys() - wanted:
                self._close(self._residences.pop(name))
            for arm in settings.arms.values():
                self._residence(arm.proposer, arm.proposer.method)
        for residence in list(self._residences.values()):
            self._guarded(residence, "loading", partial(residence.advance, running))

    def choose_depths(self, running: Sequence[Running], arm: ProposerSettings) -> None:
        """Decide how deep the requests that have begun may propose in the coming step."""
        self._spans.clear()
        if self._depths.rests:
            self._spans.update((sequence.request.id, _NOTHING) for sequence in running)
        else:
            self._choose(running, arm)

    def _choose(self, sequences: Sequence[Running], arm: ProposerSettings, beginning: bool = False) -> None:
        """Decide for some requests, beside those that were decided for."""
        rows = []
        for sequence in sequences:
            request_id, residence = sequence.request.id, self._residence_of(sequence, arm)
            shortest, longest = _allowed(sequence, arm)
            self._spans[request_id] = shortest, 0
            silent = residence.proposer is None or residence.sits_out(request_id)
            if longest >= shortest and not silent:
                rows.append(depth.Row(request_id, _kind(residence, sequence), longest, shortest))
        for request_id, chosen in self._depths.choose(rows, len(self._spans), beginning).items():
            self._spans[request_id] = self._spans[request_id][0], chosen

    def observe_outcomes(self, outcomes: Iterable[Outcome]) -> None:
        """Let the next decisions on depth know what became of proposals; see `DepthRule.observe`."""
        self._depths.observe(outcomes)

    def time(self, tokens: int, seconds: float) -> None:
        """And how long the step took; see `DepthRule.time`."""
        self._depths.time(tokens, seconds)

    def outcome(
        self, sequence: Running, proposal: Proposal, accepted: int, arm: ProposerSettings
    ) -> Outcome | None:
        """What became of a request that was asked for a proposal in this step; None where it was not.

        Args:
            sequence: the request.
            proposal: what was verified of it.
            accepted: tokens that were kept.
            arm: the settings in force.
        """
        if sequence.request.id not in self._asked:
            return None
        kind = _kind(self._residence_of(sequence, arm), sequence)
        return Outcome(sequence.request.id, kind, proposal.depth, accepted)

    def nodes_wanted(self, sequence: Running, arm: ProposerSettings) -> int:
        """How many proposed tokens a request can use in this step, in which it may begin; 0 for none."""
        shortest, longest = self._span(sequence, arm)
        return longest * self._residence_of(sequence, arm).needs.width if longest >= shortest else 0

    def _span(self, sequence: Running, arm: ProposerSettings) -> tuple[int, int]:
        """The shortest proposal worth verifying now, and the longest; less than it where there is none."""
        if sequence.request.id not in self._spans:  # it begins with this step
            self._choose([sequence], arm, beginning=True)
        return self._spans[sequence.request.id]

    def required_marks(self, sequence: Running, arm: ProposerSettings) -> frozenset[str]:
        """What pages must hold beside the target's keys and values to be of use to a request."""
        return self._residence_of(sequence, arm).marks

    def page_marks(self, request_id: str) -> frozenset[str]:
        """Whose keys and values are in the pages of a request, beside the target's."""
        return frozenset(mark for r in self._loaded() if r.knows(request_id) for mark in r.marks)

    def propose(self, asking: Sequence[Asking], arm: ProposerSettings) -> dict[str, Proposal]:
        """Proposals by request id; absent where there is none.

        `arm` are the settings in force; a request's own override of method or depth goes before them.
        """
        rows: dict[str, list[Row]] = {}
        for one in asking:
            shortest, longest = self._span(one.sequence, arm)
            longest = min(longest, one.nodes)
            residence = self._residence_of(one.sequence, arm)
            if longest >= shortest and residence.knows(one.sequence.request.id):
                rows.setdefault(residence.name, []).append(_row(one, shortest, longest))
        self._asked = {row.request_id for batch in rows.values() for row in batch}
        proposals: dict[str, Proposal] = {}
        for name, batch in rows.items():
            residence = self._residences[name]
            self._guarded(residence, "a step", partial(self._ask, residence, batch, proposals), fatal=False)
        return proposals

    def began(self, sequences: Iterable[Running]) -> None:
        """Tell every loaded proposer of requests that begin, or go on after a preemption."""
        sequences = tuple(sequences)
        self._tell(lambda r: [r.beginning(sequence) for sequence in sequences])

    def observe(self, happened: Callable[[], Sequence[Advanced | Preempted]]) -> None:
        """Tell every loaded proposer what happened; nothing is put together where there is none."""
        if self._loaded():
            events = happened()
            self._tell(lambda _: events)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Tell every loaded proposer that requests have ended."""
        ended = tuple(request_ids)
        self._depths.forget(ended)
        for residence in self._loaded():
            self._guarded(residence, "forgetting", partial(residence.forget, ended))

    def close(self) -> None:
        """Close every proposer."""
        for residence in self._residences.values():
            self._close(residence)
        self._residences.clear()

    def _close(self, residence: Residence) -> None:
        self._guarded(residence, "closing", residence.close, fatal=False)

    def _ask(self, residence: Residence, rows: Sequence[Row], proposals: dict[str, Proposal]) -> None:
        """Add a proposer's proposals, as far as they are of use."""
        if residence.proposer is None:
            return
        wholes = residence.proposer.propose(rows)
        faults = together([proposal_fault(whole, self._vocab_size) for whole in wholes])
        for row, whole, fault in zip(rows, wholes, faults, strict=True):
            if isinstance(fault, Exception):
                raise fault
            if fault:
                raise ValueError(f"the proposal for request {row.request_id} is malformed: {fault}")
            proposal = whole.cut(row.max_depth, row.max_nodes)
            # How deep drawn tokens go may depend on the first of them, which to drop for it would bias.
            if len(proposal) and (proposal.depth >= row.min_depth or not proposal.is_chosen):
                proposals[row.request_id] = proposal

    def _tell(self, events: Callable[[Residence], Sequence[Event]]) -> None:
        for residence in self._loaded():
            self._guarded(residence, "taking note of text", partial(_observe, residence, events))

    def _loaded(self) -> list[Residence]:
        return [residence for residence in self._residences.values() if residence.proposer is not None]

    def _residence_of(self, sequence: Running, arm: ProposerSettings) -> Residence:
        return self._residence(arm, sequence.request.speculation.method or arm.method)

    def _residence(self, arm: ProposerSettings, method: Method) -> Residence:
        name = _name(arm, method)
        if name not in self._residences:
            settings = arm.model_copy(update={"method": method})
            self._residences[name] = Residence(name, settings, self._build, self._grant, self._clock)
        return self._residences[name]

    def _guarded(
        self, residence: Residence, doing: str, call: Callable[[], object], *, fatal: bool = True
    ) -> None:
        """Count an exception, log the 1st, 2nd, 4th, 8th ... one; a fatal one unloads for a while."""
        started = time.monotonic()
        try:
            call()
        except Exception as error:
            self._count(residence, doing, error)
            if fatal:
                self._unload(residence, error)
        self.seconds += time.monotonic() - started

    def _unload(self, residence: Residence, error: Exception) -> None:
        try:
            residence.fail(error)
        except Exception as second:
            self._count(residence, "closing", second)

    def _count(self, residence: Residence, doing: str, error: Exception) -> None:
        self.failures += 1
        if self.failures & (self.failures - 1) == 0:
            named = isinstance(error, ProposerMemoryError)
            logger.error(
                "proposer %s failed in %s (failure %d): %s; steps go on without it",
                residence.settings.method,
                doing,
                self.failures,
                error if named else type(error).__name__,
                exc_info=None if named else error,
            )


def _observe(residence: Residence, events: Callable[[Residence], Sequence[Event]]) -> None:
    residence.observe(events(residence))


@lru_cache(maxsize=256)
def _name(arm: ProposerSettings, method: Method) -> str:
    """Names what is loaded: all settings but those of the depth."""
    settings = arm.model_copy(update={"method": method})
    return settings.model_dump_json(exclude={"min_depth", "max_depth"})


def _allowed(sequence: Running, arm: ProposerSettings) -> tuple[int, int]:
    """The shortest proposal worth verifying, and the longest of use: the target adds one token after it.

    A request's own depth replaces the arm's, be it less or more. Where it is less than the arm's least, it
    is the least as well.
    """
    override = sequence.request.speculation.max_depth
    longest = arm.max_depth if override is None else override
    return min(arm.min_depth, longest), min(longest, sequence.remaining - 1)


def _kind(residence: Residence, sequence: Running) -> Kind:
    """Of requests that learn from each other how much is accepted: never from another tenant's history."""
    request = sequence.request
    return residence.name, request.labels.workload, request.history


def _row(one: Asking, shortest: int, longest: int) -> Row:
    sequence = one.sequence
    return Row(
        request_id=sequence.request.id,
        min_depth=shortest,
        max_depth=longest,
        max_nodes=one.nodes,
        length=len(sequence.tokens),
        ran=sequence.computed,
        pages=tuple(sequence.pages),
        law=one.law,
        noise=one.noise,
        randomness=one.randomness,
    )
