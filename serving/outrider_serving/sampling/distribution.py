"""Distributions over tokens: cutting them to their most probable tokens, and taking one off another."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.sampling.transfer import fetched, put, sent

_FIRST_TOP = 64
_WIDEN = 8


@dataclass(frozen=True, slots=True)
class Distribution:
    """A probability for each token of a support; all other tokens have none.

    Attributes:
        ids: int64 [support], distinct token ids; None stands for the whole vocabulary in order.
        probs: float64 [support], not negative, of sum 1 within rounding; on the device of `ids`.
    """

    ids: Tensor | None
    probs: Tensor

    def prob(self, token: int) -> float:
        """The probability of a token."""
        return float(self.at(token))

    def at(self, token: int) -> Tensor:
        """The probability of a token, left on the device: float64 [1]. Nothing waits for it."""
        if self.ids is None:
            return self.probs[token : token + 1]
        return self.probs.masked_fill(self.ids != token, 0).sum(0, keepdim=True)

    def on(self, ids: Tensor) -> Tensor:
        """The probabilities of tokens, 0 for those outside the support.

        Args:
            ids: int64 [n], on the device of `probs`, as the answer is.
        """
        if self.ids is None:
            return self.probs[ids]
        if self.ids is ids:
            return self.probs
        support, order = self.ids.sort()
        places = torch.searchsorted(support, ids).clamp_(max=len(support) - 1)
        return self.probs[order][places].masked_fill_(support[places] != ids, 0)

    def index(self, token: int) -> int | None:
        """Where a token is in the support, None where it is not."""
        if self.ids is None:
            return token
        found = (self.ids == token).nonzero()
        return int(found[0]) if len(found) else None

    def token(self, index: int) -> int:
        """The token at an index of the support."""
        return index if self.ids is None else int(self.ids[index])

    def to(self, device: torch.device) -> Distribution:
        """The same on a device; what is sent there from the CPU is not waited for."""
        if self.probs.device == device:
            return self
        return Distribution(None if self.ids is None else put(self.ids, device), put(self.probs, device))

    def tokens(self, indices: Tensor) -> Tensor:
        """The tokens at indices of the support: int64 [n], like these, on the same device."""
        return indices if self.ids is None else self.ids.index_select(0, indices)


@dataclass(frozen=True, slots=True)
class Cut:
    """Which of the most probable tokens are kept.

    Attributes:
        top_k: the k most probable ones; 0 for all.
        top_p: of those, the shortest prefix whose share of their mass reaches this; 1 for all.
        min_p: of those, the ones at least this share as probable as the most probable one; 0 for all.
    """

    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


def residual(r: Distribution, q: Distribution | None, token: int) -> Distribution:
    """What is left of r after a token drawn from q was refused: max(0, r - q), normalised.

    Where no mass is left, r was q within rounding, and the refusal itself was an accident of rounding: r is
    returned as it is, which at least gives nothing to a token without probability in r.

    Nothing waits for a device: one pass more over the row costs less there. Each row has operations of its
    own: in those over many rows at once the order of a sum, and with it the last bit, may depend on how many
    they are.

    Args:
        r: on any support; that of the result is the same.
        q: on any support, which need not be that of r, on the device of r; None is one-hot at `token`.
        token: the one that was refused.
    """
    weights = _less(r, q, token)
    mass = weights.sum()
    if mass.is_cpu:
        return Distribution(r.ids, weights.div_(mass)) if mass > 0 else r
    return Distribution(r.ids, torch.where(mass > 0, weights.div_(mass), r.probs))


def _less(r: Distribution, q: Distribution | None, token: int) -> Tensor:
    """max(0, r - q), on the support of r; see `residual`."""
    if q is None:
        if r.ids is not None:
            return r.probs.masked_fill(r.ids == token, 0)
        weights = r.probs.clone()
        weights[token] = 0
        return weights
    if r.ids is not None:
        return (r.probs - q.on(r.ids)).clamp_(min=0)
    if q.ids is None:
        return (r.probs - q.probs).clamp_(min=0)
    return r.probs.index_add(0, q.ids, q.probs, alpha=-1).clamp_(min=0)


def cut(probs: Tensor, cuts: Sequence[Cut | None]) -> list[Distribution]:
    """Cut each row to its most probable tokens, renormalised.

    Tokens are ordered by descending probability, and equally probable ones by ascending id. A row keeps at
    least one token, and none of probability 0. The prefix that `top_p` keeps is the nucleus of Holtzman et
    al. 2020 (arXiv 1904.09751); `min_p` is that of Nguyen et al. 2024 (arXiv 2407.01082).

    Only the first candidates are sorted, and more for the rows that need more. Each time they are taken to
    the CPU in one go, and so a distribution that was cut lies there.

    Args:
        probs: float64 [rows, vocabulary], each row of sum 1 within rounding.
        cuts: one for each row; None leaves the row whole.
    """
    found: dict[int, Distribution] = {}
    vocabulary = probs.shape[-1]
    waiting = {row: wanted for row, wanted in enumerate(cuts) if wanted is not None}
    k = _FIRST_TOP
    while waiting:
        k = min(k, vocabulary)
        # One more than wanted, because the last candidate may be tied with one that is not among them.
        rows = [row for row, wanted in waiting.items() if wanted.top_k < k or k == vocabulary]
        chosen = probs
        if len(rows) < len(probs):
            (there,) = sent([np.array(rows, dtype=np.int64)], probs.device)
            chosen = probs[there]
        top, ids = chosen.sort(descending=True, stable=True) if k == vocabulary else chosen.topk(k)
        top, ids = fetched([top, ids])
        for row, row_top, row_ids in zip(rows, top.numpy(), ids.numpy(), strict=True):
            kept = _kept(row_top, row_ids, waiting[row], complete=k == vocabulary)
            if kept is not None:
                found[row] = kept
                del waiting[row]
        k *= _WIDEN
    return [found.get(row) or Distribution(None, whole) for row, whole in enumerate(probs)]


def _kept(
    top: NDArray[np.float64], ids: NDArray[np.int64], wanted: Cut, *, complete: bool
) -> Distribution | None:
    """What a cut keeps of the candidates; None where it may need more of them.

    Args:
        top: probabilities of the k most probable tokens, in descending order.
        ids: their ids; which of several equally probable tokens are among them is unspecified.
        wanted: what to keep.
        complete: they are the whole vocabulary, equally probable ones by ascending id.
    """
    ordered = top
    if not complete:
        # Of those as probable as the last candidate some may be missing: the others are certain.
        certain = int((top > top[-1]).sum())
        order = np.lexsort((ids[:certain], -top[:certain]))
        ordered, ids = top[order], ids[order]
    if wanted.top_k:
        if len(ordered) < wanted.top_k and not complete:
            return None
        ordered, complete = ordered[: wanted.top_k], True
    mass = ordered.cumsum()
    length = int(((ordered > 0) & (ordered >= wanted.min_p * top[0])).sum())
    if wanted.top_p < 1:
        whole = mass[-1] if wanted.top_k else 1.0
        length = min(length, int((mass < wanted.top_p * whole).sum()) + 1)
    if length >= len(ordered) and not complete:
        return None
    return Distribution(torch.from_numpy(ids[:length]), torch.from_numpy(ordered[:length] / mass[length - 1]))
