"""The target by compiled code: what transformers computes, and bits that no cut into passes changes."""

from __future__ import annotations

import logging
import random
from collections.abc import Mapping, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    AutoModelForCausalLM,
    Gemma3TextConfig,
    GPTNeoXConfig,
    LlamaConfig,
    PreTrainedConfig,
    PreTrainedModel,
    Qwen2Config,
)

from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.native.decoder import Compiled
from outrider_serving.engine.target.native.structure import NotRecognisedError, Structure, structure_of
from outrider_serving.engine.target.runner import ModelRunner
from outrider_serving.models import loading
from outrider_serving.models.capability import check_attention
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.native import build
from outrider_serving.native import library as libraries
from outrider_serving.native.library import Library, library, usable
from outrider_serving.sampling.proposal import ROOT, Proposal
from serving.tiny import make_tiny_model

CPU = torch.device("cpu")
PAGE, PAGES = 16, 60
HEADS = {"num_attention_heads": 4, "num_key_value_heads": 2}
SIZES = {"vocab_size": 333, "num_hidden_layers": 2, "max_position_embeddings": 2048, "initializer_range": 0.2}


@pytest.fixture(params=[variant.name for variant in usable()])
def kernels(request: pytest.FixtureRequest) -> Library:
    """Every kind of library that this machine can run."""
    return Library(next(variant for variant in usable() if variant.name == request.param))


def model_of(config: PreTrainedConfig, dtype: torch.dtype = torch.float64) -> PreTrainedModel:
    """A random model with our attention."""
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation=IMPLEMENTATION)
    torch.nn.Module.to(model, dtype)
    for parameter in model.parameters():  # biases and norms begin as 0 or 1
        if parameter.dim() == 1:
            torch.nn.init.normal_(parameter, std=0.3)
    model.train(False)
    return model  # type: ignore[no-any-return]


@cache
def read(model: PreTrainedModel) -> tuple[Mapping[int, KVShape], Structure]:
    return check_attention(model, "it"), structure_of(model)


@cache
def known(name: str, dtype: torch.dtype) -> PreTrainedModel:
    """The model of one of the configurations below, which no test changes."""
    return model_of({**CONFIGS, **BITS}[name], dtype)


class Target:
    """A model over a store of its own."""

    def __init__(self, model: PreTrainedModel, kernels: Library | None, pages: int = PAGES) -> None:
        shapes, structure = read(model)
        compiled = None if kernels is None else Compiled(structure, kernels)
        self.runner = ModelRunner(model, KVStore(shapes, PAGE * pages, model.dtype, CPU), compiled)

    def run(self, *pieces: Piece, hidden: Sequence[int] = ()) -> tuple[Tensor, dict[int, Tensor]]:
        ran = self.runner.run(pack(pieces, PAGE, CPU), hidden)
        return ran.logits, dict(ran.hidden)


def differ(ours: Tensor, theirs: Tensor) -> float:
    """Most that a row differs by, in standard deviations of the row."""
    ours, theirs = ours.double(), theirs.double()
    return float(((ours - theirs).abs().amax(-1) / theirs.std(-1)).max())


LLAMA3 = {"rope_type": "llama3", "rope_theta": 5e5, "factor": 8.0, "low_freq_factor": 1.0}
LLAMA3 |= {"high_freq_factor": 4.0, "original_max_position_embeddings": 64}
CONFIGS: dict[str, PreTrainedConfig] = {
    # Sizes that are no multiple of a vector, and heads of odd numbers.
    "odd sizes": LlamaConfig(
        **SIZES,
        hidden_size=42,
        intermediate_size=75,
        num_attention_heads=6,
        num_key_value_heads=2,
        head_dim=10,
    ),
    "biases": LlamaConfig(
        **SIZES, **HEADS, hidden_size=48, intermediate_size=96, attention_bias=True, mlp_bias=True
    ),
    "qwen2": Qwen2Config(**SIZES, **HEADS, hidden_size=64, intermediate_size=80),
    "one head of keys": LlamaConfig(
        **SIZES,
        hidden_size=64,
        intermediate_size=64,
        num_attention_heads=8,
        num_key_value_heads=1,
        head_dim=64,
    ),
    "more heads to a head of keys than are attended together": LlamaConfig(
        **SIZES,
        hidden_size=80,
        intermediate_size=64,
        num_attention_heads=40,
        num_key_value_heads=2,
        head_dim=8,
    ),
    "llama3 rope": LlamaConfig(
        **SIZES, **HEADS, hidden_size=64, intermediate_size=64, rope_parameters=LLAMA3
    ),
    "yarn": LlamaConfig(
        **SIZES,
        **HEADS,
        hidden_size=64,
        intermediate_size=64,
        rope_parameters={
            "rope_type": "yarn",
            "rope_theta": 1e4,
            "factor": 4.0,
            "original_max_position_embeddings": 64,
        },
    ),
    "relu": LlamaConfig(**SIZES, **HEADS, hidden_size=64, intermediate_size=64, hidden_act="relu"),
    "gelu": LlamaConfig(**SIZES, **HEADS, hidden_size=64, intermediate_size=64, hidden_act="gelu"),
    "windows over chunks": Gemma3TextConfig(
        **SIZES,
        **HEADS,
        hidden_size=64,
        intermediate_size=64,
        head_dim=16,
        sliding_window=270,
        layer_types=["sliding_attention", "full_attention"],
    ),
}
CLOSE = {torch.float64: 1e-5, torch.float32: 1e-3, torch.bfloat16: 0.25}


@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", CONFIGS)
def test_it_computes_what_transformers_computes(name: str, dtype: torch.dtype, kernels: Library) -> None:
    """Chunks, a decode step beside a tree, and hidden states; contexts beyond one chunk of attention."""
    rng = random.Random(name)
    model = known(name, dtype)
    ours, theirs = Target(model, kernels), Target(model, None)
    text = [rng.randrange(1, 333) for _ in range(640)]  # gemma embeds 0 as nothing
    pages = rng.sample(range(PAGES), 43)
    other = [page for page in range(PAGES) if page not in pages]
    tree = Proposal((5, 9, 7, 300, 2), (ROOT, ROOT, 0, 2, 1))
    passes = [
        [Piece(text[:300], Proposal(), 0, pages, 300), Piece(text[:7], Proposal(), 0, other, 1)],
        [Piece(text[300:530], Proposal(), 300, pages, 2)],
        [Piece(text[7:8], tree, 7, other, 1), Piece(text[530:531], tree, 530, pages, 1)],
        [Piece(text[531:532], Proposal(), 531, pages, 1)],
    ]
    for pieces in passes:
        logits, hidden = ours.run(*pieces, hidden=[0, 1, 2])
        wanted, states = theirs.run(*pieces, hidden=[0, 1, 2])
        assert differ(logits, wanted) < CLOSE[dtype]
        for layer in (0, 1, 2):
            assert differ(hidden[layer], states[layer]) < CLOSE[dtype]


BITS = {
    "gemma": Gemma3TextConfig(
        **SIZES,
        **HEADS,
        hidden_size=64,
        intermediate_size=96,
        head_dim=32,
        sliding_window=40,
        layer_types=["sliding_attention", "full_attention"],
    ),
    "llama": CONFIGS["odd sizes"],
}


@pytest.mark.parametrize("dtype", CLOSE, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("name", BITS)
@given(seed=st.integers(0, 2**32))
def test_bits_do_not_depend_on_the_batch(name: str, dtype: torch.dtype, kernels: Library, seed: int) -> None:
    """A text token by token, and cut at random beside others, over other pages, with trees after it."""
    rng = random.Random(seed)
    model = known(name, dtype)
    text = [rng.randrange(333) for _ in range(rng.choice([20, 300]))]
    alone = Target(model, kernels)
    first = rng.randrange(1, 270) if len(text) > 270 else 1
    wanted = [alone.run(Piece(text[:first], Proposal(), 0, range(PAGES), first))[0]]
    wanted += [
        alone.run(Piece([text[n]], Proposal(), n, range(PAGES), 1))[0] for n in range(first, len(text))
    ]
    packed = Target(model, kernels)
    pages = rng.sample(range(PAGES), PAGES)
    own, others = pages[:30], pages[30:]
    found = []
    for start, end in pairwise(sorted({0, len(text), *(rng.randrange(len(text)) for _ in range(6))})):
        piece = Piece(text[start:end], _tree(rng, text[end:]), start, own, end - start)
        neighbour = Piece([rng.randrange(333) for _ in range(rng.randint(1, 9))], Proposal(), 0, others, 1)
        before = rng.random() < 0.5
        logits, _ = packed.run(*([neighbour, piece] if before else [piece, neighbour]))
        found.append(logits[int(before) :][: end - start])
    assert torch.equal(torch.cat(found), torch.cat(wanted))


def _tree(rng: random.Random, coming: Sequence[int]) -> Proposal:
    """Some nodes, a path of which may be the text to come."""
    parents = [rng.randrange(ROOT, node) if node else ROOT for node in range(rng.randint(0, 6))]
    depths = Proposal(tuple(0 for _ in parents), tuple(parents)).depths
    tokens = [
        coming[depth - 1] if depth <= len(coming) and rng.random() < 0.7 else 3 + node
        for node, depth in enumerate(depths)
    ]
    return Proposal(tuple(tokens), tuple(parents))


@pytest.mark.parametrize("name", BITS)
@given(seed=st.integers(0, 2**32))
def test_bits_after_a_node_are_those_of_its_path_as_text(name: str, kernels: Library, seed: int) -> None:
    rng = random.Random(seed)
    model = known(name, torch.bfloat16)
    target, alone = Target(model, kernels), Target(model, kernels)
    text = [rng.randrange(333) for _ in range(rng.choice([3, 250]))]
    parents = [rng.randrange(ROOT, node) if node else ROOT for node in range(9)]
    tree = Proposal(tuple(rng.randrange(333) for _ in parents), tuple(parents))
    logits, _ = target.run(Piece(text, tree, 0, rng.sample(range(PAGES), PAGES), 1))
    for node in range(9):
        whole = [*text, *(tree.tokens[on] for on in tree.path(node))]
        wanted, _ = alone.run(Piece(whole, Proposal(), 0, range(PAGES), 1))
        assert torch.equal(logits[1 + node], wanted[0])


def test_after_the_last_attention_only_tokens_with_logits_go_on(kernels: Library) -> None:
    """Unless the states of all are wanted: then nothing else differs."""
    model = known("windows over chunks", torch.float32)
    text = [1 + n % 300 for n in range(50)]
    piece = Piece(text, Proposal((5, 9), (ROOT, ROOT)), 0, range(PAGES), 2)
    few, none = Target(model, kernels).run(piece)
    every, states = Target(model, kernels).run(piece, hidden=[2])
    assert not none
    assert torch.equal(few, every)
    with torch.inference_mode():
        wanted = model.lm_head(states[2][-4:])
    assert differ(every, wanted) < CLOSE[torch.float32]
    target = Target(model, kernels)
    assert target.run(Piece(text[:40], Proposal(), 0, range(PAGES), 0))[0].shape == (0, 333)
    assert torch.equal(target.run(Piece(text[40:], piece.proposal, 40, range(PAGES), 2))[0], few)


def test_the_deepest_node_need_not_be_the_last(kernels: Library) -> None:
    """Where tables of rotations end between the two: they are made for a power of two of positions."""
    model = known("biases", torch.float32)
    pages, tree = range(70), Proposal((5, 9, 7, 3, 2), (ROOT, 0, 1, 2, ROOT))
    text = [1 + n % 300 for n in range(1022)]
    found = []
    for kind in (kernels, None):
        target = Target(model, kind, pages=70)
        target.run(Piece(text[:-1], Proposal(), 0, pages, 0))
        found.append(target.run(Piece(text[-1:], tree, len(text) - 1, pages, 1))[0])
    assert differ(*found) < CLOSE[torch.float32]


WIDE = LlamaConfig(
    **SIZES,
    hidden_size=256,
    intermediate_size=1024,
    num_attention_heads=4,
    num_key_value_heads=1,
    head_dim=64,
)


def test_threads_change_no_bit(kernels: Library) -> None:
    """Few queries over long contexts are shared out by chunks; with one thread they are not.

    The model is large enough that threads are used for four tokens.
    """
    model = model_of(WIDE, torch.bfloat16)
    text = [n % 333 for n in range(800)]
    threads, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 3):
            torch.set_num_threads(count)
            target = Target(model, kernels)
            target.run(Piece(text[:-4], Proposal(), 0, range(PAGES), 1))
            results.append(target.run(Piece(text[-4:], Proposal(), len(text) - 4, range(PAGES), 4))[0])
    finally:
        torch.set_num_threads(threads)
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_this_machine_has_kernels_and_the_real_model_runs_on_them(gemma: LoadedModel) -> None:
    """The packages for users have them, and the tests must not silently be those of the slower way."""
    assert (found := library()) is not None
    assert found.name == usable()[0].name
    assert gemma.compiled is not None
    assert gemma.compiled.library is found


def test_not_a_number_is_not_hidden(kernels: Library) -> None:
    model = model_of(CONFIGS["biases"], torch.bfloat16)
    with torch.no_grad():
        model.get_input_embeddings().weight[7] = float("nan")
    logits, _ = Target(model, kernels).run(Piece([1, 7, 2], Proposal(), 0, range(3), 3))
    assert logits[1:].isnan().all()


@pytest.mark.parametrize(
    "piece", [Piece([333], Proposal(), 0, [0], 1), Piece([1], Proposal(), 0, [PAGES], 1)]
)
def test_what_lies_outside_is_refused_before_anything_is_written(piece: Piece, kernels: Library) -> None:
    target = Target(model_of(CONFIGS["biases"]), kernels)
    with pytest.raises(IndexError):
        target.run(Piece([1, 2], Proposal(), 0, [1], 1), piece)


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"hidden_act": "tanh"}, "the activation tanh"),
        ({"dtype": torch.float16}, "float16 on cpu"),
    ],
)
def test_what_is_not_recognised_is_said(change: dict[str, Any], why: str) -> None:
    dtype = change.pop("dtype", torch.float32)
    model = model_of(LlamaConfig(**SIZES, **HEADS, hidden_size=64, intermediate_size=64, **change), dtype)
    with pytest.raises(NotRecognisedError, match=why):
        structure_of(model)


def test_another_architecture_has_no_compiled_form() -> None:
    model = model_of(GPTNeoXConfig(**SIZES, hidden_size=64, intermediate_size=64, num_attention_heads=4))
    with pytest.raises(NotRecognisedError, match="type gpt_neox"):
        structure_of(model)


def test_a_layer_of_another_class_is_not_recognised() -> None:
    class Scaled(torch.nn.Linear):
        pass

    model = model_of(LlamaConfig(**SIZES, **HEADS, hidden_size=64, intermediate_size=64))
    model.model.layers[1].mlp.up_proj = Scaled(64, 64, bias=False, dtype=torch.float64)
    with pytest.raises(NotRecognisedError, match="a Scaled where a linear layer is expected"):
        structure_of(model)


def test_a_model_that_compiled_code_gets_wrong_runs_on_modules(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The comparison of every loaded model is what shows that a structure was understood."""

    def misread(model: PreTrainedModel) -> Structure:
        return replace(structure_of(model), activation="relu")

    monkeypatch.setattr(loading, "structure_of", misread)
    with caplog.at_level(logging.WARNING):
        loaded = load_model(str(make_tiny_model(tmp_path)))
    assert loaded.compiled is None
    assert "runs on transformers' own code, not on compiled code" in caplog.text


def test_without_a_library_models_run_on_modules_and_it_is_logged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    missing = replace(usable()[0], name="missing")
    monkeypatch.setattr(libraries, "usable", lambda: (missing,))
    library.cache_clear()
    try:
        with caplog.at_level(logging.WARNING):
            loaded = load_model(str(make_tiny_model(tmp_path)))
    finally:
        library.cache_clear()
    assert loaded.compiled is None
    assert "the CPU kernels cannot be used, so models run slower" in caplog.text
    assert "kernels-missing.so" in caplog.text


def test_building_without_a_compiler_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler -x")
    monkeypatch.setenv("CXXFLAGS", "-DNEW")
    with pytest.raises(build.NoCompilerError, match="no-such-compiler"):
        build.build()


def test_a_store_of_another_model_is_no_excuse() -> None:
    """Layers are found by their index, whatever order a store has them in."""
    model = model_of(CONFIGS["biases"])
    shapes = dict(reversed(check_attention(model, "it").items()))
    found = library()
    assert found is not None
    runner = ModelRunner(model, KVStore(shapes, 64, model.dtype, CPU), Compiled(structure_of(model), found))
    batch = pack([Piece([1, 2, 3], Proposal(), 0, range(4), 3)], PAGE, CPU)
    wanted, _ = Target(model, None).run(Piece([1, 2, 3], Proposal(), 0, range(4), 3))
    assert differ(runner.run(batch).logits, wanted) < CLOSE[torch.float64]
