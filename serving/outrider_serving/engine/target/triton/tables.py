"""What the kernels are told of a batch: one row of numbers, made on the host and sent in one piece.

Its layout follows from `Maxima` alone, so a captured graph finds everything where it was at capture. What
varies most in length, pages and masks, lies at its end in the *pool*: only the part that is in use is sent.

The new tokens of a request are cut into *blocks* of `Maxima.tile`, and its text into *chunks* of
`Maxima.chunk` places. (A token's place is its index in the row of keys that its request has: its position,
except among a tree's nodes.) The kernel goes through a list of *items*. An item is a block with either all
chunks of its text or one of them; what such single chunks give is merged in order afterwards. An item of all
chunks does the same sums in the same order, so which blocks are split decides about speed and never about
bits. Blocks are split, those of the longest texts first, as far as there is room for what is to be merged.

Masks: the pending tokens of a segment carry on its context as a chain. Places before the *trunk's* end are
seen by all that come later; of a tree's nodes, which come after it, each has one bit a node that it follows.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from outrider_serving.engine.target.batch import Batch, Piece

FIELDS = ("first", "count", "pages", "place", "trunk", "bits", "partial")
"""What the row of a block holds.

first: index of its first token in the batch. count: how many it has. pages: where in the pool the request's
pages are. place: of its first token. trunk: how many places the chain has; `CHAIN` if there are no others.
bits: where in the pool the masks of its first token are; they lie before those of its nodes, and are not
read, where that token is pending. partial: where among the partial results those of its chunk 0 are.
"""

CHAIN = 2**30
"""A trunk that no text ends."""

WHOLE = -1
"""In the place of a chunk: an item is all of them."""

NOWHERE = -1
"""The slot of a padding token."""

_ALIGNED = 4
"""Each part of the row begins at a multiple of so many numbers: 16 bytes, which loads like best."""


@dataclass(frozen=True, slots=True)
class Maxima:
    """The most that a batch may have; sizes of tensors and grids follow from these numbers only.

    Attributes:
        tokens: new tokens.
        requests: of how many requests.
        pages: pages of one request.
        page_size: tokens of a page.
        nodes: nodes of one proposal.
        tile: new tokens of a block, a power of two: about as many as most requests have. A program computes
            tile * (query heads of a key head) rows, whether they are used or not.
        partials: how many chunks may be worked on by programs of their own: several for each multiprocessor,
            and no fewer than the longest text has, which would not be split then. Each takes tile * query
            heads * (value size + 2) numbers of float32 while a layer runs.
        chunk: places of a chunk, a power of two from 32 on.
    """

    tokens: int
    requests: int
    pages: int
    page_size: int
    nodes: int
    tile: int = 16
    partials: int = 512
    chunk: int = 256

    def __post_init__(self) -> None:
        """Check what the kernels rely on.

        Raises:
            ValueError: a number is none of those that are allowed.
        """
        for name, least in (("tile", 1), ("chunk", 32)):
            value = getattr(self, name)
            if value < least or value & (value - 1):
                raise ValueError(f"{name} is {value}, which is no power of two from {least} on")
        if min(self.tokens, self.requests, self.pages, self.page_size) < 1 or self.partials < 0:
            raise ValueError(f"there is room for nothing: {self}")

    @property
    def blocks(self) -> int:
        """Blocks of a batch: each request has at most one that is not full."""
        return min(self.tokens, self.requests + self.tokens // self.tile)

    @property
    def items(self) -> int:
        """Items of a batch."""
        return self.blocks + self.partials

    @property
    def merges(self) -> int:
        """Blocks of a batch that are split, each into two chunks or more."""
        return min(self.blocks, self.partials // 2)

    @property
    def words(self) -> int:
        """Words of 32 bits in the mask of a node."""
        return -(-self.nodes // 32)

    @property
    def numbers(self) -> int:
        """Numbers of the row."""
        return sum(self.parts()["pool"])

    def parts(self) -> dict[str, tuple[int, int]]:
        """Where in the row each part begins, and its length."""
        lengths = {
            "counts": 2,
            "items": 2 * self.items,
            "blocks": len(FIELDS) * self.blocks,
            "merges": self.merges,
            "positions": self.tokens,
            "slots": self.tokens,
            "pool": self.requests * self.pages + self.tokens * self.words,
        }
        parts, at = {}, 0
        for name, length in lengths.items():
            parts[name] = at, length
            at += -(-length // _ALIGNED) * _ALIGNED
        return parts


@dataclass(frozen=True, slots=True)
class Tables:
    """The row on the device, and its parts; all int32.

    Attributes:
        maxima: what they have room for.
        row: all of them.
        counts: [2], number of items and of split blocks.
        items: [items, 2], block and chunk of each, `WHOLE` for all chunks.
        blocks: [blocks, fields], see `FIELDS`.
        merges: [merges], the split blocks.
        positions: [tokens].
        slots: [tokens], `NOWHERE` for padding.
        pool: pages of all requests, one after another, then masks of all nodes: `Maxima.words` words each.
    """

    maxima: Maxima
    row: Tensor
    counts: Tensor
    items: Tensor
    blocks: Tensor
    merges: Tensor
    positions: Tensor
    slots: Tensor
    pool: Tensor

    @staticmethod
    def on(device: torch.device, maxima: Maxima) -> Tables:
        """Tables of an empty batch."""
        row = torch.zeros(maxima.numbers, dtype=torch.int32, device=device)
        views = {name: row[at : at + length] for name, (at, length) in maxima.parts().items()}
        views["items"] = views["items"].view(-1, 2)
        views["blocks"] = views["blocks"].view(-1, len(FIELDS))
        views["slots"].fill_(NOWHERE)
        return Tables(maxima=maxima, row=row, **views)

    def put(self, numbers: NDArray[np.int32]) -> None:
        """Describe another batch: what `tables_of` gave. Kernels launched before still see the old one."""
        self.row[: len(numbers)].copy_(torch.from_numpy(numbers), non_blocking=True)


def tables_of(pieces: Sequence[Piece], batch: Batch, maxima: Maxima) -> NDArray[np.int32]:
    """The row of a batch, as far as it is in use.

    Args:
        pieces: what was packed.
        batch: what `pack` made of it, with the same page size.
        maxima: what there is room for.

    Raises:
        ValueError: the batch has more of something than there is room for.
    """
    segments = batch.segments
    first = _array([s.first for s in segments])
    count = _array([s.count for s in segments])
    context = _array([s.context for s in segments])
    pending = _array([len(piece.pending) for piece in pieces])
    pages = _array([len(piece.pages) for piece in pieces])
    branched = np.array([s.ancestors is not None for s in segments])
    nodes = np.where(branched, count - pending, 0)
    for name, most in (
        ("tokens", count.sum()),
        ("requests", len(segments)),
        ("pages", pages.max()),
        ("nodes", nodes.max()),
    ):
        if most > getattr(maxima, name):
            raise ValueError(f"{most} {name}, but there is room for {getattr(maxima, name)}")

    paged = int(pages.sum())
    bits = paged + _before(nodes) * maxima.words
    of, offset = _cut(count, maxima.tile)
    blocks = np.zeros((len(of), len(FIELDS)), dtype=np.int32)
    blocks[:, 0] = first[of] + offset
    blocks[:, 1] = np.minimum(maxima.tile, count[of] - offset)
    blocks[:, 2] = _before(pages)[of]
    blocks[:, 3] = context[of] + offset
    blocks[:, 4] = np.where(branched, context + pending, CHAIN)[of]
    blocks[:, 5] = bits[of] + (offset - pending[of]) * maxima.words
    items, split = _items(-(-(blocks[:, 3] + blocks[:, 1]) // maxima.chunk), maxima)
    chunks = -(-(blocks[split, 3] + blocks[split, 1]) // maxima.chunk)
    blocks[split, 6] = _before(chunks)

    parts = maxima.parts()
    pool = parts["pool"][0]
    row = np.zeros(pool + paged + int(nodes.sum()) * maxima.words, dtype=np.int32)
    slots = parts["slots"][0]
    row[slots : slots + maxima.tokens] = NOWHERE
    for name, numbers in (
        ("counts", np.array([len(items), len(split)])),
        ("items", items.ravel()),
        ("blocks", blocks.ravel()),
        ("merges", split),
        ("positions", np.concatenate([s.positions for s in segments])),
        ("slots", np.concatenate([s.slots[s.context :] for s in segments])),
        ("pool", np.fromiter(chain.from_iterable(piece.pages for piece in pieces), np.int32, paged)),
    ):
        at = parts[name][0]
        row[at : at + len(numbers)] = numbers
    for at, own, segment in zip((pool + bits).tolist(), nodes.tolist(), segments, strict=True):
        if segment.ancestors is not None:
            masks = _words(segment.ancestors[-own:, -own:], maxima.words)
            row[at : at + masks.size] = masks.ravel()
    return row


def _items(chunks: NDArray[np.int64], maxima: Maxima) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Items [n, 2] and which blocks are split, of blocks with so many chunks.

    Where there are as many blocks as there is room for chunks, they keep a device busy without being split.
    Whole texts come first, the longest of them first, since items are begun in this order.
    """
    order = np.argsort(-chunks, kind="stable")
    taken = np.zeros(len(order), dtype=np.bool_)
    if len(order) < maxima.partials:
        ordered = chunks[order]
        able = (ordered > 1) & (ordered <= maxima.partials)
        taken = able & (np.cumsum(ordered * able) <= maxima.partials)
    split, whole = order[taken], order[~taken]
    of, chunk = _cut(chunks[split], 1)
    items = np.concatenate(
        [
            np.stack([whole, np.full_like(whole, WHOLE)], 1),
            np.stack([split[of], chunk], 1),
        ]
    )
    return items, split


def _cut(lengths: NDArray[np.int64], size: int) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
    """Pieces of at most `size` of things of these lengths: whose each one is, and where in it it begins."""
    pieces = -(-lengths // size)
    of = np.repeat(np.arange(len(lengths)), pieces)
    return of, (np.arange(len(of)) - _before(pieces)[of]) * size


def _before(lengths: NDArray[np.int64]) -> NDArray[np.int64]:
    """How much comes before each."""
    before: NDArray[np.int64] = np.cumsum(lengths) - lengths
    return before


def _words(seen: NDArray[np.bool_], words: int) -> NDArray[np.int32]:
    """Rows of bits as int32 [rows, words]: bit n % 32 of word n // 32 is column n."""
    packed = np.zeros((len(seen), 4 * words), dtype=np.uint8)
    octets = np.packbits(seen, axis=1, bitorder="little")
    packed[:, : octets.shape[1]] = octets
    return packed.view("<i4").astype(np.int32, copy=False)


def _array(numbers: list[int]) -> NDArray[np.int64]:
    return np.array(numbers, dtype=np.int64)
