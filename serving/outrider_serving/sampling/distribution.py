"""From the target's logits and a request's parameters to the distribution that its next token is drawn from.

There is one implementation. It is used at every position, with and without proposals, so that what
verification preserves is also what plain decoding draws from.
"""

from __future__ import annotations

import sys
from dataclasses import dataclass

import torch
from torch import Tensor

_FIRST_TOP = 64
_WIDEN = 8
_COLDEST = sys.float_info.min
"""The lowest temperature to divide by: 1 over a lower one is infinite, which some devices multiply by.

Logits up to float32 that differ at all differ by more than 1e-45, so that below it nothing changes.
"""


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability for each token of a support; all other tokens have none.

    Attributes:
        ids: int64 [support], distinct token ids; None stands for the whole vocabulary in order.
        probs: float64 [support], not negative, of sum 1 within rounding.
    """

    ids: Tensor | None
    probs: Tensor

    def prob(self, token: int) -> float:
        """The probability of a token."""
        index = self.index(token)
        return 0.0 if index is None else float(self.probs[index])

    def index(self, token: int) -> int | None:
        """Where a token is in the support, None where it is not."""
        if self.ids is None:
            return token
        found = (self.ids == token).nonzero()
        return int(found[0]) if len(found) else None

    def token(self, index: int) -> int:
        """The token at an index of the support."""
        return index if self.ids is None else int(self.ids[index])


def distribution(logits: Tensor, temperature: float, top_p: float) -> Distribution:
    """The law of the next token: softmax(logits / temperature), cut to its nucleus, renormalised.

    The nucleus (Holtzman et al. 2020, arXiv 1904.09751) is the shortest prefix whose mass reaches `top_p`, of
    the tokens in descending order of probability; among equally probable ones, the lower id comes first. It
    holds at least one token. Softmax and sums are in float64; the highest logit is taken off before the
    division, which then cannot overflow to infinity minus infinity: towards temperature 0 the distribution
    becomes that over the argmaxes.

    The model's whole vocabulary takes part: where a model has more rows than its tokenizer has tokens, the
    surplus ids keep the probability that the model gives them (and decode to nothing), because removing them
    would change the law of the target.

    Args:
        logits: [vocabulary], any float dtype.
        temperature: greater than 0; greedy requests need no distribution.
        top_p: in (0, 1]; 1 leaves the whole vocabulary.

    Returns:
        The distribution, on the device of the logits.
    """
    precise = logits.to(torch.float64)
    probs = torch.softmax((precise - precise.max()) / max(temperature, _COLDEST), -1)
    return Distribution(None, probs) if top_p >= 1 else _nucleus(probs, top_p)


def _nucleus(probs: Tensor, top_p: float) -> Distribution:
    """The nucleus, sorting only the k most probable tokens, and more while they are too few.

    Which of several equally probable tokens are among the k is unspecified, so only those more probable
    than the last of the k count: they are all there.
    """
    k = min(_FIRST_TOP, len(probs))
    while k < len(probs):
        top, ids = probs.topk(k)
        certain = int((top > top[-1]).sum())
        cut = _cut(top[:certain], ids[:certain], top_p)
        if cut is not None:
            return cut
        k = min(k * _WIDEN, len(probs))
    ids = torch.arange(len(probs), device=probs.device)
    whole = _cut(probs, ids, top_p)
    return Distribution(None, probs) if whole is None else whole


def _cut(probs: Tensor, ids: Tensor, top_p: float) -> Distribution | None:
    """The shortest prefix of the ordered candidates with mass `top_p`; None where all of them have less."""
    by_id = ids.argsort()
    order = by_id[probs[by_id].argsort(descending=True, stable=True)]
    ordered = probs[order]
    mass = ordered.cumsum(0)
    length = int((mass < top_p).sum()) + 1
    if length > len(order):
        return None
    return Distribution(ids[order[:length]], ordered[:length] / mass[length - 1])
