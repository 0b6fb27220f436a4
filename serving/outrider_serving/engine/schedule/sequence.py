"""A request while it is in the engine: its text so far and where its keys and values lie. Plain data."""

from __future__ import annotations

from collections.abc import Sequence as Tokens
from dataclasses import dataclass, field

from outrider_serving.engine.types import FinishReason, Request, SamplingParams

LOGIT_ROWS = 64
"""Most tokens that a prompt is read by in a pass where each of them needs logits: bounds their memory."""


def end_tokens(params: SamplingParams, eos_token_ids: frozenset[int]) -> frozenset[int]:
    """The tokens that end a request: the model's ends of sequence unless it ignores them, and its own."""
    ends = frozenset(params.stop_token_ids)
    return ends if params.ignore_eos else ends | eos_token_ids


@dataclass(slots=True, eq=False)
class Sequence:
    """One request in the engine. Belongs to the step loop.

    The loop adds to `computed` what a step has run and kept, and calls `commit`; everything from `pages` on
    is set by the scheduler alone.

    Attributes:
        request: what was asked for.
        order: arrival number, kept when the request is preempted; of two, the lower one goes first.
        ends: tokens that end it, see `end_tokens`.
        tokens: prompt and committed tokens.
        computed: how many leading tokens have their keys and values in pages.
        finish_reason: set by the last `commit`.
        pages: page table; token i lies in slot pages[i // page_size] * page_size + i % page_size. Empty
            while it waits.
        names: names of the leading full pages of `tokens`, as far as they were needed.
        published: how many leading pages are offered to others under their names, or came from others.
        reused: how many leading tokens were found in cached pages when it last began.
        hit_marks: the proposers that have keys and values of their own in all of those pages.
        paid: how many leading tokens were charged to the tenant, or were never run for it.
    """

    request: Request
    order: int
    ends: frozenset[int] = frozenset()
    tokens: list[int] = field(init=False)
    computed: int = 0
    finish_reason: FinishReason | None = None
    pages: list[int] = field(default_factory=list)
    names: list[bytes] = field(default_factory=list)
    published: int = 0
    reused: int = 0
    hit_marks: frozenset[str] = frozenset()
    paid: int = 0

    def __post_init__(self) -> None:
        self.tokens = list(self.request.prompt)

    @property
    def outputs(self) -> int:
        """How many tokens were committed."""
        return len(self.tokens) - len(self.request.prompt)

    @property
    def pending(self) -> int:
        """How many tokens are to be run: 1 when it decodes, more when its text is still being read."""
        return len(self.tokens) - self.computed

    @property
    def scores_prompt(self) -> bool:
        """Logprobs of its prompt are wanted, and it is still being read: each token of it needs logits."""
        return self.request.params.prompt_logprobs is not None and self.computed < len(self.request.prompt)

    @property
    def runnable(self) -> int:
        """How many of its pending tokens one pass may run."""
        return min(self.pending, LOGIT_ROWS) if self.scores_prompt else self.pending

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.request.params.max_tokens - self.outputs

    def commit(self, tokens: Tokens[int]) -> tuple[int, ...]:
        """Add the tokens of one verification step, up to the one that ends the request.

        Args:
            tokens: what verification committed, in order.

        Returns:
            The tokens that were added. `finish_reason` is set where the last of them is one of `ends` (STOP)
            or else the last of max_tokens (LENGTH).
        """
        within = tuple(tokens[: self.remaining])
        end = next((i for i, token in enumerate(within) if token in self.ends), None)
        kept = within if end is None else within[: end + 1]
        self.tokens.extend(kept)
        if end is not None:
            self.finish_reason = FinishReason.STOP
        elif self.remaining == 0:
            self.finish_reason = FinishReason.LENGTH
        return kept
