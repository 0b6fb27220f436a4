"""Keys and values of many requests, in pages: one pair of tensors a layer, shared by all."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True, slots=True)
class KVShape:
    """Keys and values of one attention layer: per token [heads, key_size] and [heads, value_size]."""

    heads: int
    key_size: int
    value_size: int

    def bytes_per_token(self, dtype: torch.dtype) -> int:
        """What a token takes in this layer."""
        return self.heads * (self.key_size + self.value_size) * dtype.itemsize


class KVStore:
    """Keys and values of the layers of one model, by slot.

    Slot s is place s % page_size of page s // page_size; which request has which page is for others to know.
    Nothing is copied when a request grows, shrinks or shares pages.
    """

    def __init__(
        self, layers: Mapping[int, KVShape], slots: int, dtype: torch.dtype, device: torch.device
    ) -> None:
        """Take the memory; on a CPU the system hands it out as it is written to."""
        self._layers = {
            index: (
                torch.empty((slots, shape.heads, shape.key_size), dtype=dtype, device=device),
                torch.empty((slots, shape.heads, shape.value_size), dtype=dtype, device=device),
            )
            for index, shape in layers.items()
        }

    @property
    def pairs(self) -> tuple[tuple[Tensor, Tensor], ...]:
        """Keys and values of every layer, in the order in which the layers were named."""
        return tuple(self._layers.values())

    def layer(self, index: int) -> tuple[Tensor, Tensor]:
        """Keys [slots, heads, key size] and values [slots, heads, value size] of a layer."""
        return self._layers[index]

    def write(self, index: int, slots: Tensor, keys: Tensor, values: Tensor) -> None:
        """Put the keys and values of T tokens into a layer.

        Args:
            index: the layer.
            slots: int64 [T], distinct.
            keys: [T, heads, key size].
            values: [T, heads, value size].
        """
        for store, new in zip(self._layers[index], (keys, values), strict=True):
            store.index_copy_(0, slots, new)

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy tokens between slots in every layer, as if all were read before any is written.

        Args:
            sources: int64 [n].
            targets: int64 [n], distinct.
        """
        for pair in self._layers.values():
            for store in pair:
                store.index_copy_(0, targets, store.index_select(0, sources))
