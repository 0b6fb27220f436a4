"""A target pass over pages gives what transformers gives for each path alone."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider_serving.engine.target.batch import Batch, Piece, pack, slots_of
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.paged import visible
from outrider_serving.engine.target.runner import ModelRunner
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.proposal import ROOT, Proposal
from serving.engine.support import logits_of, own_attention

CPU = torch.device("cpu")
CLOSE = 1e-5
"""Norms, RoPE and eager softmax run in float32 inside transformers."""


@pytest.fixture(params=["modules", "compiled"])
def compiled(request: pytest.FixtureRequest) -> bool:
    """Whether compiled code runs the target, or transformers' modules over our attention."""
    return bool(request.param == "compiled")


def tree(rng: random.Random, nodes: int) -> Proposal:
    """A random tree of random tokens."""
    parents = [rng.randrange(ROOT, node) if node else ROOT for node in range(nodes)]
    return Proposal(tuple(rng.randrange(320) for _ in parents), tuple(parents))


@dataclass
class Paged:
    """A target with pages of four tokens, handed out at random or in a row."""

    loaded: LoadedModel
    rng: random.Random
    scattered: bool
    compiled: bool
    page_size: int = 4
    pages: int = 120

    def __post_init__(self) -> None:
        model = self.loaded.model
        self.store = KVStore(self.loaded.kv_shapes, self.pages * self.page_size, model.dtype, CPU)
        compiled = self.loaded.compiled
        assert compiled is not None  # every tiny architecture has a compiled form
        self.runner = ModelRunner(model, self.store, compiled if self.compiled else None)
        self.free = list(range(self.pages))
        if self.scattered:
            self.rng.shuffle(self.free)

    def take(self, tokens: int) -> list[int]:
        count = -(-tokens // self.page_size)
        taken, self.free = self.free[:count], self.free[count:]
        return taken

    def run(self, *pieces: Piece, hidden: Sequence[int] = ()) -> tuple[Tensor, Batch]:
        batch = pack(pieces, self.page_size, CPU)
        return self.runner.run(batch, hidden).logits, batch


@given(seed=st.integers(0, 2**32), scattered=st.booleans())
def test_every_node_sees_its_own_path(tiny: LoadedModel, compiled: bool, seed: int, scattered: bool) -> None:
    """Several requests in one pass: contexts read in chunks before, then the rest and a tree for each."""
    rng = random.Random(seed)
    paged = Paged(tiny, rng, scattered, compiled)
    pieces, wanted = [], []
    for _ in range(rng.randint(1, 3)):
        text = [rng.randrange(320) for _ in range(rng.randint(2, 40))]
        proposal = tree(rng, rng.randint(0, 9))
        pages = paged.take(len(text) + len(proposal))
        context = rng.randrange(len(text))
        for start, end in _chunks(rng, context):
            paged.run(Piece(text[start:end], Proposal(), start, pages, logits=0))
        pending = text[context:]
        asked = rng.randint(1, len(pending))
        pieces.append(Piece(pending, proposal, context, pages, asked))
        whole = logits_of(tiny, text)
        wanted += list(whole[len(text) - asked :])
        for node in range(len(proposal)):
            path = [proposal.tokens[on] for on in proposal.path(node)]
            wanted.append(logits_of(tiny, [*text, *path])[-1])
    logits, batch = paged.run(*pieces)
    assert len(batch.logits) == len(wanted)
    assert float((logits - torch.stack(wanted)).abs().max()) < CLOSE


def _chunks(rng: random.Random, end: int) -> list[tuple[int, int]]:
    cuts = sorted({0, end, *(rng.randrange(end + 1) for _ in range(2))})
    return list(pairwise(cuts))


@given(seed=st.integers(0, 2**32))
def test_an_accepted_path_can_be_moved_to_where_the_text_has_it(
    tiny: LoadedModel, compiled: bool, seed: int
) -> None:
    rng = random.Random(seed)
    paged = Paged(tiny, rng, scattered=True, compiled=compiled)
    text = [rng.randrange(320) for _ in range(rng.randint(1, 20))]
    proposal = tree(rng, 12)
    pages = paged.take(len(text) + 40)
    paged.run(Piece(text, proposal, 0, pages, logits=1))
    path = proposal.path(rng.randrange(12))
    slots = slots_of(pages, paged.page_size, 0, len(text) + 12)
    sources = torch.from_numpy(slots[[len(text) + node for node in path]])
    targets = torch.from_numpy(slots[len(text) : len(text) + len(path)])
    paged.runner.move(sources, targets)
    kept = [*text, *(proposal.tokens[node] for node in path)]
    logits, _ = paged.run(Piece([7, 8], Proposal(), len(kept), pages, logits=2))
    assert float((logits - logits_of(tiny, [*kept, 7, 8])[-2:]).abs().max()) < CLOSE


def test_long_chunks(tiny: LoadedModel, compiled: bool) -> None:
    rng = random.Random(5)
    for scattered in (False, True):
        paged = Paged(tiny, rng, scattered, compiled)
        text = [rng.randrange(320) for _ in range(300)]
        pages = paged.take(300)
        paged.run(Piece(text[:90], Proposal(), 0, pages, logits=0))
        logits, _ = paged.run(Piece(text[90:], Proposal(), 90, pages, logits=3))
        assert float((logits - logits_of(tiny, text)[-3:]).abs().max()) < CLOSE


def test_hidden_states_are_those_of_transformers(tiny: LoadedModel, compiled: bool) -> None:
    paged = Paged(tiny, random.Random(1), scattered=True, compiled=compiled)
    text = list(range(3, 30))
    batch = pack([Piece(text, Proposal(), 0, paged.take(27), 1)], paged.page_size, CPU)
    hidden = paged.runner.run(batch, [0, 1, 3]).hidden
    with own_attention(tiny), torch.inference_mode():
        wanted = tiny.model(torch.tensor([text]), use_cache=False, output_hidden_states=True).hidden_states
    assert sorted(hidden) == [0, 1, 3]
    for layer, states in hidden.items():
        assert float((states - wanted[layer][0]).abs().max()) < CLOSE


def test_nodes_are_as_far_away_as_their_positions_say() -> None:
    """Two siblings and the child of the first: three slots, two positions, and a window of two."""
    proposal = Proposal((1, 2, 3), (ROOT, ROOT, 0))
    (segment,) = pack([Piece([9], proposal, 3, [0, 1], 1)], 4, CPU).segments
    assert segment.positions.tolist() == [3, 4, 4, 5]
    assert segment.slots.tolist() == [0, 1, 2, 3, 4, 5, 6]
    everything = visible(segment, 0, None).astype(int).tolist()
    assert everything == [
        [1, 1, 1, 1, 0, 0, 0],
        [1, 1, 1, 1, 1, 0, 0],
        [1, 1, 1, 1, 0, 1, 0],
        [1, 1, 1, 1, 1, 0, 1],
    ]
    near = visible(segment, 2, 2).astype(int).tolist()
    assert near == [[1, 1, 0, 0, 0], [0, 1, 1, 0, 0], [0, 1, 0, 1, 0], [0, 0, 1, 0, 1]]


@pytest.mark.parametrize("pages", [[0, 1, 2], [5, 2, 9]])
def test_slots_follow_the_page_table(pages: list[int]) -> None:
    slots = slots_of(pages, 4, 2, 11)
    assert slots.dtype == np.int64
    assert slots.tolist() == [pages[place // 4] * 4 + place % 4 for place in range(2, 11)]


def test_moving_reads_before_it_writes() -> None:
    store = KVStore({0: KVShape(1, 1, 1)}, 6, torch.float64, CPU)
    ramp = torch.arange(6, dtype=torch.float64).view(6, 1, 1)
    store.write(0, torch.arange(6), ramp, -ramp)
    store.move(torch.tensor([3, 4, 5]), torch.tensor([2, 3, 4]))
    keys, values = store.layer(0)
    assert keys.flatten().tolist() == [0, 1, 3, 4, 5, 5]
    assert values.flatten().tolist() == [0, -1, -3, -4, -5, -5]
