"""Log probabilities that the target itself gives to tokens, before any parameter of the request."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.engine.types import TokenLogprobs
from outrider_serving.sampling.transfer import fetched, sent

_ELEMENTS_AT_ONCE = 1 << 24
"""Most logits that are taken to float64 at once: 128 MiB."""
_SPARE = 16
"""More of the likeliest tokens than wanted are looked at: where all of these are as likely as the last wanted
one, there may be others."""


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
    (chosen,) = sent([np.array(tokens, dtype=np.int64)[:, None]], logits.device)
    total = logits.logsumexp(-1)
    own = logits.gather(-1, chosen)[:, 0] - total
    k, vocabulary = max(top), logits.shape[-1]
    if k == 0:
        return [TokenLogprobs(logprob, ()) for logprob in fetched([own])[0].tolist()]
    total, own, values, ids = fetched([total, own, *logits.topk(min(k + _SPARE, vocabulary))])
    if k < vocabulary - _SPARE:
        unsure = (values[:, k - 1] == values[:, -1]).nonzero()[:, 0]
        if len(unsure):
            ids[unsure] = _lowest(logits, unsure, values[unsure], ids[unsure])
    return [
        TokenLogprobs(logprob, tuple((token, value - whole) for token, value in ranked[:wanted]))
        for logprob, whole, ranked, wanted in zip(
            own.tolist(), total.tolist(), map(_in_order, values.numpy(), ids.numpy()), top, strict=True
        )
    ]


def _in_order(values: NDArray[np.float64], ids: NDArray[np.int64]) -> list[tuple[int, float]]:
    order = np.lexsort((ids, -values))
    return list(zip(ids[order].tolist(), values[order].tolist(), strict=True))


def _lowest(logits: Tensor, rows: Tensor, values: Tensor, ids: Tensor) -> Tensor:
    """The candidates of some rows, with the lowest ids among those that equal the last one.

    Which of several equal ones topk takes is unspecified, so these are looked for in the whole rows.

    Args:
        logits: [positions, vocabulary].
        rows: int64 [n] on the CPU: which positions.
        values: float64 [n, k] on the CPU: their highest logits, in descending order.
        ids: int64 [n, k] on the CPU: which ones topk took.
    """
    k, vocabulary = values.shape[-1], logits.shape[-1]
    there, edges = sent([rows.numpy(), values[:, -1:].numpy()], logits.device)
    falling = torch.arange(vocabulary, 0, -1, device=logits.device)
    equal = torch.where(logits[there] == edges, falling, 0).topk(k).values
    (lowest,) = fetched([vocabulary - equal])
    place = torch.arange(k) - (values > values[:, -1:]).sum(-1, keepdim=True)
    return torch.where(place < 0, ids, lowest.gather(-1, place.clamp(min=0)))
