"""How much memory captured passes keep, beside weights and pages: what is divided must leave it free.

All sizes share the memory that the largest one works in. To that come inputs and results, which lie outside,
and what the device needs for each graph.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch

from outrider_serving.engine.target.cuda.shapes import Room
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.target.triton.tables import Maxima

GRAPH_BYTES = 32 << 20
"""Of each graph: its nodes on the device, and blocks of memory that are not filled.

An allowance, not yet measured; `make gpu-check` holds what graphs take against the whole reserve.
"""


def graph_bytes(
    room: Room,
    shapes: Iterable[KVShape],
    *,
    query_heads: int,
    hidden_size: int,
    vocab_size: int,
    dtype: torch.dtype,
) -> int:
    """Memory for the captured passes of a model, in bytes.

    Args:
        room: has the sizes.
        shapes: what each layer keeps of a token.
        query_heads: of every layer.
        hidden_size: numbers of a hidden state.
        vocab_size: numbers of a token's logits.
        dtype: of the model.
    """
    layers = list(shapes)
    inputs = sum(input_bytes(room.maxima(tokens)) for tokens in (*room.sizes, room.tokens))
    # Logits are made, and then kept elsewhere; hidden states of all layers are there if some are wanted.
    results = room.sizes[-1] * (2 * vocab_size + (len(layers) + 1) * hidden_size) * dtype.itemsize
    widest = max(shape.value_size for shape in layers)
    partials = room.partials * room.tile * query_heads * (widest + 2) * torch.float32.itemsize
    return inputs + results + partials + len(room.sizes) * GRAPH_BYTES


def input_bytes(maxima: Maxima) -> int:
    """Memory of `Inputs`."""
    return 3 * maxima.tokens * torch.int64.itemsize + maxima.numbers * torch.int32.itemsize
