"""Which captured pass a batch takes, and that everything that the scheduler may plan fits into it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.cuda.shapes import SIZES, LayoutError, Room, room_of, size_of
from outrider_serving.engine.target.kv import KVShape

HEADS = KVShape(8, 128, 128)


def limits(**changes: Any) -> EngineLimits:
    usual = {"pages": 9_000, "page_size": 16, "max_running": 32, "max_waiting": 9, "step_tokens": 2048}
    return EngineLimits(**{**usual, **changes})


def room(shape: KVShape = HEADS, query_heads: int = 32, context: int = 8192, **changes: Any) -> Room:
    return room_of(limits(**changes), context, [shape], query_heads, multiprocessors=132)


@given(step_tokens=st.integers(1, 4096))
def test_every_batch_within_the_largest_size_has_one(step_tokens: int) -> None:
    sizes = room(max_running=1, step_tokens=step_tokens).sizes
    assert 1 <= sizes[-1] <= step_tokens
    taken = [size_of(tokens, sizes) for tokens in range(1, sizes[-1] + 1)]
    assert taken == sorted(taken)  # more tokens never take a smaller size
    for tokens, size in enumerate(taken, 1):
        assert size is not None
        assert tokens <= size < 2 * tokens
        assert size_of(size, sizes) == size
    assert size_of(sizes[-1] + 1, sizes) is None


def test_of_the_largest_batches_few_are_beyond_the_sizes() -> None:
    """All requests of a step with proposals of the default depth are one captured pass."""
    assert size_of(32 * 9, SIZES) == 384


@given(
    step_tokens=st.integers(1, 4096),
    page_size=st.sampled_from([1, 4, 16, 256]),
    pages=st.integers(1, 10_000),
    context=st.integers(2, 131_072),
)
def test_whatever_is_planned_fits(step_tokens: int, page_size: int, pages: int, context: int) -> None:
    running = min(32, step_tokens)
    needs = room(
        context=context, step_tokens=step_tokens, page_size=page_size, pages=pages, max_running=running
    )
    longest = min(pages, -(-(context + step_tokens) // page_size))  # a text of full length and its proposal
    for size in (*needs.sizes, needs.tokens):
        maxima = needs.maxima(size)
        assert maxima.tokens == size
        assert maxima.requests == min(size, running)
        assert maxima.pages >= longest
        assert maxima.nodes >= size - 1
        assert maxima.partials * maxima.chunk >= context
    assert len({needs.maxima(size).words for size in needs.sizes}) == 1  # else kernels compile for each


@pytest.mark.parametrize(
    ("shape", "query_heads", "tile"),
    [
        (KVShape(8, 128, 128), 32, 16),  # Llama 3
        (KVShape(8, 64, 64), 32, 16),
        (KVShape(1, 256, 256), 4, 16),  # Gemma 3
        (KVShape(16, 128, 128), 16, 16),
        (KVShape(2, 128, 128), 28, 8),  # 14 query heads to one of keys count as 16
        (KVShape(1, 128, 128), 32, 4),
        (KVShape(1, 128, 64), 128, 1),
        (KVShape(8, 96, 192), 24, 16),
    ],
)
def test_programs_sum_up_what_registers_hold(shape: KVShape, query_heads: int, tile: int) -> None:
    assert room(shape, query_heads).tile == tile


@pytest.mark.parametrize(
    ("shape", "query_heads", "why"),
    [
        (KVShape(8, 128, 128), 30, "30 query heads over 8"),
        (KVShape(8, 576, 512), 8, "of 576 have no kernel"),
        (KVShape(1, 256, 256), 65, "65 query heads share one of 256"),
    ],
)
def test_heads_that_the_kernels_do_not_take_are_refused(shape: KVShape, query_heads: int, why: str) -> None:
    with pytest.raises(LayoutError, match=why):
        room(shape, query_heads)


def test_the_layer_with_the_widest_groups_decides() -> None:
    shapes = [HEADS, KVShape(1, 128, 128)]
    assert room_of(limits(), 8192, shapes, 32, multiprocessors=1).tile == 4
