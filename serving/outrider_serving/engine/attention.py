"""Attention over our own store of keys and values, plugged into transformers' model definitions.

transformers lets a function be registered as an attention implementation: its modelling code then calls it in
every layer with the new tokens' queries, keys and values, after rotary embedding, and hands through keyword
arguments of the model's call. So any architecture that supports this interface runs over our store without a
line of modelling code here. Masks are ours as well: they follow from positions alone, so no mask function is
registered, and transformers then makes none.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F  # noqa: N812
from transformers import AttentionInterface

from outrider_serving.engine.kv import SequenceKV

IMPLEMENTATION = "outrider"
"""Name under which `attend` is registered: the value of `attn_implementation`."""

_UNSUPPORTED = ("s_aux", "position_bias", "block_mask", "head_mask", "indices")
"""Arguments of other attention functions that change the result; a model that passes one cannot be served."""


class UnsupportedAttentionError(Exception):
    """A model asks for a kind of attention that `attend` does not compute."""


@dataclass(slots=True)
class TargetPass:
    """What one call of the model needs to know in every attention layer: the keyword argument `target_pass`.

    Attributes:
        kv: store of the request whose tokens are run.
        layers: how many layers have attended so far.
    """

    kv: SequenceKV
    layers: int = 0
    _masks: dict[tuple[int, int], Tensor] = field(default_factory=dict)

    def mask(self, queries: int, first: int, window: int | None, device: torch.device) -> Tensor | None:
        """Which keys each new token sees.

        Args:
            queries: number T of new tokens; the first has position `kv.length`.
            first: position of the first key.
            window: a token sees the last `window` positions, its own included; all earlier ones when None.
            device: where the mask is needed.

        Returns:
            bool [T, kv.length + T - first], or None where every key is seen (a single token, whose keys are
            already cut to the window).
        """
        if queries == 1:
            return None
        key = (first, window or 0)
        if key not in self._masks:
            end = self.kv.length + queries
            at = torch.arange(self.kv.length, end, device=device)[:, None]
            seen = torch.arange(first, end, device=device)[None, :]
            mask = seen <= at
            self._masks[key] = mask if window is None else mask & (seen > at - window)
        return self._masks[key]


def attend(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    *,
    target_pass: TargetPass,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    dropout: float = 0.0,
    is_causal: bool | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """Causal attention of one request's new tokens over all its tokens, optionally within a sliding window.

    Args:
        module: the attention layer; its `layer_idx` names the layer in the store.
        query: [1, query heads, T, key size].
        key: [1, key heads, T, key size]; query heads are a multiple of key heads (grouped heads).
        value: [1, key heads, T, value size].
        attention_mask: always None, since masks follow from positions.
        target_pass: the store and what belongs to this call of the model.
        scaling: factor of the scores; 1 / sqrt(key size) when None.
        sliding_window: see `TargetPass.mask`.
        softcap: scores s become softcap * tanh(s / softcap).
        dropout: 0, since models are in evaluation mode.
        is_causal: None or True.
        others: whatever else a model passes along; what would change the result is refused.

    Returns:
        [1, T, query heads, value size], and None in the place of attention weights.

    Raises:
        UnsupportedAttentionError: the model asks for something else than the above.
    """
    refused = [name for name in _UNSUPPORTED if others.get(name) is not None]
    if refused or attention_mask is not None or dropout or is_causal is False:
        what = ", ".join(refused) or "a mask, dropout or bidirectional attention"
        raise UnsupportedAttentionError(f"{type(module).__name__} needs {what}, which is not supported")
    kv = target_pass.kv
    queries = query.shape[2]
    keys, values = kv.append(int(module.layer_idx), key[0], value[0])  # type: ignore[arg-type]
    first = 0 if sliding_window is None else max(0, kv.length - sliding_window + 1)
    keys, values = keys[None, :, first:], values[None, :, first:]
    mask = target_pass.mask(queries, first, sliding_window, query.device)
    target_pass.layers += 1
    if softcap is None:
        out = _fused(query, keys, values, mask, scaling)
    else:
        out = _softcapped(query, keys, values, mask, scaling, softcap)
    return out.transpose(1, 2).contiguous(), None


def _fused(query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    """Attention by a fused kernel.

    Where there is a single token, which needs no mask, the heads of a group are handed over as the tokens of
    one head: so keys and values are read once, in bfloat16 on a CPU ten times as fast as by repeated heads.
    """
    heads, key_heads, queries = query.shape[1], keys.shape[1], query.shape[2]
    if queries == 1:
        grouped = query.view(1, key_heads, heads // key_heads, -1)
        out = F.scaled_dot_product_attention(grouped, keys, values, scale=scaling)
        return out.view(1, heads, 1, -1)
    return F.scaled_dot_product_attention(
        query, keys, values, mask, scale=scaling, enable_gqa=heads != key_heads
    )


def _softcapped(
    query: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, scaling: float | None, softcap: float
) -> Tensor:
    """Attention with capped scores, which the fused kernels lack; softmax in float32 or better."""
    heads, groups = keys.shape[1], query.shape[1] // keys.shape[1]
    q = query.view(1, heads, groups, *query.shape[2:])
    k, v = keys[:, :, None], values[:, :, None]
    scores = q @ k.transpose(-1, -2) * (query.shape[-1] ** -0.5 if scaling is None else scaling)
    scores = softcap * torch.tanh(scores / softcap)
    if mask is not None:
        scores = scores.masked_fill(~mask, float("-inf"))
    precise = torch.promote_types(torch.float32, scores.dtype)
    weights = torch.softmax(scores, -1, dtype=precise).to(values.dtype)
    return (weights @ v).view(1, heads * groups, query.shape[2], values.shape[-1])


AttentionInterface.register(IMPLEMENTATION, attend)
