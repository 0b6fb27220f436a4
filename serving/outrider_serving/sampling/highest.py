"""The highest logit of a row, fast for large vocabularies in every dtype."""

from __future__ import annotations

import torch
from torch import Tensor

_CHUNK = 512


def highest(logits: Tensor) -> Tensor:
    """Index of the highest value of each row, the first of equal ones: what `logits.argmax(-1)` says.

    As there, what is not a number is the highest.

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
    first, later = logits[every, best], logits[every, last]
    return torch.where((later > first) | (later.isnan() & ~first.isnan()), last, best)


def with_finiteness(logits: Tensor, tokens: Tensor) -> list[tuple[int, bool]]:
    """A token of each row, and whether its logit is finite: by one look at the device.

    Args:
        logits: [rows, vocabulary], any float dtype.
        tokens: int64 [rows], on the device of the logits.
    """
    finite = logits.gather(-1, tokens[:, None])[:, 0].isfinite()
    ids, sound = torch.stack((tokens, finite.long())).tolist()
    return [(token, bool(finite)) for token, finite in zip(ids, sound, strict=True)]
