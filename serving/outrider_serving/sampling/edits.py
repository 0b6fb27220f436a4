"""What the parameters of requests do to logits, for a batch of rows at once.

Every row says what it wants as plain data (`Edit`); each kind of edit is then one sparse operation over all
rows together, so that the cost does not grow with the vocabulary, but for a row with a whole mask.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

Ids = NDArray[np.int64]
"""Distinct token ids."""


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
    _penalise(out, [(row, edit.penalty) for row, edit in enumerate(edits) if edit.penalty is not None])
    _add(out, [(row, edit.bias) for row, edit in enumerate(edits) if edit.bias is not None])
    _allow(out, [(row, edit.allowed) for row, edit in enumerate(edits) if edit.allowed is not None])
    _forbid(out, [(row, ids) for row, edit in enumerate(edits) for ids in edit.forbidden])
    _mask(out, [(row, edit.mask) for row, edit in enumerate(edits) if edit.mask is not None])
    return out


def _penalise(out: Tensor, wanted: Sequence[tuple[int, Penalty]]) -> None:
    if wanted:
        at = _index(((row, penalty.ids) for row, penalty in wanted), out.device)
        repetition = _joined((np.full(len(p.ids), p.repetition) for _, p in wanted), out.device)
        amounts = _joined((penalty.amounts for _, penalty in wanted), out.device)
        x = out[at]
        out[at] = torch.where(x > 0, x / repetition, x * repetition) - amounts


def _add(out: Tensor, wanted: Sequence[tuple[int, Bias]]) -> None:
    if wanted:
        at = _index(((row, bias.ids) for row, bias in wanted), out.device)
        out[at] += _joined((bias.values for _, bias in wanted), out.device)


def _allow(out: Tensor, wanted: Sequence[tuple[int, Ids]]) -> None:
    if wanted:
        at = _index(wanted, out.device)
        kept = out[at]
        out[[row for row, _ in wanted]] = -math.inf
        out[at] = kept


def _forbid(out: Tensor, wanted: Sequence[tuple[int, Ids]]) -> None:
    if wanted:
        out[_index(wanted, out.device)] = -math.inf


def _mask(out: Tensor, wanted: Sequence[tuple[int, Tensor]]) -> None:
    if wanted:
        rows = [row for row, _ in wanted]
        masks = torch.stack([mask for _, mask in wanted]).to(out.device)
        out[rows] = out[rows].masked_fill(~masks, -math.inf)


def _index(parts: Iterable[tuple[int, Ids]], device: torch.device) -> tuple[Tensor, Tensor]:
    """Row and column of every id of every part."""
    rows, ids = zip(*((np.full(len(ids), row), ids) for row, ids in parts), strict=True)
    return _joined(rows, device), _joined(ids, device)


def _joined(parts: Iterable[NDArray[np.generic]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(tuple(parts))).to(device)
