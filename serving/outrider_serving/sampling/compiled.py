"""Laws of the next token, and coupled choices, over large vocabularies: by compiled code, on CPUs.

What is computed is what `law.distributions` and `coupling.coupled_tokens` say, in the same arithmetic; only
the order in which a softmax is added up, and the last bit of its exponentials, are other ones. No number
depends on the rows beside it, or on the number of threads.
"""

from __future__ import annotations

import ctypes
from collections.abc import Sequence

import torch
from torch import Tensor

from outrider_serving.native import structs
from outrider_serving.native.library import TYPES, Library, library
from outrider_serving.sampling.distribution import Cut, Distribution
from outrider_serving.sampling.noise import NoiseKey, stream

_FEWEST = 4096
"""Tokens of a vocabulary that is worth it: fewer cost torch nothing."""
_BLOCK = 64
"""Tokens that are written at once, as in law.cpp."""


def kernels(rows: Tensor) -> Library | None:
    """What computes with these rows, [..., vocabulary]; None where torch does it."""
    return library() if rows.device.type == "cpu" and rows.shape[-1] >= _FEWEST else None


def readable(logits: Tensor) -> Tensor:
    """The logits as compiled code can read them: rows of numbers side by side, of a type that it knows."""
    return (logits if logits.dtype in TYPES else logits.double()).contiguous()


def distributions(
    kernels: Library, logits: Sequence[Tensor], temperatures: Sequence[float], cuts: Sequence[Cut | None]
) -> list[Distribution] | None:
    """The law of each row, as `distribution.cut` of softmax gives it.

    Args:
        kernels: what computes.
        logits: each [vocabulary] of at least one token, as `readable` returns them.
        temperatures: positive.
        cuts: None leaves a row whole.

    Returns:
        None where the highest logit of some row is not finite.

    Raises:
        MemoryError: there is not enough.
    """
    vocabulary = len(logits[0])
    rows = (structs.LawRow * len(logits))()
    found = list[Distribution | None]()
    for row, theirs, temperature, wanted in zip(rows, logits, temperatures, cuts, strict=True):
        row.logits, row.type, row.temperature = theirs.data_ptr(), TYPES[theirs.dtype], temperature
        if wanted is None:
            probs = torch.empty(-(-vocabulary // _BLOCK) * _BLOCK, dtype=torch.float64)
            row.probs = probs.data_ptr()
            found.append(Distribution(None, probs[:vocabulary]))
        else:
            row.cut = structs.Cut(wanted.top_k, wanted.top_p, wanted.min_p)
            found.append(None)
    try:
        if not kernels.law(rows, vocabulary, torch.get_num_threads()):
            return None
        return [whole or _copied(row) for whole, row in zip(found, rows, strict=True)]
    finally:
        kernels.close_law(rows)


def _copied(row: structs.LawRow) -> Distribution:
    """A copy of what was kept in a row, which will be closed."""
    ids, probs = torch.empty(row.kept, dtype=torch.int64), torch.empty(row.kept, dtype=torch.float64)
    size = ids.nbytes
    ctypes.memmove(ids.data_ptr(), row.ids, size)
    ctypes.memmove(probs.data_ptr(), row.ids + size, size)
    return Distribution(ids, probs)


def coupled_tokens(kernels: Library, probs: Sequence[Tensor], keys: Sequence[NoiseKey]) -> list[int]:
    """The token of each row whose clock rings first.

    Args:
        kernels: what computes.
        probs: each float64 [vocabulary] on the CPU, of equal lengths.
        keys: one for each.
    """
    contiguous = [row.contiguous() for row in probs]
    rows = (structs.ClockRow * len(contiguous))()
    for row, theirs, key in zip(rows, contiguous, keys, strict=True):
        row.probs = theirs.data_ptr()
        row.start, row.gamma = stream(key)
    kernels.coupled(rows, len(contiguous[0]), torch.get_num_threads())
    return [row.token for row in rows]
