"""The Triton kernels give what `TorchPass` gives, and their padding nothing at all.

Triton's interpreter runs them, on a CPU. Whether it does is decided when triton is imported, which
transformers does as well: so a process of its own runs them, and the tests send it what to compare.
"""

from __future__ import annotations

import importlib.util
import random
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, replace
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider_serving.engine.target.attention import Scoring
from outrider_serving.engine.target.batch import Batch, Piece, pack
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.paged import TorchPass
from outrider_serving.engine.target.triton.tables import WHOLE, Maxima, Tables, tables_of
from outrider_serving.sampling.proposal import ROOT, Proposal
from serving.engine.support import LONG

CPU = torch.device("cpu")
GARBAGE = float("nan")


@dataclass(frozen=True)
class Case:
    """One layer of a batch, all of which follows from these numbers.

    Attributes:
        seed: of every number in it.
        requests: context, pending tokens and nodes of each.
        beyond: how many tokens of padding follow.
    """

    seed: int
    requests: Sequence[tuple[int, int, int]]
    dtype: torch.dtype = torch.float32
    heads: int = 1
    group: int = 1
    key_size: int = 16
    value_size: int = 16
    window: int | None = None
    softcap: float | None = None
    page_size: int = 4
    tile: int = 4
    partials: int = 16
    chunk: int = 32
    beyond: int = 3

    @property
    def maxima(self) -> Maxima:
        tokens = sum(pending + nodes for _, pending, nodes in self.requests) + self.beyond
        return Maxima(
            tokens, 6, 60, self.page_size, 70, tile=self.tile, partials=self.partials, chunk=self.chunk
        )


@dataclass(frozen=True)
class Layer:
    """What a case stands for: the store is full of garbage where no token of a context lies."""

    case: Case
    pieces: Sequence[Piece]
    batch: Batch
    store: KVStore
    query: Tensor
    key: Tensor
    value: Tensor
    scoring: Scoring


def tree(rng: random.Random, nodes: int) -> Proposal:
    """Bushy at its top, so that places and positions differ."""
    parents = [ROOT if node == 0 else rng.randrange(max(ROOT, node - 6), node) for node in range(nodes)]
    return Proposal(tuple(range(nodes)), tuple(parents))


def layer_of(case: Case) -> Layer:
    """Numbers of a request are those of the case's seed and its place; pages are at random."""
    rng = random.Random(case.seed)
    free = list(range(80))
    rng.shuffle(free)
    pieces = []
    for place, (context, pending, nodes) in enumerate(case.requests):
        count = -(-(context + pending + nodes) // case.page_size)
        own, free = free[:count], free[count:]
        proposal = tree(random.Random(case.seed + place), nodes)
        pieces.append(Piece(range(pending), proposal, context, own, 1))
    batch = pack(pieces, case.page_size, CPU)
    shape = KVShape(case.heads, case.key_size, case.value_size)
    store = KVStore({0: shape}, 80 * case.page_size, case.dtype, CPU)
    for tensor in store.layer(0):
        tensor.fill_(GARBAGE)
    new = []
    for place, segment in enumerate(batch.segments):
        numbers = torch.Generator().manual_seed(case.seed + place)
        for tensor in store.layer(0):
            kept = (segment.context, *tensor.shape[1:])
            tensor[segment.slots[: segment.context]] = torch.randn(kept, generator=numbers).to(case.dtype)
        shapes = (
            (case.heads * case.group, segment.count, case.key_size),
            (case.heads, segment.count, case.key_size),
            (case.heads, segment.count, case.value_size),
        )
        new.append([torch.randn(shape, generator=numbers).to(case.dtype) for shape in shapes])
    query, key, value = (torch.cat(parts, 1) for parts in zip(*new, strict=True))
    scoring = Scoring(2 * case.key_size**-0.5, case.window, case.softcap)
    return Layer(case, pieces, batch, store, query, key, value, scoring)


# What the other process runs.


def interpret() -> None:
    """bfloat16 is kept in 16-bit integers, which the interpreter of triton 3.9 multiplies as such."""
    import triton.language as tl
    from triton.runtime.interpreter import interpreter_builder as builder

    dot = builder.create_dot

    def create_dot(a: Any, b: Any, *others: Any) -> Any:
        a, b = (builder.cast_impl(x, tl.float32) if x.dtype.scalar == tl.bfloat16 else x for x in (a, b))
        return dot(a, b, *others)

    builder.create_dot = create_dot


@contextmanager
def faulty(fault: tuple[str, str] | None) -> Iterator[None]:
    """The kernels with something else in the place of a piece of their source."""
    from outrider_serving.engine.target.triton import attention, kernel

    if fault is None:
        yield
        return
    source = Path(kernel.__file__).read_text(encoding="utf-8")
    assert fault[0] in source
    with tempfile.TemporaryDirectory() as directory:
        path = Path(directory) / "faulty.py"
        path.write_text(source.replace(*fault), encoding="utf-8")
        spec = importlib.util.spec_from_file_location("faulty", path)
        assert spec is not None
        assert spec.loader is not None
        attention.kernel = importlib.util.module_from_spec(spec)
        try:
            spec.loader.exec_module(attention.kernel)
            yield
        finally:
            attention.kernel = kernel


def run(layer: Layer, tables: Tables | None = None) -> Tensor:
    """What the kernels make of it: of the batch and of its padding, which is garbage."""
    from outrider_serving.engine.target.triton.attention import TritonPass

    if tables is None:
        tables = Tables.on(CPU, layer.case.maxima)
        tables.put(tables_of(layer.pieces, layer.batch, layer.case.maxima))
    beyond = layer.case.beyond
    new = (
        torch.cat([one, one.new_full((one.shape[0], beyond, one.shape[2]), GARBAGE)], 1)
        for one in (layer.query, layer.key, layer.value)
    )
    return TritonPass(layer.store, tables).attend(0, *new, layer.scoring)


def compare(case: Case, fault: tuple[str, str] | None = None) -> None:
    """Results are those of `TorchPass`, and so is every byte of the store."""
    from outrider_serving.engine.target.triton.attention import ERROR

    layer, other = layer_of(case), layer_of(case)
    wanted = TorchPass(other.store, other.batch).attend(0, other.query, other.key, other.value, other.scoring)
    with faulty(fault):
        out = run(layer)
    assert not out[len(wanted) :].any(), "padding has results"
    error = float((out[: len(wanted)].double() - wanted.double()).abs().max() / wanted.double().abs().max())
    assert error <= ERROR[case.dtype], f"{case} is off by {error}"
    for own, others in zip(layer.store.layer(0), other.store.layer(0), strict=True):
        assert torch.equal(own.view(torch.uint8), others.view(torch.uint8)), "the store differs"


def compare_all(cases: Sequence[Case], fault: tuple[str, str] | None = None) -> None:
    for case in cases:
        compare(case, fault)


def same_bits(case: Case, others: Case) -> None:
    """The first request of both cases, which is the same, has the same results."""
    count = sum(case.requests[0][1:])
    assert torch.equal(run(layer_of(case))[:count], run(layer_of(others))[:count])


def same_bits_in_pieces(case: Case, cuts: Sequence[int]) -> None:
    """A text that comes in pieces has the results of one that comes at once."""
    layer = layer_of(case)
    whole = run(layer)
    (piece,) = layer.pieces
    beginning = piece.context
    for first, end in zip([0, *cuts], [*cuts, len(piece.pending)], strict=True):
        part = Piece(piece.pending[first:end], Proposal(), beginning + first, piece.pages, 1)
        out = run(
            replace(
                layer,
                pieces=[part],
                batch=pack([part], case.page_size, CPU),
                query=layer.query[:, first:end],
                key=layer.key[:, first:end],
                value=layer.value[:, first:end],
            )
        )
        assert torch.equal(out[: end - first], whole[first:end])


def after_another(before: Case, case: Case) -> None:
    """Tables that described a larger batch say nothing of it any more; empty ones change nothing."""
    layer, larger = layer_of(case), layer_of(before)
    tables = Tables.on(CPU, before.maxima)
    empty = run(larger, tables)
    assert not empty.any()
    assert all(own.isnan().any() for own in larger.store.layer(0))
    tables.put(tables_of(larger.pieces, larger.batch, before.maxima))
    run(larger, tables)
    tables.put(tables_of(layer.pieces, layer.batch, before.maxima))
    assert torch.equal(run(layer, tables), run(layer_of(case)))


# The tests.


Interpreter = Callable[..., None]


@pytest.fixture(scope="module")
def interpreter() -> Iterator[Interpreter]:
    """Runs a function in a process in which triton is interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, get_context("spawn"), interpret)
        pool.submit(int).result()
    with pool:
        yield lambda function, *how: pool.submit(function, *how).result()


def random_case(seed: int) -> Case:
    rng = random.Random(seed)
    shapes = [
        lambda: (rng.randrange(1, 100), 1, 0),  # decoding
        lambda: (rng.randrange(100), rng.randrange(1, 3), rng.randrange(1, 24)),  # a tree to be verified
        lambda: (rng.choice([0, rng.randrange(60)]), rng.randrange(2, 40), 0),  # a piece of a prompt
    ]
    return Case(
        seed,
        [rng.choice(shapes)() for _ in range(rng.randint(1, 3))],
        dtype=rng.choice([torch.float64, torch.float32, torch.float16, torch.bfloat16]),
        heads=rng.randint(1, 2),
        group=rng.randint(1, 4),
        key_size=rng.choice([16, 20, 24, 32]),
        value_size=rng.choice([8, 16, 32]),
        window=rng.choice([None, 1, 5, 33, 70]),
        softcap=rng.choice([None, None, 3.0]),
        page_size=rng.choice([4, 16]),
        tile=rng.choice([1, 4, 8, 16]),
        partials=rng.choice([0, 3, 8, 40]),
        beyond=rng.randrange(4),
    )


@given(seed=st.integers(0, 2**32))
def test_ragged_batches(interpreter: Interpreter, seed: int) -> None:
    """Decoding, trees and pieces of prompts side by side, with whatever heads, windows, caps and pages."""
    interpreter(compare, random_case(seed))


@pytest.mark.parametrize("size", [64, 80, 96, 128, 256] if LONG else [80, 256])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_sizes_of_heads(interpreter: Interpreter, size: int, dtype: torch.dtype) -> None:
    requests = [(40, 1, 9), (0, 5, 0)]
    interpreter(compare, Case(1, requests, dtype, group=2, key_size=size, value_size=size, tile=16))
    interpreter(compare, Case(1, requests, dtype, key_size=size, value_size=64, tile=16))


TREES = Case(7, [(61, 1, 40), (5, 3, 12), (90, 1, 0)], group=2, tile=8, partials=40)
"""Nodes in two words, contexts in several chunks, and trees that go across a border of chunks."""


@pytest.mark.parametrize("partials", [0, 4, 40])
@pytest.mark.parametrize("window", [None, 1, 2, 6, 64])
def test_trees(interpreter: Interpreter, window: int | None, partials: int) -> None:
    interpreter(compare, replace(TREES, window=window, partials=partials))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("window", [None, 40])
def test_neighbours_and_splits_change_no_bit(
    interpreter: Interpreter, window: int | None, dtype: torch.dtype
) -> None:
    case = replace(TREES, window=window, dtype=dtype)
    alone = replace(case, requests=case.requests[:1], partials=0)
    interpreter(same_bits, alone, case)
    others = [case.requests[0], (1, 2, 0)]
    interpreter(same_bits, alone, replace(case, requests=others, partials=5, page_size=16, beyond=9))


@pytest.mark.parametrize("partials", [0, 40])
def test_pieces_of_a_prompt_change_no_bit(interpreter: Interpreter, partials: int) -> None:
    """In float64: in float32 the interpreter's matrix products depend on where in a block a row stands."""
    case = Case(3, [(20, 60, 0)], torch.float64, window=50, group=2, partials=partials)
    interpreter(same_bits_in_pieces, case, [1, 2, 13, 40, 59])


def test_tables_forget_the_batch_before(interpreter: Interpreter) -> None:
    interpreter(after_another, replace(TREES, beyond=2), Case(9, [(70, 1, 3), (2, 1, 0)], group=2, tile=8))


class ForAGpu:
    """In the place of a kernel: its launch compiles it for a GPU of compute capability 9.0, without one."""

    def __init__(self, kernel: Any) -> None:
        self.kernel = kernel
        self.shared = 0

    def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
        return self.build

    def build(self, *arguments: Any, **named: Any) -> None:
        import triton
        from triton.backends.compiler import GPUTarget
        from triton.compiler import ASTSource

        names = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32", torch.int32: "i32"}
        kinds = [f"*{names[one.dtype]}" if isinstance(one, Tensor) else "i32" for one in arguments]
        constants = {name: named.pop(name) for name in self.kernel.arg_names[len(kinds) :]}
        signature = dict(zip(self.kernel.arg_names, [*kinds, *["constexpr"] * len(constants)], strict=True))
        source = ASTSource(self.kernel, signature, constants)
        self.shared = triton.compile(source, GPUTarget("cuda", 90, 32), named).metadata.shared


def test_kernels_compile_for_a_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With room for them in a multiprocessor of an H200, which gives a program 227 KiB of shared memory."""
    from outrider_serving.engine.target.triton import attention, kernel

    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    kernels = {name: ForAGpu(getattr(kernel, name)) for name in ("write", "attend", "merge")}
    monkeypatch.setattr(attention, "kernel", SimpleNamespace(**kernels))
    requests = [(40, 1, 9)]
    run(layer_of(Case(1, requests, torch.bfloat16, 2, 4, 256, 256, 512, 50.0, 16, tile=16, chunk=256)))
    for name, built in kernels.items():
        assert any(tmp_path.glob(f"*/{name}.cubin"))
        assert built.shared <= 227 * 1024


@pytest.mark.parametrize("lacking", ["tokens", "requests", "pages", "nodes"])
def test_a_batch_beyond_the_maxima_is_refused(lacking: str) -> None:
    layer = layer_of(TREES)
    has = {"tokens": 57, "requests": 3, "pages": 26, "nodes": 40}
    exact = Maxima(**has, page_size=4)
    assert len(tables_of(layer.pieces, layer.batch, exact)) <= len(Tables.on(CPU, exact).row)
    with pytest.raises(ValueError, match=f"{has[lacking]} {lacking}, but"):
        tables_of(layer.pieces, layer.batch, replace(exact, **{lacking: has[lacking] - 1}))


@pytest.mark.parametrize(
    ("contexts", "partials", "split", "whole"),
    [
        ((101, 5, 90), 40, [0, 2], [1]),
        ((101, 5, 90), 6, [0], [2, 1]),
        ((101, 5, 90), 3, [], [0, 2, 1]),  # as many blocks as there is room for chunks
        ((200, 90), 5, [1], [0]),  # there is no room for the first
    ],
)
def test_the_longest_texts_are_split(
    contexts: tuple[int, ...], partials: int, split: list[int], whole: list[int]
) -> None:
    case = Case(7, [(context, 1, 0) for context in contexts], partials=partials)
    layer = layer_of(case)
    tables = Tables.on(CPU, case.maxima)
    tables.put(tables_of(layer.pieces, layer.batch, case.maxima))
    items, merges = tables.counts.tolist()
    assert tables.merges[:merges].tolist() == split
    apart = [[block, chunk] for block in split for chunk in range(contexts[block] // case.chunk + 1)]
    assert tables.items[:items].tolist() == [[block, WHOLE] for block in whole] + apart


FAULTS = {
    "windows count places": ("key_position = tl.where(beyond, key_position, near)", "key_position = near"),
    "windows are one too wide": ("> position[:, None] - window", ">= position[:, None] - window"),
    "windows begin late": ("- window + 1, 0)\n        q =", "- window + 2, 0)\n        q ="),
    "masks are read one bit on": ("(node & 31)", "((node + 1) & 31)"),
    "masks are read one word on": ("(node >> 5)", "((node + 1) >> 5)"),
    "chunks are merged as they are": (
        "chunk_shrink = tl.exp2(chunk_top - origin)",
        "chunk_shrink = origin * 0 + 1",
    ),
    "sums are not carried over": ("total = tl.fma(total, shrink, ", "total = tl.fma(total, shrink * 0, "),
    "the last chunk is not merged": ("place // chunk_size + 1)", "place // chunk_size)"),
    "the next place is read": ("(near < end)", "(near < end + 1)"),
    "tokens see the next one": ("near[None, :] <= own[:, None]", "near[None, :] <= own[:, None] + 1"),
    "padding is written to a slot": ("tl.load(slots + token)", "tl.maximum(tl.load(slots + token), 0)"),
    "a group shares one head": ("head * group + row % group", "head * group + row * 0"),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(interpreter: Interpreter, name: str) -> None:
    """By what `test_trees` passes without it."""
    guards = [replace(TREES, window=window) for window in (None, 6, 64)]
    with pytest.raises(AssertionError):
        interpreter(compare_all, guards, FAULTS[name])
