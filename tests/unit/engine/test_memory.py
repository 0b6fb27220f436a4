"""How memory is divided: what weights, proposers and captured passes leave is for pages."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from transformers import LlamaConfig

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.cuda import runner
from outrider_serving.engine.target.cuda.graphs import Inputs
from outrider_serving.engine.target.cuda.reserve import GRAPH_BYTES, graph_bytes, input_bytes
from outrider_serving.engine.target.cuda.shapes import SIZES, Room, room_of
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.target.memory import CapacityError, divide

CPU = torch.device("cpu")
GIB = 1 << 30
LLAMA_8B = [KVShape(8, 128, 128)] * 32
PAGE_BYTES = 16 * 32 * 8 * 256 * 2


def pages(total: int = 141 * GIB, graphs: int = 0, proposers: int = 0, **changes: Any) -> int:
    usual = {
        "shapes": LLAMA_8B,
        "dtype": torch.bfloat16,
        "page_size": 16,
        "context_length": 131_072,
        "max_running": 32,
    }
    return divide(total, 0.9, 15 * GIB, proposers, graphs, **{**usual, **changes})


@given(graphs=st.integers(0, 80 * GIB), proposers=st.integers(0, 10 * GIB))
def test_pages_leave_room_for_graphs_and_proposers(graphs: int, proposers: int) -> None:
    left = int(141 * GIB * 0.9) - 15 * GIB - graphs - proposers
    assert 0 <= left - pages(graphs=graphs, proposers=proposers) * PAGE_BYTES < PAGE_BYTES


def test_there_are_no_more_pages_than_can_be_used() -> None:
    assert pages(context_length=1000, max_running=2) == 2 * 2 * 63
    assert pages(context_length=1000, max_running=2, graphs=50 * GIB) == 2 * 2 * 63


def test_a_refusal_names_what_graphs_take() -> None:
    with pytest.raises(CapacityError, match=r"a reserve of 1 GiB for proposers and one of 99 GiB for CUDA"):
        pages(graphs=99 * GIB, proposers=GIB)
    with pytest.raises(CapacityError, match="for proposers: give more memory"):
        pages(total=16 * GIB)


LIMITS = EngineLimits(pages=20_000, page_size=16, max_running=32, max_waiting=9, step_tokens=2048)


def room(multiprocessors: int = 132) -> Room:
    return room_of(LIMITS, 8192, LLAMA_8B, 32, multiprocessors)


@given(
    tokens=st.integers(1, 600),
    requests=st.integers(1, 40),
    length=st.integers(1, 500),
    tile=st.sampled_from([1, 4, 16]),
)
def test_inputs_take_what_is_said(tokens: int, requests: int, length: int, tile: int) -> None:
    maxima = Room(max(tokens, 16), requests, length, 16, tile, partials=7).maxima(tokens)
    inputs = Inputs.on(CPU, maxima)
    assert inputs.numbers.nbytes + inputs.tables.row.nbytes == input_bytes(maxima)


def reserve(of: Room, dtype: torch.dtype = torch.bfloat16, vocab_size: int = 128_256) -> int:
    return graph_bytes(of, LLAMA_8B, query_heads=32, hidden_size=4096, vocab_size=vocab_size, dtype=dtype)


def test_what_graphs_of_llama_8b_take() -> None:
    of = room()
    inputs = sum(input_bytes(of.maxima(tokens)) for tokens in (*SIZES, 2048))
    logits = 512 * 128_256 * 2
    states = 33 * 512 * 4096 * 2
    partials = 4 * 132 * 16 * 32 * (128 + 2) * 4
    assert reserve(of) == inputs + 2 * logits + states + partials + 15 * GRAPH_BYTES
    assert 0.5 * GIB < reserve(of) < 1.5 * GIB


def test_what_makes_graphs_take_more() -> None:
    of = room()
    assert reserve(of, torch.float32) - reserve(of) == 2 * 512 * 128_256 * 2 + 33 * 512 * 4096 * 2
    assert reserve(of, vocab_size=256_512) - reserve(of) == 2 * 512 * 128_256 * 2
    assert reserve(room(multiprocessors=264)) > reserve(of)


def test_only_a_model_with_graphs_needs_memory_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    config = LlamaConfig(hidden_size=4096, num_attention_heads=32, vocab_size=128_256)
    monkeypatch.setattr(runner, "_multiprocessors", lambda _: 132)

    def of(device: str = "cuda", dtype: torch.dtype = torch.bfloat16, shape: KVShape = LLAMA_8B[0]) -> int:
        model: Any = SimpleNamespace(device=torch.device(device), dtype=dtype, config=config)
        return runner.graph_bytes_of(model, dict.fromkeys(range(32), shape), LIMITS, 8192)

    assert of() == reserve(room())
    assert of(device="cpu") == 0
    assert of(dtype=torch.float64) == 0
    assert of(shape=KVShape(8, 576, 512)) == 0
