"""What one target pass runs: the new tokens of all requests, packed one after another.

Of each request come its pending tokens (a piece of its prompt, or the token that was committed last) and the
nodes of its proposal. Each new token has a *slot*, where its keys and values go: they lie one after another
behind the request's context. It also has a *position* in the text. Two nodes of one depth have one position
and two slots, so masks go by ancestry and position, never by slot.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.sampling.proposal import ROOT, Proposal


@dataclass(frozen=True, slots=True)
class Piece:
    """What one request runs in a pass.

    Attributes:
        pending: tokens of its text that follow the context, at least one.
        proposal: tokens that may follow them; empty unless `pending` goes to the end of the text.
        context: how many tokens of the text have their keys and values in pages.
        pages: the request's pages, with room for all of these.
        logits: for how many of the last pending tokens logits are wanted; they always are for proposed ones.
    """

    pending: Sequence[int]
    proposal: Proposal
    context: int
    pages: Sequence[int]
    logits: int

    @property
    def tokens(self) -> int:
        """How many tokens it runs."""
        return len(self.pending) + len(self.proposal)


@dataclass(frozen=True, slots=True)
class Segment:
    """The part of a batch that belongs to one request.

    Attributes:
        first: index of its first token in the batch.
        count: number of its tokens.
        context: tokens before them.
        slots: int64 [context + count], where each token of context and segment lies.
        positions: int64 [count], of the new tokens in the text.
        ancestors: bool [count, count], which new tokens each one follows, itself included; None for a chain.
        logits: index of its first row among the logits.
    """

    first: int
    count: int
    context: int
    slots: NDArray[np.int64]
    positions: NDArray[np.int64]
    ancestors: NDArray[np.bool_] | None
    logits: int


@dataclass(frozen=True, slots=True)
class Batch:
    """One target pass over T tokens, with logits for N of them.

    Attributes:
        pieces: what was packed.
        segments: one for each piece, in order.
        ids: int64 [T].
        positions: int64 [T].
        slots: int64 [T].
        logits: int64 [N], which tokens' logits are wanted, ascending.
    """

    pieces: Sequence[Piece]
    segments: tuple[Segment, ...]
    ids: Tensor
    positions: Tensor
    slots: Tensor
    logits: Tensor


def pack(pieces: Sequence[Piece], page_size: int, device: torch.device) -> Batch:
    """The batch of the pieces, which are not none."""
    segments: list[Segment] = []
    ids: list[int] = []
    wanted: list[NDArray[np.int64]] = []
    rows = 0
    for piece in pieces:
        segments.append(_segment(piece, len(ids), rows, page_size))
        ids.extend(piece.pending)
        ids.extend(piece.proposal.tokens)
        kept = piece.logits + len(piece.proposal)
        wanted.append(np.arange(len(ids) - kept, len(ids)))
        rows += kept
    return Batch(
        pieces=pieces,
        segments=tuple(segments),
        ids=torch.tensor(ids, dtype=torch.int64, device=device),
        positions=_tensor([s.positions for s in segments], device),
        slots=_tensor([s.slots[s.context :] for s in segments], device),
        logits=_tensor(wanted, device),
    )


def slots_of(pages: Sequence[int], page_size: int, first: int, end: int) -> NDArray[np.int64]:
    """int64 [end - first]: where the tokens of a text from `first` to before `end` lie."""
    places = np.arange(first, end)
    slots: NDArray[np.int64] = np.asarray(pages, dtype=np.int64)[places // page_size] * page_size
    slots += places % page_size
    return slots


def _segment(piece: Piece, first: int, logits: int, page_size: int) -> Segment:
    end = piece.context + piece.tokens
    pending = len(piece.pending)
    positions = np.arange(piece.context, end)
    positions[pending:] = piece.context + pending - 1 + np.asarray(piece.proposal.depths, dtype=np.int64)
    return Segment(
        first=first,
        count=piece.tokens,
        context=piece.context,
        slots=slots_of(piece.pages, page_size, 0, end),
        positions=positions,
        ancestors=_ancestors(pending, piece.proposal),
        logits=logits,
    )


def _ancestors(pending: int, proposal: Proposal) -> NDArray[np.bool_] | None:
    """Who follows whom: bool [n, n] over pending tokens and nodes; None where they are a chain."""
    if proposal.is_chain:
        return None
    count = pending + len(proposal)
    seen = np.tri(count, dtype=np.bool_)
    for node, parent in enumerate(proposal.parents):
        at = pending + node
        seen[at] = seen[pending - 1 if parent == ROOT else pending + parent]
        seen[at, at] = True
    return seen


def _tensor(parts: Sequence[NDArray[np.int64]], device: torch.device) -> Tensor:
    return torch.from_numpy(np.concatenate(parts)).to(device)
