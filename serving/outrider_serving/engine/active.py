"""A request in the engine: its text and pages, its law and draws, and what is told of it in deltas."""

from __future__ import annotations

import time
from dataclasses import dataclass, field

from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.types import Delta, TokenLogprobs
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.verification import Verdict


@dataclass(slots=True)
class Active:
    """What the step loop keeps of one request.

    Attributes:
        sequence: its text and pages.
        law: from the target's logits to the law of its next token.
        verifying: what its verification draws from, and
        proposing: what its proposals are drawn from; disjoint.
        prompt_logprobs: those known so far, where they are wanted.
        reused: prompt tokens that were in pages when it first began.
        found: tokens that were in pages when it last began, until its next turn.
        told: a delta of it has gone out.
        accepted: the accepted length of its latest verification, and
        expected: the lesser of its latest two.
        purged: what it writes is not to be remembered.
    """

    sequence: Sequence
    law: TokenLaw
    verifying: Randomness
    proposing: Randomness
    prompt_logprobs: list[TokenLogprobs] = field(default_factory=list)
    reused: int | None = None
    found: int = 0
    told: bool = False
    accepted: int = 0
    expected: int = 0
    purged: bool = False

    def begin(self) -> None:
        """Its sequence has begun, perhaps anew, and its first turn may be a later step's."""
        self.found = self.sequence.reused
        if self.reused is None:
            self.reused = self.found


@dataclass(slots=True)
class Turn:
    """One request on its way through a step; each part of the step sets the next field.

    Attributes:
        active: the request.
        context: tokens that were in pages before the step.
        tokens: pending tokens that are run.
        verifies: these are all its pending tokens, so the step ends with a committed token.
        nodes: for how many proposed tokens there is room.
        asks_logits: for how many of the last pending tokens logits are wanted.
        found: tokens that were in pages when it began, in the first turn since.
        proposal: what is verified.
        first: index of the first token in the batch, and
        root: index of the row of logits after the last pending token.
        verdict: what verification decided.
        committed: tokens that joined the text.
        error: what failed the request.
    """

    active: Active
    context: int
    tokens: int
    verifies: bool
    nodes: int
    asks_logits: int
    found: int
    proposal: Proposal = field(default_factory=Proposal)
    first: int = 0
    root: int = 0
    verdict: Verdict | None = None
    committed: tuple[int, ...] = ()
    error: Exception | None = None

    @property
    def sequence(self) -> Sequence:
        """The request's text and pages."""
        return self.active.sequence

    @property
    def ended(self) -> bool:
        """The request has failed or is complete."""
        return self.error is not None or self.sequence.finish_reason is not None

    @property
    def pending(self) -> list[int]:
        """The tokens of its text that are run."""
        return self.sequence.tokens[self.context : self.context + self.tokens]

    @property
    def kept(self) -> tuple[int, ...]:
        """The nodes of the proposal whose tokens joined the text."""
        return self.verdict.path[: len(self.committed)] if self.verdict is not None else ()

    def commit(self) -> None:
        """Add what verification decided to the text, as far as the request goes."""
        assert self.verdict is not None
        self.committed = self.sequence.commit(self.verdict.tokens)
        self.active.law.append(self.committed)
        self.active.expected = min(self.active.accepted, self.verdict.accepted)
        self.active.accepted = self.verdict.accepted

    def ran(self) -> list[int]:
        """The tokens that were run and belong to the text."""
        return [*self.pending, *(self.proposal.tokens[node] for node in self.kept)]

    def rows(self) -> list[int]:
        """Where those tokens are in the batch."""
        nodes = self.first + self.tokens
        return [*range(self.first, nodes), *(nodes + node for node in self.kept)]

    def logit_rows(self) -> list[int]:
        """The row of logits that each committed token came from."""
        after = [ROOT, *self.kept]
        return [self.root + 1 + node for node in after[: len(self.committed)]]

    def moves(self) -> list[tuple[int, int]]:
        """(from, to) for kept tokens that do not lie where the text wants them, as places in the text."""
        base = self.context + self.tokens
        return [(base + node, base + depth) for depth, node in enumerate(self.kept) if node != depth]

    def delta(self, logprobs: tuple[TokenLogprobs, ...]) -> Delta:
        """What is told of the step."""
        first = not self.active.told
        self.active.told = True
        return Delta(
            request_id=self.sequence.request.id,
            tokens=self.committed,
            committed_at=time.monotonic(),
            proposed=len(self.proposal),
            depth=self.proposal.depth,
            accepted=len(self.kept),
            logprobs=logprobs,
            reused=(self.active.reused or 0) if first else 0,
            prompt_logprobs=tuple(self.active.prompt_logprobs) if first else (),
            finish_reason=self.sequence.finish_reason,
        )
