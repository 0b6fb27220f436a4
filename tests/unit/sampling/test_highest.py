"""The highest of a row is the first one that argmax finds."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.sampling.highest import highest


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


@pytest.mark.parametrize("size", [700, 1024])
def test_forbidden_tokens_are_not_the_highest(size: int) -> None:
    logits = torch.full((2, size), float("-inf"))
    logits[0, size - 1] = logits[1, 3] = -1e30
    assert highest(logits).tolist() == [size - 1, 3]
