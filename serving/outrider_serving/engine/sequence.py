"""A request while it is in the engine: its text so far, its keys and values, how tokens are added to it."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Protocol

from transformers import PreTrainedTokenizerBase

from outrider_serving.engine.detokenize import Detokenizer, StopMatcher
from outrider_serving.engine.kv import SequenceKV
from outrider_serving.engine.types import Chunk, EngineError, FinishReason, Request, Usage
from outrider_serving.sampling.randomness import Randomness


class Sink(Protocol):
    """Takes what becomes of a request. Called by the thread of the step loop; must not block."""

    @property
    def cancelled(self) -> bool:
        """Nobody waits for the result any more."""
        ...

    def put(self, chunk: Chunk) -> None:
        """Take a chunk; the one with a finish reason is the last call."""
        ...

    def fail(self, error: EngineError) -> None:
        """Take the reason why there will be no more chunks; the last call."""
        ...


class Sequence:
    """One request in the engine. Everything here belongs to the thread of the step loop.

    Attributes:
        request: what was asked for.
        sink: who gets the chunks.
        randomness: the request's own source of draws.
        tokens: prompt and committed tokens.
        kv: keys and values of the leading `kv.length` of them.
        usage: the cost so far.
        finish_reason: set by the last `commit`.
    """

    def __init__(
        self, request: Request, sink: Sink, tokenizer: PreTrainedTokenizerBase, randomness: Randomness
    ) -> None:
        """Admit a request."""
        self.request = request
        self.sink = sink
        self.randomness = randomness
        self.tokens = list(request.prompt)
        self.kv = SequenceKV()
        self.usage = Usage(prompt_tokens=len(request.prompt))
        self.finish_reason: FinishReason | None = None
        self._detokenizer = Detokenizer(tokenizer, request.prompt)
        self._stops = StopMatcher(request.params.stop)

    @property
    def pending(self) -> int:
        """How many leading tokens the target has yet to see: a prompt's rest, or the one committed last."""
        return len(self.tokens) - self.kv.length

    @property
    def remaining(self) -> int:
        """How many more tokens may be committed."""
        return self.request.params.max_tokens - self.usage.completion_tokens

    def commit(
        self, tokens: tuple[int, ...], *, proposed: int, accepted: int, eos_token_ids: frozenset[int]
    ) -> Chunk:
        """Add the tokens of one verification step, up to the one that ends the request.

        The request ends with an end-of-sequence token (which counts, but has no text), with the token that
        completes a stop string, or with the last of max_tokens; later tokens of the step are dropped, and
        `accepted` counts only kept ones.

        Args:
            tokens: what verification committed, not empty.
            proposed: how many tokens were verified.
            accepted: how many leading tokens of `tokens` were proposed ones.
            eos_token_ids: tokens that end a sequence unless the request ignores them.

        Returns:
            The chunk for the sink.
        """
        params = self.request.params
        text, kept = "", 0
        for token in tokens[: self.remaining]:
            kept += 1
            ends = token in eos_token_ids and not params.ignore_eos
            if not ends:
                text += self._stops.push(self._detokenizer.push(token))
            if ends or self._stops.stopped:
                self.finish_reason = FinishReason.STOP
                break
        if self.finish_reason is None and kept == self.remaining:
            self.finish_reason = FinishReason.LENGTH
        if self.finish_reason is not None and not self._stops.stopped:
            text += self._stops.push(self._detokenizer.flush()) + self._stops.flush()
            if self._stops.stopped:
                self.finish_reason = FinishReason.STOP
        self.tokens.extend(tokens[:kept])
        self.usage = replace(
            self.usage,
            completion_tokens=self.usage.completion_tokens + kept,
            verification_steps=self.usage.verification_steps + 1,
            proposed_tokens=self.usage.proposed_tokens + proposed,
            accepted_tokens=self.usage.accepted_tokens + min(accepted, kept),
        )
        return Chunk(text, tokens[:kept], self.usage, time.monotonic(), self.finish_reason)
