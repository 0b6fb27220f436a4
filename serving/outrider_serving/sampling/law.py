"""The law of the next token: from the target's logits and a request's parameters to a distribution.

There is one implementation. It is used at every position, with and without proposals, and for proposers that
draw, so that what verification preserves is also what plain decoding draws from.

The parameters act in this order, at each position on the text up to it: prompt, committed output, and the
proposed tokens along the path.

1. `repetition_penalty` (Keskar et al. 2019, arXiv 1909.05858, in the usual form that also holds for negative
   logits): the logit of a token of the prompt or the output is divided by it where positive, multiplied where
   not. It is first because it scales the target's own logits: after any shift it would scale the shift too.
2. `frequency_penalty` and `presence_penalty` (OpenAI): the logit of a token of the output, less its count
   times the one, less the other. Then `logit_bias`. These are shifts: their order does not matter.
3. Tokens are ruled out: all but `allowed_token_ids`; `banned_token_ids`; before `min_tokens` tokens those
   that would end the request; what the constraint (a grammar) does not allow. This comes after every change
   of logits, so that no bias brings a token back, and before softmax and the cuts, so that these are made
   among the tokens that may follow.
4. `temperature`, and softmax. The highest logit is taken off before the division, which then cannot overflow
   to infinity minus infinity: towards temperature 0 the distribution becomes that over the argmaxes.
5. `top_k`; `top_p` of what top_k left, renormalised; `min_p` of what is left (`distribution.cut`). They come
   after the temperature, so that the cuts are made in the distribution that is drawn from.

All of it is in float64. Greedy decoding (temperature 0) takes the best token after step 3, the lowest id
among equals; where nothing edits the logits that is torch.argmax of the target's own.

The model's whole vocabulary takes part: where a model has more rows than its tokenizer has tokens, the
surplus ids keep the probability that the model gives them (and decode to nothing), because removing them
would change the law of the target.
"""

from __future__ import annotations

import sys
from collections.abc import Iterable, Sequence
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider_serving.engine.types import EngineError, SamplingParams
from outrider_serving.sampling import compiled
from outrider_serving.sampling.distribution import Cut, Distribution, cut
from outrider_serving.sampling.edits import Bias, Edit, Ids, Penalty, edited
from outrider_serving.sampling.highest import highest, with_finiteness
from outrider_serving.sampling.history import History
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.transfer import sent

_COLDEST = sys.float_info.min
"""The lowest temperature to divide by: 1 over a lower one is infinite, which some devices multiply by.

Logits up to float32 that differ at all differ by more than 1e-45, so that below it nothing changes.
"""


class NoTokenLeftError(EngineError):
    """No token has a finite logit: every one was ruled out, or the target is broken. The request fails.

    The API accepts no parameters that rule out every token.
    """

    def __init__(self) -> None:
        super().__init__(
            "no token is left that may follow: the parameters rule out every one, or the target is broken"
        )


class Constraint(Protocol):
    """Rules tokens out by the text before them."""

    def mask(self, path: Sequence[int]) -> Tensor:
        """What may follow the committed text and the tokens of `path`: bool [vocabulary]."""
        ...

    def advance(self, tokens: Sequence[int]) -> None:
        """Take note of committed tokens."""
        ...


class TokenLaw:
    """What one request's parameters say about its next token, given the text so far.

    Attributes:
        params: the request's.
        vocab_size: number of logits of a position.
        cut: what is kept after softmax; None for all.
    """

    def __init__(
        self,
        params: SamplingParams,
        prompt: Sequence[int],
        *,
        vocab_size: int,
        ends: frozenset[int],
        constraint: Constraint | None = None,
    ) -> None:
        """Begin with no output.

        Args:
            params: validated; ids in them are below `vocab_size`.
            prompt: the request's tokens.
            vocab_size: number of logits of a position.
            ends: tokens that end the request: ends of sequence unless they are ignored, and stop tokens.
            constraint: rules out more tokens; from now on told of committed ones by `append`.
        """
        self.params = params
        self.vocab_size = vocab_size
        self.cut = _cut_of(params, vocab_size)
        self._ends = ends
        self._constraint = constraint
        self._position = 0
        self._history = _history_of(params, prompt)
        self._bias = _bias_of(params)
        banned, allowed = frozenset(params.banned_token_ids), params.allowed_token_ids
        self._allowed = None if allowed is None else _ids(frozenset(allowed) - banned)
        self._forbidden = (_ids(banned),) if banned else ()
        self._end_ids = _ids(token for token in ends if token < vocab_size)
        edits = (self._history, self._bias, self._allowed, constraint)
        self._edits = bool(banned) or any(edit is not None for edit in edits)

    @property
    def position(self) -> int:
        """Index in the output of the next token to commit."""
        return self._position

    @property
    def greedy(self) -> bool:
        """The best token is taken, and nothing is random."""
        return self.params.temperature == 0

    @property
    def plain(self) -> bool:
        """Nothing edits the logits, at this position or at any later one."""
        return not self._edits and self._position >= self.params.min_tokens

    @property
    def noise(self) -> NoiseKey | None:
        """The key of the next token to commit, where the request has a seed and is not greedy."""
        if self.params.seed is None or self.greedy:
            return None
        return NoiseKey(self.params.seed, self.params.choice, self._position)

    def append(self, tokens: Sequence[int]) -> None:
        """Take note of committed tokens."""
        self._position += len(tokens)
        if self._history is not None:
            self._history.append(tokens)
        if self._constraint is not None:
            self._constraint.advance(tokens)

    def ends_with(self, token: int) -> bool:
        """Whether a committed token ends the request, so that nothing may follow it."""
        return token in self._ends

    def distribution(self, logits: Tensor, path: Sequence[int] = ()) -> Distribution:
        """`distributions` for one position: logits [vocabulary] after the tokens of `path`."""
        return distributions(logits[None], [(self, path)])[0]

    def edit(self, path: Sequence[int]) -> Edit:
        """What is done to the logits after the tokens of `path`, were they committed."""
        early = self._position + len(path) < self.params.min_tokens and len(self._end_ids) > 0
        return Edit(
            penalty=None if self._history is None else self._penalty(self._history, path),
            bias=self._bias,
            allowed=self._allowed,
            forbidden=(*self._forbidden, self._end_ids) if early else self._forbidden,
            mask=None if self._constraint is None else self._constraint.mask(path),
        )

    def _penalty(self, history: History, path: Sequence[int]) -> Penalty:
        ids, counts = history.along(path)
        params = self.params
        amounts = counts * params.frequency_penalty + (counts > 0) * params.presence_penalty
        return Penalty(ids, amounts, params.repetition_penalty)


At = Sequence[tuple[TokenLaw, Sequence[int]]]
"""For each row of logits: the request's law, and the proposed tokens between committed text and row."""


def distributions(logits: Tensor, at: At) -> list[Distribution]:
    """The laws of the next token at any positions of any requests.

    A greedy request's is one-hot at its best token.

    Args:
        logits: [rows, vocabulary], any float dtype.
        at: where each row stands.

    Returns:
        One for each row: on the CPU where it was cut, on the device of the logits where it was not.

    Raises:
        NoTokenLeftError: in some row nothing is left.
        ValueError: the logits are not of the vocabulary's size.
    """
    temperatures = [max(law.params.temperature, _COLDEST) for law, _ in at]
    cuts = [law.cut for law, _ in at]
    if (kernels := compiled.kernels(logits)) is not None:
        found = compiled.distributions(kernels, _edited_rows(logits, at), temperatures, cuts)
        if found is None:
            raise NoTokenLeftError
        return found
    z = _edited(logits, at)
    peaks = z.amax(-1, keepdim=True)
    if not bool(peaks.isfinite().all()):
        raise NoTokenLeftError
    (divisors,) = sent([np.array(temperatures, dtype=np.float64)[:, None]], z.device)
    z.sub_(peaks).div_(divisors)
    return cut(torch.softmax(z, -1), cuts)


def best(logits: Tensor, at: At) -> list[int]:
    """The token that greedy decoding takes in each row; arguments and errors are those of `distributions`."""
    z = _edited(logits, at)
    found = with_finiteness(z, highest(z))
    if not all(finite for _, finite in found):
        raise NoTokenLeftError
    return [token for token, _ in found]


def _edited(logits: Tensor, at: At) -> Tensor:
    """Edited logits, float64 [rows, vocabulary]."""
    _check_size(logits, at)
    return edited(logits, [law.edit(path) for law, path in at])


def _edited_rows(logits: Tensor, at: At) -> list[Tensor]:
    """Each row of logits, edited where something edits it: only then it is a float64 copy."""
    _check_size(logits, at)
    rows = list(compiled.readable(logits))
    changed = [row for row, (law, _) in enumerate(at) if not law.plain]
    if changed:
        edits = [law.edit(path) for law, path in (at[row] for row in changed)]
        for row, theirs in zip(changed, edited(logits[changed], edits), strict=True):
            rows[row] = theirs
    return rows


def _check_size(logits: Tensor, at: At) -> None:
    if any(law.vocab_size != logits.shape[-1] for law, _ in at):
        raise ValueError(f"{logits.shape[-1]} logits where the vocabulary has {at[0][0].vocab_size}")


def _cut_of(params: SamplingParams, vocab_size: int) -> Cut | None:
    if params.temperature == 0:
        return Cut(top_k=1)
    top_k = params.top_k if params.top_k < vocab_size else 0
    wanted = Cut(top_k, params.top_p, params.min_p)
    return None if wanted == Cut() else wanted


def _history_of(params: SamplingParams, prompt: Sequence[int]) -> History | None:
    """What penalties need; tokens of the prompt matter to one of them only."""
    if params.repetition_penalty != 1:
        return History(prompt)
    return History(()) if params.frequency_penalty or params.presence_penalty else None


def _bias_of(params: SamplingParams) -> Bias | None:
    if not params.logit_bias:
        return None
    ids, values = zip(*params.logit_bias, strict=True)
    return Bias(_ids(ids), np.array(values, dtype=np.float64))


def _ids(tokens: Iterable[int]) -> Ids:
    return np.fromiter(tokens, dtype=np.int64)
