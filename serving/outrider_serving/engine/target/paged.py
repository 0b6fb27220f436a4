"""Attention over pages in plain torch, for CPU and CUDA alike: the kernel that others are measured against.

Each request attends by itself, over exactly the keys that it can see. Where its pages lie one after another,
which the pool prefers, they are read in place; only scattered ones are gathered. Grouped heads are handed to
the fused kernel as further queries of one head, so that keys and values are read once.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torch.nn import functional as F  # noqa: N812

from outrider_serving.engine.target.attention import Scoring
from outrider_serving.engine.target.batch import Batch, Segment
from outrider_serving.engine.target.kv import KVStore

_LONG = 64
"""From so many new tokens of one request on, a mask for each head of a group costs more than it saves."""


@dataclass(frozen=True, slots=True)
class _View:
    """What one request sees in layers of one window.

    Attributes:
        slots: where its keys lie: a slice of the store, or int64 [L].
        mask: [T, L] in the model's dtype, 0 or -infinity; None where every new token sees every key.
    """

    slots: slice | Tensor
    mask: Tensor | None


@dataclass(slots=True)
class TorchPass:
    """A `TargetPass` over a batch. Made for one call of the model."""

    store: KVStore
    batch: Batch
    _views: dict[int | None, tuple[_View, ...]] = field(default_factory=dict)

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `TargetPass.attend`; writes the new tokens' keys and values to the store first."""
        self.store.write(layer, self.batch.slots, key.transpose(0, 1), value.transpose(0, 1))
        keys, values = self.store.layer(layer)
        parts = []
        for segment, view in zip(self.batch.segments, self._seen(scoring.window, query), strict=True):
            own = query[:, segment.first : segment.first + segment.count]
            k, v = keys[view.slots].transpose(0, 1), values[view.slots].transpose(0, 1)
            parts.append(_attention(own, k, v, view.mask, scoring))
        return torch.cat(parts, 1).transpose(0, 1).contiguous()

    def _seen(self, window: int | None, query: Tensor) -> tuple[_View, ...]:
        """What each segment sees, worked out once for all layers of a window."""
        if window not in self._views:
            self._views[window] = tuple(_view(segment, window, query) for segment in self.batch.segments)
        return self._views[window]


def _view(segment: Segment, window: int | None, like: Tensor) -> _View:
    first = 0 if window is None else max(0, segment.context - window + 1)
    slots = segment.slots[first:]
    mask = None
    if segment.count > 1:
        hidden = torch.from_numpy(~visible(segment, first, window)).to(like.device)
        mask = torch.zeros(hidden.shape, dtype=like.dtype, device=like.device)
        mask.masked_fill_(hidden, float("-inf"))
    in_a_row = int(slots[-1]) - int(slots[0]) == len(slots) - 1 and bool((np.diff(slots) == 1).all())
    if in_a_row:
        return _View(slice(int(slots[0]), int(slots[-1]) + 1), mask)
    return _View(torch.from_numpy(slots).to(like.device), mask)


def visible(segment: Segment, first: int, window: int | None) -> NDArray[np.bool_]:
    """Which tokens, from position `first` on, each new token sees: bool [count, context + count - first].

    A new token sees the whole context and those new tokens that it follows, as far as their positions are
    within the window. Positions decide: nodes of one depth are equally far away, whatever their slots.
    """
    count, context = segment.count, segment.context
    ancestors = segment.ancestors if segment.ancestors is not None else np.tri(count, dtype=np.bool_)
    seen = np.concatenate([np.ones((count, context - first), dtype=np.bool_), ancestors], 1)
    if window is not None:
        at = np.concatenate([np.arange(first, context), segment.positions])
        seen &= at[None, :] > segment.positions[:, None] - window
    return seen


def _attention(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scoring: Scoring) -> Tensor:
    """[query heads, T, value size] of one request; keys and values are [key heads, L, size]."""
    heads, count, groups = keys.shape[0], query.shape[1], query.shape[0] // keys.shape[0]
    if scoring.softcap is not None:
        return _softcapped(query, keys, values, mask, scoring.scale, scoring.softcap)
    if count >= _LONG:
        out = F.scaled_dot_product_attention(
            query[None], keys[None], values[None], mask, scale=scoring.scale, enable_gqa=groups > 1
        )
        return out[0]
    packed = query.reshape(heads, groups * count, -1)
    spread = None if mask is None else mask.repeat(groups, 1)
    out = F.scaled_dot_product_attention(packed[None], keys[None], values[None], spread, scale=scoring.scale)
    return out.view(heads * groups, count, -1)


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scale: float, softcap: float
) -> Tensor:
    """Attention with capped scores, which the fused kernels lack; softmax in float32 or better."""
    heads, groups = keys.shape[0], query.shape[0] // keys.shape[0]
    q = query.reshape(heads, groups, *query.shape[1:])
    scores = q @ keys[:, None].transpose(-1, -2) * scale
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores + mask
    precise = torch.promote_types(torch.float32, scores.dtype)
    weights = torch.softmax(scores, -1, dtype=precise).to(values.dtype)
    return (weights @ values[:, None]).reshape(heads * groups, query.shape[1], values.shape[-1])
