"""Targets of published shapes with random weights, and what runs them over pages."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from transformers import AutoModelForCausalLM, LlamaConfig, PreTrainedModel

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.cuda.graphs import Capture, CudaCapture
from outrider_serving.engine.target.cuda.runner import CudaRunner, graph_bytes_of
from outrider_serving.engine.target.cuda.shapes import room_of
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.runner import Pass
from outrider_serving.engine.target.triton.attention import TritonPass

PAGE = 16

_LLAMA: dict[str, Any] = {
    "vocab_size": 128_256,
    "num_key_value_heads": 8,
    "max_position_embeddings": 131_072,
    "rms_norm_eps": 1e-5,
    "pad_token_id": None,
    "bos_token_id": None,
    "eos_token_id": None,
}
_ROPE: dict[str, Any] = {
    "rope_type": "llama3",
    "rope_theta": 500_000.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
SHAPES: dict[str, dict[str, Any]] = {
    "Llama 3.2 1B": {
        **_LLAMA,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "head_dim": 64,
        "tie_word_embeddings": True,
        "rope_parameters": {**_ROPE, "factor": 32.0},
    },
    "Llama 3.1 8B": {
        **_LLAMA,
        "hidden_size": 4096,
        "intermediate_size": 14_336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "head_dim": 128,
        "tie_word_embeddings": False,
        "rope_parameters": {**_ROPE, "factor": 8.0},
    },
}


def model_of(
    shape: dict[str, Any],
    device: torch.device,
    dtype: torch.dtype = torch.bfloat16,
    attention: str = IMPLEMENTATION,
) -> PreTrainedModel:
    """A random model, always of the same weights."""
    torch.manual_seed(0)
    models: Any = AutoModelForCausalLM
    with device:
        model = models.from_config(LlamaConfig(**shape), dtype=dtype, attn_implementation=attention)
    assert isinstance(model, PreTrainedModel)
    model.train(False)
    return model


@dataclass(frozen=True, slots=True)
class Target:
    """A model on a runner, and its pages.

    Attributes:
        model: the model.
        store: its keys and values.
        runner: runs it.
        tokens: how many tokens each request has pages for.
        reserve: bytes that an engine would leave free for its graphs.
    """

    model: PreTrainedModel
    store: KVStore
    runner: CudaRunner
    tokens: int
    reserve: int

    def pages(self, request: int) -> range:
        """The pages of a request."""
        each = self.tokens // PAGE
        return range(request * each, (request + 1) * each)

    def run(self, pieces: Sequence[Piece], layers: Sequence[int] = ()) -> Pass:
        """One pass, as the engine has it run: what it takes on the host is part of it."""
        return self.runner.run(pack(pieces, PAGE, self.runner.batches_on), layers)


def target_of(
    model: PreTrainedModel, requests: int, tokens: int, captures: Callable[[], Capture] | None = None
) -> Target:
    """A model with pages for so many requests of so many tokens, a multiple of the page.

    Args:
        model: attends over our pages.
        requests: how many there may be.
        tokens: of each.
        captures: CUDA graphs unless said otherwise.
    """
    config, device = model.config, model.device
    heads, size = config.num_key_value_heads, config.head_dim
    shapes = {layer: KVShape(heads, size, size) for layer in range(config.num_hidden_layers)}
    store = KVStore(shapes, requests * tokens, model.dtype, device)
    for keys_and_values in store.pairs:
        for tensor in keys_and_values:
            tensor.normal_()  # of texts that nobody has read: a step costs the same
    limits = EngineLimits(
        pages=requests * tokens // PAGE, page_size=PAGE, max_running=requests, max_waiting=0, step_tokens=2048
    )
    multiprocessors = torch.cuda.get_device_properties(device).multi_processor_count
    room = room_of(limits, tokens, shapes.values(), config.num_attention_heads, multiprocessors)
    runner = CudaRunner(model, store, room, TritonPass, captures or (lambda: CudaCapture(device)))
    return Target(model, store, runner, tokens, graph_bytes_of(model, shapes, limits, tokens))
