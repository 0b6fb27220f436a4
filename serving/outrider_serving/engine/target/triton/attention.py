"""Attention over pages by Triton kernels: one launch for the whole batch, whatever it is made of.

Decoding, verification of trees and pieces of prompts stand side by side. Nothing but the numbers in `Tables`
changes from step to step, so a pass can be captured in a graph and replayed after `Tables.put`.

Bits. A token's result is a function of its query, of the keys and values of its request by place, of its
mask, and of what is constant for a deployment: dtype, head sizes, `Maxima.tile`, `Maxima.chunk`, the device,
Triton's version. It depends neither on other requests and their number, on padding and the other maxima, on
which pages are whose, nor on how texts are split over programs or prompts into pieces: one token at a time
gives the bits of one large piece, and so does a chain that is proposed. It does depend on where in a tree a
node and its ancestors stand, since sums over keys go by place.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton  # type: ignore[import-untyped]
from torch import Tensor

from outrider_serving.engine.target.attention import Scoring
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.triton import kernel
from outrider_serving.engine.target.triton.tables import Tables

ERROR = {torch.float64: 1e-12, torch.float32: 5e-6, torch.float16: 4e-3, torch.bfloat16: 3e-2}
"""How far results may be from those of `TorchPass`, as a share of the largest result in the batch."""

_PROGRAMS = 1024
"""How many programs a launch has at most: some for each multiprocessor of any device. They share the work."""

_LEAST = 16
"""The least that `tl.dot` takes of each dimension."""


@dataclass(frozen=True, slots=True)
class TritonPass:
    """A `TargetPass` over the batch that its tables describe. Queries may have rows of padding behind it."""

    store: KVStore
    tables: Tables

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `TargetPass.attend`; writes the new tokens' keys and values to the store first.

        Of the T tokens only those of the batch are computed and written; the results of others are zero.
        """
        keys, values = self.store.layer(layer)
        query, key, value = (one if one.stride(-1) == 1 else one.contiguous() for one in (query, key, value))
        self._write(keys, values, key, value)
        out = query.new_zeros((query.shape[1], query.shape[0], value.shape[-1]))
        self._attend(out, query, keys, values, scoring)
        return out

    def _write(self, keys: Tensor, values: Tensor, key: Tensor, value: Tensor) -> None:
        """One launch for both, and padding goes nowhere; `index_copy_` takes two, and a slot for padding."""
        heads, tokens, key_size = key.shape
        value_size = value.shape[-1]
        kernel.write[(tokens,)](
            keys,
            values,
            key,
            value,
            self.tables.slots,
            *key.stride()[:2],
            *value.stride()[:2],
            heads=heads,
            key_size=key_size,
            value_size=value_size,
            key_width=triton.next_power_of_2(heads * key_size),
            value_width=triton.next_power_of_2(heads * value_size),
        )

    def _attend(self, out: Tensor, query: Tensor, keys: Tensor, values: Tensor, scoring: Scoring) -> None:
        tables, maxima = self.tables, self.tables.maxima
        heads, key_size, value_size = *keys.shape[1:], values.shape[-1]
        group = query.shape[0] // heads
        value_width = _width(value_size)
        rows, key_width = _width(maxima.tile * group), _width(key_size)
        exact = query.dtype in (torch.float32, torch.float64)
        sums = torch.promote_types(torch.float32, query.dtype)
        part = query.new_empty((maxima.partials, maxima.tile, query.shape[0], value_size), dtype=sums)
        part_top, part_total = (part.new_empty(part.shape[:-1]) for _ in range(2))
        kernel.attend[(_programs(maxima.items, heads), heads)](
            out,
            part_top,
            part_total,
            part,
            query,
            keys,
            values,
            tables.counts,
            tables.items,
            tables.blocks,
            tables.positions,
            tables.pool,
            *query.stride()[:2],
            scale=scoring.scale,
            window=scoring.window,
            softcap=scoring.softcap,
            heads=heads,
            group=group,
            key_size=key_size,
            value_size=value_size,
            page_size=maxima.page_size,
            words=maxima.words,
            tile=maxima.tile,
            chunk_size=maxima.chunk,
            rows=rows,
            places=min(maxima.chunk, 32 if exact or max(key_width, value_width) > 128 else 64),
            key_width=key_width,
            value_width=value_width,
            precision="ieee",
            num_warps=4 if rows * max(key_width, value_width) < 8192 else 8,  # sums stay in registers
            num_stages=2 if exact else 3,
            enable_fp_fusion=True,
        )
        if maxima.merges:
            kernel.merge[(_programs(maxima.merges * maxima.tile, heads), heads)](
                out,
                part_top,
                part_total,
                part,
                tables.counts,
                tables.merges,
                tables.blocks,
                tables.positions,
                window=scoring.window,
                heads=heads,
                group=group,
                value_size=value_size,
                tile=maxima.tile,
                chunk_size=maxima.chunk,
                rows=triton.next_power_of_2(group),
                value_width=value_width,
                num_warps=2,
                enable_fp_fusion=True,
            )


def _width(size: int) -> int:
    """The size of a dimension that goes into `tl.dot`."""
    return max(_LEAST, int(triton.next_power_of_2(size)))


def _programs(work: int, heads: int) -> int:
    return max(1, min(work, _PROGRAMS // heads))
