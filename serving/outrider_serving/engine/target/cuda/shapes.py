"""Which sizes of passes are captured in graphs, which one a batch takes, and how the kernels cut it up.

A pass with few tokens takes a GPU less time than Python takes to launch it, so it is replayed from a graph. A
graph has one size: a batch is padded to the next one. Beyond the largest a pass keeps the device busy long
enough to be launched as it comes.

Bits. One tile serves every size, so attention gives a token the same bits in a decoding step, in a
verification step and in a piece of a prompt, alone or with neighbours (`target.triton.attention`). A smaller
one for decoding would save arithmetic on unused rows, which is done while keys and values arrive; what that
costs, `make gpu-check` measures. The matrix products are libraries', which may choose another order of sums
for another number of tokens: logits may differ in the last bits between sizes, and so between a decoding and
a verification step. docs/engine.md tells what depends on that.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.target.triton.tables import Maxima

SIZES = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
"""Tokens of a captured pass, padding included. Padding is less than half of it."""

_TILE = 16
"""A token and a proposal of usual depth are one block, so that what they follow is read once."""

_SUMS = 1 << 14
"""Most numbers that a program sums up at once: with more, they do not stay in registers."""

_WIDEST = 256
"""The largest head: keys and values of more do not fit into shared memory several times."""

_CHUNK = 256

_SPLITS = 4
"""Chunks of texts for each multiprocessor that have programs of their own."""


class LayoutError(Exception):
    """The kernels do not take a model's heads; says why."""


@dataclass(frozen=True, slots=True)
class Room:
    """What there must be room for in any pass of an engine.

    Attributes:
        tokens: new tokens.
        requests: of how many requests.
        pages: pages of one request.
        page_size: tokens of a page.
        tile, partials: see `Maxima`.
    """

    tokens: int
    requests: int
    pages: int
    page_size: int
    tile: int
    partials: int

    @property
    def sizes(self) -> tuple[int, ...]:
        """The sizes that are captured, ascending."""
        return tuple(size for size in SIZES if size <= self.tokens)

    def maxima(self, tokens: int) -> Maxima:
        """Those of passes of up to so many tokens. Masks are as wide in all, so kernels compile once."""
        return Maxima(
            tokens=tokens,
            requests=min(tokens, self.requests),
            pages=self.pages,
            page_size=self.page_size,
            nodes=self.tokens,
            tile=self.tile,
            partials=self.partials,
            chunk=_CHUNK,
        )


def room_of(
    limits: EngineLimits,
    context_length: int,
    shapes: Iterable[KVShape],
    query_heads: int,
    multiprocessors: int,
) -> Room:
    """The room that an engine needs.

    Args:
        limits: of the engine.
        context_length: most tokens of a text; a proposal may go beyond.
        shapes: what each layer keeps of a token.
        query_heads: of every layer.
        multiprocessors: of the device.

    Raises:
        LayoutError: the kernels do not take these heads.
    """
    longest = context_length + limits.step_tokens
    return Room(
        tokens=limits.step_tokens,
        requests=limits.max_running,
        pages=min(limits.pages, -(-longest // limits.page_size)),
        page_size=limits.page_size,
        tile=min(_tile(shape, query_heads) for shape in shapes),
        partials=max(_SPLITS * multiprocessors, -(-longest // _CHUNK)),
    )


def size_of(tokens: int, sizes: Sequence[int]) -> int | None:
    """Which of the sizes, which ascend, a batch of so many tokens is padded to; None beyond the last."""
    place = bisect_left(sizes, tokens)
    return sizes[place] if place < len(sizes) else None


def _tile(shape: KVShape, query_heads: int) -> int:
    """New tokens of a block: fewer where a head of keys has many query heads, which stand side by side."""
    group, left = divmod(query_heads, shape.heads)
    widest = max(shape.key_size, shape.value_size)
    if left or widest > _WIDEST:
        raise LayoutError(f"{query_heads} query heads over {shape.heads} of {widest} have no kernel")
    rows = _SUMS // _power(widest)
    if group > rows:
        raise LayoutError(f"{group} query heads share one of {widest}, more than {rows}")
    return min(_TILE, rows // _power(group))


def _power(number: int) -> int:
    """The next power of two."""
    return 1 << (number - 1).bit_length()
