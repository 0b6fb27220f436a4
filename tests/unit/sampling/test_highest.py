"""The highest of a row is the first one that argmax finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.sampling.highest import highest, with_finiteness


@given(
    seed=st.integers(0, 2**32),
    rows=st.integers(1, 9),
    size=st.sampled_from([1, 5, 511, 512, 513, 1024, 1500, 4096, 5000]),
    dtype=st.sampled_from([torch.float64, torch.float32, torch.bfloat16]),
    levels=st.sampled_from([2, 7, 1000]),
)
def test_it_is_what_argmax_says(seed: int, rows: int, size: int, dtype: torch.dtype, levels: int) -> None:
    """With few levels most rows have several highest values."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randint(0, levels, (rows, size), generator=generator).to(dtype)
    assert highest(logits).tolist() == logits.double().argmax(-1).tolist()


@pytest.mark.parametrize("at", [(3,), (690,), (600, 690), (3, 690)])
@pytest.mark.parametrize("other", [0.0, float("inf")])
def test_what_is_not_a_number_is_the_highest(at: tuple[int, ...], other: float) -> None:
    logits = torch.full((1, 700), other)
    logits[0, list(at)] = float("nan")
    assert with_finiteness(logits, highest(logits)) == [(at[0], False)]


def test_whether_the_highest_is_finite_is_told_by_row() -> None:
    logits = torch.zeros(3, 700)
    logits[0, 650], logits[1, 650] = 1.0, float("inf")
    logits[2] = float("-inf")
    assert with_finiteness(logits, highest(logits)) == [(650, True), (650, False), (0, False)]


@pytest.mark.parametrize("size", [700, 1024])
def test_forbidden_tokens_are_not_the_highest(size: int) -> None:
    logits = torch.full((2, size), float("-inf"))
    logits[0, size - 1] = logits[1, 3] = -1e30
    assert highest(logits).tolist() == [size - 1, 3]
