"""Passes that are replayed give what passes give that run as they come, whatever was replayed before.

There is no GPU here: in the place of a graph stands the work that would be recorded, run again over the same
inputs. Triton's interpreter runs the kernels, in a process of its own (see test_triton.py).
"""

from __future__ import annotations

import logging
import logging.handlers
import random
from collections.abc import Callable, Collection, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM, Gemma2Config, LlamaConfig

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.cuda import graphs
from outrider_serving.engine.target.cuda.graphs import Capture, CaptureError, Work
from outrider_serving.engine.target.cuda.runner import CudaRunner
from outrider_serving.engine.target.cuda.shapes import Room, room_of
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.runner import ModelRunner, Pass
from outrider_serving.engine.target.triton.tables import Maxima
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.settings import Proposer
from serving.engine import proposers
from serving.engine.support import LONG, NONE, building, request, run
from serving.tiny import Arch, make_tiny_model

CPU = torch.device("cpu")
PAGE = 4
ROOM = Room(tokens=11, requests=3, pages=20, page_size=PAGE, tile=4, partials=6)
"""Sizes are 1, 2, 4, 8; 9 to 11 tokens run as they come."""

SHAPE: dict[str, Any] = {
    "vocab_size": 60,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "pad_token_id": None,
    "initializer_range": 0.2,
}
CONFIGS = {
    "llama": LlamaConfig(**SHAPE),
    "gemma2": Gemma2Config(
        **SHAPE,
        query_pre_attn_scalar=16,
        sliding_window=5,
        layer_types=["sliding_attention", "full_attention"],
        attn_logit_softcapping=5.0,
    ),
}


# What the other process runs.


class Captures:
    """Makes captures that run work again; those of these numbers fail, the first one asked for being 1."""

    def __init__(self, failing: Collection[int] = ()) -> None:
        self.made = self.asked = 0
        self._failing = failing

    def __call__(self) -> Capture:
        self.made += 1
        return self._capture

    def _capture(self, work: Work) -> Work:
        self.asked += 1
        work()
        if self.asked in self._failing:
            raise CaptureError("something waits for the device")
        return work


class Pair:
    """A model on our runner and on the one that it must equal, each with a store full of garbage."""

    def __init__(self, arch: str, captures: Captures) -> None:
        from outrider_serving.engine.target.triton.attention import TritonPass

        torch.manual_seed(1)
        model = AutoModelForCausalLM.from_config(CONFIGS[arch], attn_implementation=IMPLEMENTATION).eval()
        torch.nn.Module.to(model, torch.float64)
        shapes = {layer: KVShape(2, 16, 16) for layer in range(2)}
        self.stores = [KVStore(shapes, 60 * PAGE, torch.float64, CPU) for _ in range(2)]
        for store in self.stores:
            for keys_and_values in store.pairs:
                for tensor in keys_and_values:
                    tensor.fill_(torch.nan)
        self.ours = CudaRunner(model, self.stores[0], ROOM, TritonPass, captures)
        self.theirs = ModelRunner(model, self.stores[1])

    def run(self, pieces: Sequence[Piece], layers: Sequence[int] = ()) -> None:
        ran = self.ours.run(pack(pieces, PAGE, self.ours.batches_on), layers)
        assert_same(ran, self.theirs.run(pack(pieces, PAGE, CPU), layers))

    def assert_stores_are_equal(self) -> None:
        for own, others in zip(self.stores[0].pairs, self.stores[1].pairs, strict=True):
            for one, other in zip(own, others, strict=True):
                torch.testing.assert_close(one, other, rtol=0, atol=1e-5, equal_nan=True)
                assert one.isnan().any()


def assert_same(ran: Pass, wanted: Pass) -> None:
    torch.testing.assert_close(ran.logits, wanted.logits, rtol=0, atol=1e-5)
    assert ran.hidden.keys() == wanted.hidden.keys()
    for layer, states in wanted.hidden.items():
        torch.testing.assert_close(ran.hidden[layer], states, rtol=0, atol=1e-5)


class Texts:
    """Three requests that grow at random; their pages lie anywhere."""

    def __init__(self, seed: int) -> None:
        self.rng = random.Random(seed)
        pages = self.rng.sample(range(60), 60)
        self.pages = [pages[start : start + 20] for start in (0, 20, 40)]
        self.contexts = [0, 0, 0]

    def pieces(self, most: int) -> list[Piece]:
        """Of at most so many tokens: decoding, trees, pieces of prompts, some of which want no logits."""
        pieces = []
        for one in self.rng.sample(range(3), self.rng.randint(1, 3)):
            left = most - sum(piece.tokens for piece in pieces)
            if left < 1:
                break
            pending = self.rng.choice([1, 1, self.rng.randint(1, left)])
            nodes = self.rng.choice([0, min(self.rng.randint(0, 6), left - pending)])
            pieces.append(self.piece(one, pending, nodes))
        return pieces

    def piece(self, one: int, pending: int, nodes: int = 0) -> Piece:
        context, self.contexts[one] = self.contexts[one], self.contexts[one] + pending
        parents = tuple(self.rng.randrange(ROOT, node) if node else ROOT for node in range(nodes))
        tokens = tuple(self.rng.sample(range(60), nodes))
        logits = self.rng.randint(0, pending) if not nodes else 1
        text = [self.rng.randrange(60) for _ in range(pending)]
        return Piece(text, Proposal(tokens, parents), context, self.pages[one], logits)


def at_random(arch: str, seed: int) -> None:
    """Sizes come again and again, with other requests, pages, trees and hidden states."""
    pair, texts = Pair(arch, Captures()), Texts(seed)
    for most in (11, 4, 8, 1, 8, 3, 11, 6, 2, 8):
        pair.run(texts.pieces(most), texts.rng.choice([(), (), (1,), (2, 0)]))
    pair.assert_stores_are_equal()
    assert pair.ours.fallbacks == 0


def as_layers_change() -> list[tuple[int, int]]:
    """(captured, families of captures) after passes of 3 tokens that want these layers."""
    captures = Captures()
    pair, texts, seen = Pair("llama", captures), Texts(3), []
    for layers in ((), (1,), (1,), (2, 0), (2,), ()):
        pair.run([texts.piece(0, 3)], layers)
        seen.append((pair.ours.captured, captures.made))
    pair.assert_stores_are_equal()
    return seen


def with_failures() -> tuple[int, int, int, int, list[str]]:
    """The sizes 4 and 2 cannot be captured: captured, fallbacks, asked, made, and what is logged."""
    logged = logging.handlers.BufferingHandler(100)
    logging.getLogger("outrider_serving").addHandler(logged)
    captures = Captures({2, 3})
    pair, texts = Pair("llama", captures), Texts(4)
    for pending in (1, 2, 3, 8, 4, 5):
        pair.run([texts.piece(0, pending)])
    pair.run([texts.piece(1, 4)], (1,))  # all are captured anew, but for those
    pair.run([texts.piece(2, 8)], (1,))
    pair.assert_stores_are_equal()
    return (
        pair.ours.captured,
        pair.ours.fallbacks,
        captures.asked,
        captures.made,
        [record.getMessage() for record in logged.buffer],
    )


def without_memory_for_inputs() -> tuple[int, int]:
    """Captured and fallbacks where there is none for the inputs of the size 4."""
    real = graphs.Inputs.on

    def on(device: torch.device, maxima: Maxima) -> graphs.Inputs:
        if maxima.tokens == 4:
            raise torch.OutOfMemoryError("no memory")
        return real(device, maxima)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(graphs.Inputs, "on", on)
        pair, texts = Pair("llama", Captures()), Texts(6)
        for pending in (3, 2, 4, 8):
            pair.run([texts.piece(0, pending)])
    pair.assert_stores_are_equal()
    return pair.ours.captured, pair.ours.fallbacks


def results_are_overwritten() -> None:
    pair, texts = Pair("llama", Captures()), Texts(5)
    ran = pair.ours.run(pack([texts.piece(0, 3)], PAGE, CPU), (1,))
    kept = ran.copy()
    before = ran.copy()
    pair.ours.run(pack([texts.piece(1, 8)], PAGE, CPU), (1,))
    assert_same(kept, before)
    assert not torch.equal(ran.hidden[1], kept.hidden[1])


def of_an_engine(path: str) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], int, int]:
    """Tokens by torch and without speculation, then by replays with trees; captured, and accepted tokens."""
    from outrider_serving.engine import core
    from outrider_serving.engine.target.triton.attention import TritonPass

    loaded = load_model(path)
    prompts, how = [[5, 6, 7], list(range(60, 90))], {"step_tokens": 16, "max_running": 2}
    wanted = [request(prompt, max_tokens=10, ignore_eos=True, speculation=NONE) for prompt in prompts]
    plain = [result.tokens for result in run(loaded, *wanted, **how)]

    def runner(model: Any, store: KVStore, shapes: Any, limits: EngineLimits, context: int) -> CudaRunner:
        made.append(
            CudaRunner(model, store, room_of(limits, context, shapes.values(), 4, 1), TritonPass, Captures())
        )
        return made[0]

    made: list[CudaRunner] = []
    reader = proposers.HiddenReader([[*p, *tokens] for p, tokens in zip(prompts, plain, strict=True)], (1, 3))
    wanted = [request(prompt, max_tokens=10, ignore_eos=True) for prompt in prompts]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(core, "cuda_runner", runner)
        results = run(loaded, *wanted, proposer=Proposer(max_depth=3), build=building(reader), **how)
    accepted = sum(result.accepted for result in results)
    return plain, [result.tokens for result in results], made[0].captured, accepted


# The tests.


@pytest.mark.parametrize("seed", range(3 if LONG else 1))
@pytest.mark.parametrize("arch", CONFIGS)
def test_replays_are_passes(interpreted: Callable[..., Any], arch: str, seed: int) -> None:
    interpreted(at_random, arch, seed)


def test_graphs_are_captured_anew_for_hidden_states_that_none_writes(interpreted: Callable[..., Any]) -> None:
    """All four sizes at first, later the size that is used."""
    assert interpreted(as_layers_change) == [(4, 1), (5, 2), (5, 2), (6, 3), (6, 3), (6, 3)]


def test_what_cannot_be_captured_runs_as_it_comes(interpreted: Callable[..., Any]) -> None:
    captured, fallbacks, asked, made, logged = interpreted(with_failures)
    assert (captured, fallbacks) == (2 + 1, 2)
    assert asked == 4 + 1  # neither of the two is tried again
    assert made == 1 + 2 + 1  # after each failure, and for the hidden states
    assert logged == ["passes of 4 tokens run without a graph: something waits for the device"]


def test_a_size_without_memory_for_its_inputs_runs_as_it_comes(interpreted: Callable[..., Any]) -> None:
    assert interpreted(without_memory_for_inputs) == (3, 1)


def test_a_copy_outlives_the_next_pass(interpreted: Callable[..., Any]) -> None:
    interpreted(results_are_overwritten)


@pytest.mark.parametrize("arch", ["llama", "gemma2"])
def test_an_engine_of_replays_gives_the_same_tokens(
    interpreted: Callable[..., Any], tmp_path: Path, arch: Arch
) -> None:
    path = make_tiny_model(tmp_path, arch, dtype=torch.float64)
    plain, replayed, captured, accepted = interpreted(of_an_engine, str(path))
    assert replayed == plain
    assert captured > 5  # all five sizes, and some anew for the hidden states
    assert accepted > 0


def test_requests_that_run_alone_do_not_get_each_others_logits(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """On a runner that leaves all results in one place, where every pass of several requests fails."""
    prompts = [[5, 6, 7], [90, 91], [4] * 9]
    wanted = [result.tokens for result in run(tiny_llama, *map(request, prompts))]
    real, place = ModelRunner.run, torch.zeros((300, tiny_llama.vocab_size), dtype=torch.float64)

    def reusing(self: ModelRunner, batch: Any, layers: Sequence[int] = ()) -> Pass:
        if len(batch.segments) > 1:
            raise torch.OutOfMemoryError("no memory")
        ran = real(self, batch, layers)
        place[: len(ran.logits)].copy_(ran.logits)
        return Pass(place[: len(ran.logits)], ran.hidden)

    monkeypatch.setattr(ModelRunner, "run", reusing)
    assert [result.tokens for result in run(tiny_llama, *map(request, prompts))] == wanted
