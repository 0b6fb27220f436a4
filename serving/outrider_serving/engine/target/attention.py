"""Attention over our own pages of keys and values, plugged into transformers' model definitions.

transformers lets a function be registered as an attention implementation: its modelling code then calls it in
every layer with the new tokens' queries, keys and values, after rotary embedding, and hands through keyword
arguments of the model's call. So any architecture that supports this interface runs over our pages without a
line of modelling code here. Masks are ours as well: they follow from positions and ancestry alone, so no mask
function is registered, and transformers then makes none.

`attend` is the only way in. What computes the attention is the `TargetPass` that the call carries: one kernel
is another class beside `paged.TorchPass`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Protocol

from torch import Tensor, nn
from transformers import AttentionInterface

IMPLEMENTATION = "outrider"
"""Name under which `attend` is registered: the value of `attn_implementation`."""

_HARMLESS = frozenset(
    {
        "cache_position",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
        "position_ids",
        "return_dict",
        "use_cache",
    }
)
"""What models pass on to every function, and none of them computes with.

A model that passes anything else, such as attention sinks or a bias of positions, cannot be served.
"""


class UnsupportedAttentionError(Exception):
    """A model asks for a kind of attention that `attend` does not compute."""


@dataclass(frozen=True, slots=True)
class Scoring:
    """How a layer scores keys.

    Attributes:
        scale: factor of the scores.
        window: a token sees the last `window` positions, its own included; all earlier ones when None.
        softcap: scores s become softcap * tanh(s / softcap), unless None.
    """

    scale: float
    window: int | None = None
    softcap: float | None = None


class TargetPass(Protocol):
    """What a call of the model needs to know in every attention layer: the argument `target_pass`."""

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """Attention of T new tokens over all that they follow.

        Args:
            layer: index of the layer.
            query: [query heads, T, key size].
            key: [key heads, T, key size]; query heads are a multiple of key heads (grouped heads).
            value: [key heads, T, value size].
            scoring: see there.

        Returns:
            [T, query heads, value size].
        """
        ...


def each_alone(query: Tensor, value: Tensor) -> Tensor:
    """What `TargetPass.attend` gives where every token sees itself alone: to look at how a model attends."""
    return value.repeat_interleave(query.shape[0] // value.shape[0], 0).transpose(0, 1)


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
    """What transformers calls in a layer.

    Args:
        module: the attention layer; its `layer_idx` names the layer in the store.
        query: [1, query heads, T, key size], the new tokens of all requests.
        key: [1, key heads, T, key size].
        value: [1, key heads, T, value size].
        attention_mask: always None, since masks follow from positions.
        target_pass: what computes the attention.
        scaling: factor of the scores; 1 / sqrt(key size) when None.
        sliding_window: see `Scoring.window`.
        softcap: see `Scoring.softcap`.
        dropout: 0, since models are in evaluation mode.
        is_causal: None or True.
        others: whatever else a model passes along; what is not known to change nothing is refused.

    Returns:
        [1, T, query heads, value size], and None in the place of attention weights.

    Raises:
        UnsupportedAttentionError: the model asks for something else than the above.
    """
    refused = [name for name, value in others.items() if value is not None and name not in _HARMLESS]
    both_ways = is_causal is False or (is_causal is None and getattr(module, "is_causal", True) is False)
    if refused or attention_mask is not None or dropout or both_ways:
        what = ", ".join(refused) or "a mask, dropout or bidirectional attention"
        raise UnsupportedAttentionError(f"{type(module).__name__} needs {what}, which is not supported")
    scoring = Scoring(query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap)
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    return target_pass.attend(layer, query[0], key[0], value[0], scoring)[None], None


AttentionInterface.register(IMPLEMENTATION, attend)
