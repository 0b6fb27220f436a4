"""Attention over our own pages equals attention written out, for every kind of head, window and cap."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from outrider_serving.engine.target.attention import UnsupportedAttentionError, attend
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.paged import TorchPass
from outrider_serving.sampling.proposal import Proposal


class Layer(nn.Module):
    layer_idx = 0


def naive(
    query: torch.Tensor, keys: torch.Tensor, values: torch.Tensor, window: int | None, cap: float | None
) -> torch.Tensor:
    """[heads, tokens, size] each, all tokens at once, one query at a time."""
    heads, tokens, size = query.shape
    out = torch.zeros(tokens, heads, values.shape[-1], dtype=query.dtype)
    for head in range(heads):
        shared = head // (heads // keys.shape[0])
        for at in range(tokens):
            first = 0 if window is None else max(0, at - window + 1)
            scores = keys[shared, first : at + 1] @ query[head, at] / math.sqrt(size)
            scores = scores if cap is None else cap * torch.tanh(scores / cap)
            out[at, head] = torch.softmax(scores, 0) @ values[shared, first : at + 1]
    return out


@given(
    seed=st.integers(0, 10**6),
    steps=st.lists(st.tuples(st.integers(1, 9), st.integers(0, 8)), min_size=1, max_size=8),
    groups=st.sampled_from([(1, 1), (2, 2), (2, 1), (6, 2)]),
    window=st.sampled_from([None, 1, 3, 8]),
    cap=st.sampled_from([None, 2.0]),
)
def test_any_steps_with_tokens_taken_back(
    seed: int,
    steps: list[tuple[int, int]],
    groups: tuple[int, int],
    window: int | None,
    cap: float | None,
) -> None:
    """Each step runs some tokens and keeps some of them, at least one."""
    generator = torch.Generator().manual_seed(seed)
    cpu = torch.device("cpu")
    store, pages, length = KVStore({0: KVShape(groups[1], 4, 6)}, 80, torch.float64, cpu), list(range(80)), 0
    text = [
        torch.zeros(heads, 0, size, dtype=torch.float64)
        for heads, size in zip((*groups, groups[1]), (4, 4, 6), strict=True)
    ]
    for new, dropped in steps:
        q, k, v = (
            torch.randn(part.shape[0], new, part.shape[2], dtype=torch.float64, generator=generator)
            for part in text
        )
        batch = pack([Piece([0] * new, Proposal(), length, pages, 0)], 1, cpu)
        out, _ = attend(
            Layer(),
            q[None],
            k[None],
            v[None],
            None,
            target_pass=TorchPass(store, batch),
            sliding_window=window,
            softcap=cap,
        )
        whole = [torch.cat([part, more], 1) for part, more in zip(text, (q, k, v), strict=True)]
        expected = naive(whole[0], whole[1], whole[2], window, cap)[length:]
        torch.testing.assert_close(out[0], expected, rtol=1e-10, atol=1e-12)
        kept = max(1, new - dropped)
        length += kept
        text = [part[:, :length] for part in whole]


@pytest.mark.parametrize("how", [{"s_aux": torch.ones(1)}, {"is_causal": False}, {"dropout": 0.1}])
def test_what_it_does_not_compute_is_refused(how: dict[str, object]) -> None:
    x = torch.ones(1, 1, 1, 4)
    with pytest.raises(UnsupportedAttentionError, match="Layer needs"):
        attend(Layer(), x, x, x, None, target_pass=None, **how)  # type: ignore[arg-type]
