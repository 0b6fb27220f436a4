"""Log probabilities that the target itself gives to tokens, before any parameter of the request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.engine.types import TokenLogprobs

_ELEMENTS_AT_ONCE = 1 << 24
"""Most logits that are taken to float64 at once: 128 MiB."""


def token_logprobs(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    """The logprob of one token at each position, and the likeliest tokens there.

    Sums are in float64. Among equally likely tokens, the lower id comes first.

    Args:
        logits: [positions, vocabulary], any float dtype.
        tokens: one for each position.
        top: how many of the likeliest tokens to tell at each position, at most the whole vocabulary.
    """
    size = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    return [
        entry
        for start in range(0, len(tokens), size)
        for entry in _some(
            logits[start : start + size].double(), tokens[start : start + size], top[start : start + size]
        )
    ]


def _some(logits: Tensor, tokens: Sequence[int], top: Sequence[int]) -> list[TokenLogprobs]:
    total = logits.logsumexp(-1)
    own = logits.gather(-1, torch.tensor(tokens, device=logits.device)[:, None])[:, 0] - total
    best = _likeliest(logits, max(top))
    return [
        TokenLogprobs(logprob, tuple((token, value - whole) for token, value in ranked[:wanted]))
        for logprob, whole, ranked, wanted in zip(own.tolist(), total.tolist(), best, top, strict=True)
    ]


def _likeliest(logits: Tensor, k: int) -> list[list[tuple[int, float]]]:
    """The k highest logits of each row with their ids, in order.

    Which of several equal ones topk takes is unspecified, so a row that has more as high as its k-th one is
    looked at again, whole.
    """
    if k == 0:
        return [[] for _ in range(len(logits))]
    values, ids = logits.topk(k)
    tied = ((logits >= values[:, -1:]).sum(-1) > k).tolist()
    candidates = list(zip(values.cpu().numpy(), ids.cpu().numpy(), strict=True))
    for row in (row for row, again in enumerate(tied) if again):
        found = (logits[row] >= values[row, -1]).nonzero()[:, 0]
        candidates[row] = logits[row, found].cpu().numpy(), found.cpu().numpy()
    return [_in_order(row_values, row_ids)[:k] for row_values, row_ids in candidates]


def _in_order(values: NDArray[np.float64], ids: NDArray[np.int64]) -> list[tuple[int, float]]:
    order = np.lexsort((ids, -values))
    return list(zip(ids[order].tolist(), values[order].tolist(), strict=True))
