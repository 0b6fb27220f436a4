"""The highest logit of a row, fast for large vocabularies in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 512


def highest(logits: Tensor) -> Tensor:
    """Index of the highest value of each row, the first of equal ones: what `logits.argmax(-1)` says.

    In two steps, first of chunks and then within one, as the maximum of a chunk is a fast operation in every
    dtype while argmax is not: of nine rows of 262,144 in bfloat16 it takes ten times as long on a CPU.

    Args:
        logits: [rows, vocabulary], any float dtype.

    Returns:
        int64 [rows].
    """
    rows, size = logits.shape
    whole = size // _CHUNK * _CHUNK
    if whole == 0:
        return logits.argmax(-1)
    chunks = logits[:, :whole].view(rows, -1, _CHUNK)
    chunk = chunks.amax(-1).argmax(-1)
    every = torch.arange(rows, device=logits.device)
    best = chunk * _CHUNK + chunks[every, chunk].argmax(-1)
    if whole == size:
        return best
    last = whole + logits[:, whole:].argmax(-1)
    return torch.where(logits[every, last] > logits[every, best], last, best)
