"""What the parameters of requests do to logits, for a batch of rows at once.

Every row says what it wants as plain data (`Edit`); each kind of edit is then one sparse operation over all
rows together, so that the cost does not grow with the vocabulary, but for a row with a whole mask. The
numbers of all kinds reach the device of the logits in one copy.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TypeVar

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.sampling.transfer import Numbers, put, sent

Ids = NDArray[np.int64]
"""Distinct token ids."""

_Number = TypeVar("_Number", np.int64, np.float64)
_Apply = Callable[..., None]
"""Does one kind of edit to the logits, given its numbers on their device."""


@dataclass(frozen=True, slots=True)
class Penalty:
    """Which tokens have occurred, and what that costs them.

    Attributes:
        ids: tokens of prompt and output (only the output where `repetition` is 1).
        amounts: float64, what is taken off each one's logit.
        repetition: before that, positive logits are divided by it and others multiplied.
    """

    ids: Ids
    amounts: NDArray[np.float64]
    repetition: float


@dataclass(frozen=True, slots=True)
class Bias:
    """What is added to the logits of some tokens: ids, and float64 values."""

    ids: Ids
    values: NDArray[np.float64]


@dataclass(frozen=True, slots=True)
class Edit:
    """What is done to one row, in the order of the fields.

    Attributes:
        allowed: all other tokens are ruled out.
        forbidden: each set of tokens is ruled out.
        mask: bool [vocabulary], tokens where it is False are ruled out.
    """

    penalty: Penalty | None = None
    bias: Bias | None = None
    allowed: Ids | None = None
    forbidden: tuple[Ids, ...] = ()
    mask: Tensor | None = None


def edited(logits: Tensor, edits: Sequence[Edit]) -> Tensor:
    """The logits after the edits, as a float64 copy; a token that is ruled out has minus infinity.

    Args:
        logits: [rows, vocabulary], any float dtype.
        edits: one for each row.
    """
    out = logits.to(torch.float64, copy=True)
    sparse: list[tuple[_Apply, tuple[Numbers, ...]]] = []
    if penalties := [(row, edit.penalty) for row, edit in enumerate(edits) if edit.penalty is not None]:
        at = _index((row, penalty.ids) for row, penalty in penalties)
        repetition = _joined(np.full(len(p.ids), p.repetition, dtype=np.float64) for _, p in penalties)
        sparse.append((_penalise, (*at, repetition, _joined(p.amounts for _, p in penalties))))
    if biases := [(row, edit.bias) for row, edit in enumerate(edits) if edit.bias is not None]:
        at = _index((row, bias.ids) for row, bias in biases)
        sparse.append((_add, (*at, _joined(bias.values for _, bias in biases))))
    if allowed := [(row, edit.allowed) for row, edit in enumerate(edits) if edit.allowed is not None]:
        sparse.append((_allow, (*_index(allowed), np.array([row for row, _ in allowed], dtype=np.int64))))
    if forbidden := [(row, ids) for row, edit in enumerate(edits) for ids in edit.forbidden]:
        sparse.append((_forbid, _index(forbidden)))
    masks = [(row, edit.mask) for row, edit in enumerate(edits) if edit.mask is not None]
    if masks:
        masked = np.array([row for row, _ in masks], dtype=np.int64)
        sparse.append((partial(_mask, mask=torch.stack([mask for _, mask in masks])), (masked,)))
    numbers = iter(sent([array for _, arrays in sparse for array in arrays], out.device))
    for apply, arrays in sparse:
        apply(out, *(next(numbers) for _ in arrays))
    return out


def _penalise(out: Tensor, rows: Tensor, ids: Tensor, repetition: Tensor, amounts: Tensor) -> None:
    x = out[rows, ids]
    out[rows, ids] = torch.where(x > 0, x / repetition, x * repetition) - amounts


def _add(out: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    out[rows, ids] += values


def _allow(out: Tensor, rows: Tensor, ids: Tensor, whole_rows: Tensor) -> None:
    kept = out[rows, ids]
    out[whole_rows] = -math.inf
    out[rows, ids] = kept


def _forbid(out: Tensor, rows: Tensor, ids: Tensor) -> None:
    out[rows, ids] = -math.inf


def _mask(out: Tensor, rows: Tensor, *, mask: Tensor) -> None:
    out[rows] = out[rows].masked_fill(~put(mask, out.device), -math.inf)


def _index(parts: Iterable[tuple[int, Ids]]) -> tuple[Ids, Ids]:
    """Row and column of every id of every part."""
    rows, ids = zip(*((np.full(len(ids), row), ids) for row, ids in parts), strict=True)
    return _joined(rows), _joined(ids)


def _joined(parts: Iterable[NDArray[_Number]]) -> NDArray[_Number]:
    return np.concatenate(tuple(parts))
