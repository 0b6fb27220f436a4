"""One choice of an answer: the engine's deltas in, text and usage out."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import zip_longest

from outrider_serving.api.detokenize import Detokenizer, StopMatcher
from outrider_serving.api.records import Usage
from outrider_serving.api.tokens import Token, Vocabulary
from outrider_serving.engine.types import Delta, FinishReason, TokenLogprobs


@dataclass(frozen=True, slots=True)
class Scored:
    """A token of the answer with its logprobs.

    Attributes:
        token: the token.
        offset: how many characters of the answer's text come before those that the token is part of.
        logprob: natural logarithm of its probability; None for the first token of an echoed prompt.
        top: the likeliest tokens with theirs, most likely first.
    """

    token: Token
    offset: int
    logprob: float | None
    top: tuple[tuple[Token, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Piece:
    """What a choice gained, or all of it.

    Attributes:
        index: of the choice.
        text: new text; empty while characters or a possible stop string are not complete.
        tokens: new tokens; one without text among them may be an end of sequence.
        logprobs: of `tokens` if the request asked for them; those of an echoed prompt come first.
        committed_at: time.monotonic() of the engine's last commit in it.
        finish_reason: set on the last piece of a choice.
    """

    index: int
    text: str
    tokens: tuple[int, ...]
    logprobs: tuple[Scored, ...]
    committed_at: float
    finish_reason: FinishReason | None = None


def joined(pieces: Sequence[Piece]) -> Piece:
    """All of a choice, from its pieces in order."""
    return Piece(
        index=pieces[0].index,
        text="".join(piece.text for piece in pieces),
        tokens=tuple(token for piece in pieces for token in piece.tokens),
        logprobs=tuple(scored for piece in pieces for scored in piece.logprobs),
        committed_at=pieces[-1].committed_at,
        finish_reason=pieces[-1].finish_reason,
    )


@dataclass(frozen=True, slots=True)
class Echo:
    """The prompt as part of the answer.

    Attributes:
        text: the prompt.
        offsets: where in the text each of its tokens begins; None where their logprobs were not asked for.
    """

    text: str
    offsets: tuple[int, ...] | None = None


class Completion:
    """Turns the deltas of one request into text, whatever the cutting into deltas.

    The text ends before the first stop string that is complete when at least `min_tokens` tokens are
    committed; one that is complete earlier is text. Tokens, logprobs and usage end with the token that
    completed it: what the same delta has after it is dropped, and so is what was proposed there. A token that
    ends the request by itself (finish reason `stop` of the engine) counts, but has no text.
    """

    def __init__(
        self,
        vocabulary: Vocabulary,
        prompt: Sequence[int],
        *,
        index: int = 0,
        stops: Sequence[str] = (),
        min_tokens: int = 0,
        echo: Echo | None = None,
    ) -> None:
        """Begin after the given prompt, with the prompt where it is to be echoed."""
        self._vocabulary = vocabulary
        self._prompt = prompt
        self._index = index
        self._owed = min_tokens
        self._detokenizer = Detokenizer(vocabulary.tokenizer, prompt)
        self._stops = StopMatcher(stops)
        self._length = len(echo.text) if echo else 0
        self._echo = echo
        self.echoed: tuple[Scored, ...] = ()
        """The echoed prompt with its logprobs, to be set by whoever has them where the deltas do not."""
        if echo and echo.offsets:
            self.echoed = (Scored(vocabulary[prompt[0]], echo.offsets[0], None),)
        self.usage = Usage()
        """What it has cost so far; nothing before the first delta."""

    def push(self, delta: Delta) -> Piece:
        """What the next delta adds; nothing may follow a piece with a finish reason."""
        piece = self._read_on(delta)
        self._account(delta, len(piece.tokens))
        return piece

    def push_singly(self, delta: Delta) -> list[Piece]:
        """The same in a piece for each token; in one without any where there is none."""
        if not delta.tokens:
            return [self.push(delta)]
        pieces = list[Piece]()
        for single in _singles(delta):
            pieces.append(self._read_on(single))
            if self._stops.stopped:
                break
        self._account(delta, len(pieces))
        return pieces

    def _read_on(self, delta: Delta) -> Piece:
        if delta.prompt_logprobs and self._echo and self._echo.offsets:
            rest = self._score(self._prompt[1:], delta.prompt_logprobs, self._echo.offsets[1:])
            self.echoed = (*self.echoed, *rest)
        text, offsets = self._read(delta)
        reason = FinishReason.STOP if self._stops.stopped else delta.finish_reason
        if reason is not None and not self._stops.stopped:
            text += self._show(self._detokenizer.flush()) + self._stops.flush()
            reason = FinishReason.STOP if self._stops.stopped else reason
        logprobs = self._score(delta.tokens, delta.logprobs, offsets)
        if self._echo is not None and (offsets or reason):
            text, logprobs = self._echo.text + text, (*self.echoed, *logprobs)
            self._echo = None
        kept = delta.tokens[: len(offsets)]
        return Piece(self._index, text, kept, logprobs, delta.committed_at, reason)

    def _read(self, delta: Delta) -> tuple[str, list[int]]:
        """The text that tokens add, and where the text of each begins, up to one that completes a stop."""
        ending = len(delta.tokens) - 1 if delta.finish_reason is FinishReason.STOP else None
        text, offsets = "", []
        for place, token in enumerate(delta.tokens):
            offsets.append(self._length)
            self._owed -= 1
            if place != ending:
                text += self._show(self._detokenizer.push(token))
            if self._stops.stopped:
                break
        return text, offsets

    def _show(self, text: str) -> str:
        self._length += len(text)
        return self._stops.push(text, armed=self._owed <= 0)

    def _account(self, delta: Delta, kept: int) -> None:
        proposed, depth, accepted = delta.proposed, delta.depth, delta.accepted
        if kept < len(delta.tokens):
            proposed, depth, accepted = min(proposed, kept), min(depth, kept), min(accepted, kept)
        self.usage = Usage(
            prompt_tokens=len(self._prompt),
            completion_tokens=self.usage.completion_tokens + kept,
            verification_steps=self.usage.verification_steps + bool(kept),
            proposed_tokens=self.usage.proposed_tokens + proposed,
            accepted_tokens=self.usage.accepted_tokens + accepted,
            cached_tokens=self.usage.cached_tokens + delta.reused,
            proposed_by_position=_counted(self.usage.proposed_by_position, depth),
            accepted_by_position=_counted(self.usage.accepted_by_position, accepted),
        )

    def _score(
        self, tokens: Iterable[int], logprobs: Iterable[TokenLogprobs], offsets: Iterable[int]
    ) -> tuple[Scored, ...]:
        known = self._vocabulary
        return tuple(
            Scored(known[token], offset, found.logprob, tuple((known[other], p) for other, p in found.top))
            for token, found, offset in zip(tokens, logprobs, offsets, strict=False)
        )


def _counted(counts: tuple[int, ...], depth: int) -> tuple[int, ...]:
    """One more in the first `depth` positions."""
    return tuple(map(sum, zip_longest(counts, (1,) * depth, fillvalue=0)))


def _singles(delta: Delta) -> Iterator[Delta]:
    """Its text in a delta for each token; what it says of the step is not repeated."""
    last = len(delta.tokens) - 1
    scores = delta.prompt_logprobs
    for number, token in enumerate(delta.tokens):
        reason = delta.finish_reason if number == last else None
        one = Delta(
            delta.request_id, (token,), delta.committed_at, logprobs=delta.logprobs[number : number + 1]
        )
        yield replace(one, prompt_logprobs=scores, finish_reason=reason)
        scores = ()
