"""The Triton kernels against torch's, and bits that neighbours, cuts and splits must not change."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import torch
from tools.gpu_check.finding import Finding, Findings
from torch import Tensor

from outrider_serving.engine.target.attention import Scoring
from outrider_serving.engine.target.batch import Batch, Piece, pack
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.paged import TorchPass
from outrider_serving.engine.target.triton.attention import ERROR, TritonPass
from outrider_serving.engine.target.triton.tables import Maxima, Tables, tables_of
from outrider_serving.sampling.proposal import ROOT, Proposal

_PAGE = 16
_PAGES = 2000
_ROOM = Maxima(tokens=1024, requests=16, pages=600, page_size=_PAGE, nodes=64, partials=512)


@dataclass(frozen=True, slots=True)
class Heads:
    """What attention looks like in a layer; see `KVShape` and `Scoring`."""

    name: str
    heads: int
    group: int
    size: int
    window: int | None = None
    softcap: float | None = None
    dtype: torch.dtype = torch.bfloat16


HEADS = (
    Heads("8 x 4 of 128", 8, 4, 128),
    Heads("8 x 4 of 128, float16", 8, 4, 128, dtype=torch.float16),
    Heads("8 x 4 of 128, float32", 8, 4, 128, dtype=torch.float32),
    Heads("8 x 4 of 64", 8, 4, 64),
    Heads("8 x 8 of 128", 8, 8, 128),
    Heads("32 x 1 of 96", 32, 1, 96),
    Heads("1 x 4 of 256, window 512", 1, 4, 256, window=512),
    Heads("4 x 2 of 256, window 300, soft cap 50", 4, 2, 256, window=300, softcap=50.0),
)

BATCHES: dict[str, Sequence[tuple[int, int, int]]] = {
    "decoding": [(context, 1, 0) for context in (0, 1, 37, 255, 256, 300, 1999, 8000)],
    "trees": [(777, 1, 24), (30, 1, 60), (4000, 2, 8)],
    "pieces of prompts": [(0, 300, 0), (130, 77, 0), (3000, 200, 0)],
    "all of them": [(4000, 1, 0), (777, 1, 24), (130, 77, 0), (5, 1, 0), (6000, 1, 8), (0, 300, 0)],
}
"""Context, pending tokens and nodes of each request."""


@dataclass(frozen=True, slots=True)
class Layer:
    """New tokens of some requests, and a store that is garbage but for their contexts."""

    heads: Heads
    pieces: Sequence[Piece]
    batch: Batch
    store: KVStore
    query: Tensor
    key: Tensor
    value: Tensor

    @property
    def scoring(self) -> Scoring:
        """Sharper than usual, so that few keys decide."""
        return Scoring(2 * self.heads.size**-0.5, self.heads.window, self.heads.softcap)


def find(device: torch.device) -> Findings:
    """Every layout over every batch, then bits."""
    for heads in HEADS:
        for name, requests in BATCHES.items():
            yield _against_torch(heads, name, layer_of(heads, requests, device))
    for heads in (HEADS[0], HEADS[2], HEADS[6]):
        yield from _bits(heads, device)


def layer_of(heads: Heads, requests: Sequence[tuple[int, int, int]], device: torch.device) -> Layer:
    """Numbers of a request follow from its place in the list; its pages lie anywhere."""
    rng = random.Random(1)
    free = rng.sample(range(_PAGES), _PAGES)
    pieces = []
    for place, (context, pending, nodes) in enumerate(requests):
        count = -(-(context + pending + nodes) // _PAGE)
        own, free = free[:count], free[count:]
        parents = random.Random(place)
        tree = tuple(
            ROOT if not node else parents.randrange(max(ROOT, node - 6), node) for node in range(nodes)
        )
        pieces.append(Piece(range(pending), Proposal(tuple(range(nodes)), tree), context, own, 1))
    batch = pack(pieces, _PAGE, device)
    shape = KVShape(heads.heads, heads.size, heads.size)
    store = KVStore({0: shape}, _PAGES * _PAGE, heads.dtype, device)
    for tensor in store.layer(0):
        tensor.fill_(torch.nan)
    new = []
    for place, segment in enumerate(batch.segments):
        numbers = torch.Generator(device).manual_seed(place)

        def drawn(*shape: int, numbers: torch.Generator = numbers) -> Tensor:
            return torch.randn(shape, generator=numbers, device=device).to(heads.dtype)

        slots = torch.from_numpy(segment.slots[: segment.context]).to(device)
        for tensor in store.layer(0):
            tensor[slots] = drawn(segment.context, heads.heads, heads.size)
        counts = (heads.heads * heads.group, heads.heads, heads.heads)
        new.append([drawn(count, segment.count, heads.size) for count in counts])
    query, key, value = (torch.cat(parts, 1) for parts in zip(*new, strict=True))
    return Layer(heads, pieces, batch, store, query, key, value)


def run(layer: Layer, maxima: Maxima = _ROOM) -> Tensor:
    """What the kernels make of it."""
    tables = Tables.on(layer.query.device, maxima)
    tables.put(tables_of(layer.pieces, layer.batch, maxima))
    return TritonPass(layer.store, tables).attend(0, layer.query, layer.key, layer.value, layer.scoring)


def _against_torch(heads: Heads, name: str, layer: Layer) -> Finding:
    """In float64 torch rounds nothing that counts, so the error is the kernels' own."""
    double = KVStore(
        {0: KVShape(heads.heads, heads.size, heads.size)}, _PAGES * _PAGE, torch.float64, layer.query.device
    )
    for exact, tensor in zip(double.layer(0), layer.store.layer(0), strict=True):
        exact.copy_(tensor)
    query, key, value = (one.double() for one in (layer.query, layer.key, layer.value))
    wanted = TorchPass(double, layer.batch).attend(0, query, key, value, layer.scoring)
    out = run(layer)
    error = float((out.double() - wanted).abs().max() / wanted.abs().max())
    same_store = all(
        torch.equal(exact.isnan(), tensor.isnan())
        and torch.equal(exact.nan_to_num(), tensor.double().nan_to_num())
        for exact, tensor in zip(double.layer(0), layer.store.layer(0), strict=True)
    )
    limit = ERROR[heads.dtype]
    return Finding(
        f"{heads.name}: {name}",
        f"off by {error:.1e} of at most {limit:.0e}" + ("" if same_store else "; the store differs"),
        right=error <= limit and same_store,
        numbers={"error": error, "limit": limit, "same_store": same_store},
    )


def _bits(heads: Heads, device: torch.device) -> Findings:
    def same(what: str, one: Tensor, other: Tensor) -> Finding:
        equal = torch.equal(one, other)
        return Finding(f"{heads.name}: bits {what}", "equal" if equal else "differ", right=equal)

    requests = BATCHES["all of them"]
    together = run(layer_of(heads, requests, device))
    unsplit = run(layer_of(heads, requests, device), replace(_ROOM, partials=0))
    yield same("with long texts split or not", together, unsplit)
    first = requests[:2]
    count = sum(pending + nodes for _, pending, nodes in first)
    yield same("with neighbours or without", together[:count], run(layer_of(heads, first, device)))
    layer = layer_of(heads, [(700, 90, 0)], device)
    whole = run(layer)
    (piece,) = layer.pieces
    cuts = [0, 1, 2, 18, 50, 89, 90]
    parts = []
    for start, end in pairwise(cuts):
        part = Piece(piece.pending[start:end], Proposal(), 700 + start, piece.pages, 1)
        query, key, value = (one[:, start:end] for one in (layer.query, layer.key, layer.value))
        parts.append(
            run(
                replace(
                    layer, pieces=[part], batch=pack([part], _PAGE, device), query=query, key=key, value=value
                )
            )
        )
    yield same("of a prompt at once or in pieces", torch.cat(parts), whole)
