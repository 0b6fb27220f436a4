"""Keys and values of one request: contiguous, growing, cut by setting a length."""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

_GRAIN = 256


@dataclass(slots=True)
class SequenceKV:
    """The keys and values of one request in every layer.

    A target pass writes after `length`; the step loop then sets `length` to the number of leading tokens that
    were kept, which is how rejected proposals are taken back. Only the thread of the step loop touches it.

    Attributes:
        length: leading tokens whose keys and values are valid. Set by the step loop.
    """

    length: int = 0
    _layers: dict[int, tuple[Tensor, Tensor]] = field(default_factory=dict)

    def append(self, layer: int, keys: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Write the keys and values of the tokens after `length`; return those of all tokens.

        Args:
            layer: index of the attention layer.
            keys: [heads, tokens, key size], in the model's dtype.
            values: [heads, tokens, value size].

        Returns:
            Views [heads, length + tokens, size] of the store, valid until the next call.
        """
        end = self.length + keys.shape[1]
        stored = self._layers.get(layer)
        if stored is None or stored[0].shape[1] < end:
            old_keys, old_values = stored or (None, None)
            stored = self._grown(old_keys, keys, end), self._grown(old_values, values, end)
            self._layers[layer] = stored
        for store, new in zip(stored, (keys, values), strict=True):
            store[:, self.length : end] = new
        return stored[0][:, :end], stored[1][:, :end]

    def _grown(self, old: Tensor | None, like: Tensor, end: int) -> Tensor:
        """A store for at least `end` tokens that begins with the valid part of `old`.

        It is at least twice as long, so that appending n tokens one by one copies O(n).
        """
        capacity = max(end, 2 * old.shape[1] if old is not None else 0)
        capacity = -(-capacity // _GRAIN) * _GRAIN
        store = torch.empty((like.shape[0], capacity, like.shape[2]), dtype=like.dtype, device=like.device)
        if old is not None:
            store[:, : self.length] = old[:, : self.length]
        return store
