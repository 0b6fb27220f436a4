"""What steps cost: decoding against what memory allows, verification against decoding."""

from __future__ import annotations

import random
from collections.abc import Callable

import torch
from tools.gpu_check.finding import Finding, Findings
from tools.gpu_check.target import PAGE, SHAPES, Target, model_of, target_of
from tools.gpu_check.timing import bandwidth, seconds
from transformers import PreTrainedModel

from outrider_serving.engine.target.attention import Scoring
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.cuda.graphs import CudaCapture
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.triton.attention import TritonPass
from outrider_serving.engine.target.triton.tables import Maxima, Tables, tables_of
from outrider_serving.sampling.proposal import Proposal

_CONTEXT = 1024
_REQUESTS = 64
_VERIFIED = 8
"""Tokens of a request in a verification step: the last one and a chain of 7."""


def find(device: torch.device) -> Findings:
    """Both models, then attention alone by tile."""
    speed = bandwidth(device)
    yield Finding("copying", f"{speed / 1e12:.2f} TB/s", numbers={"bytes_per_second": speed})
    for name, shape in SHAPES.items():
        target = target_of(model_of(shape, device), _REQUESTS, _CONTEXT + 64)
        yield from _steps(name, target, speed)
        del target
        torch.cuda.empty_cache()
    for tile in (1, 4, 8, 16):
        yield _attention(tile, device)


def _steps(name: str, target: Target, speed: float) -> Findings:
    """Times are of whole passes, from packing on the host to the end on the device."""
    alone = {requests: seconds(_step(target, requests, 1)) for requests in (1, 8, _REQUESTS)}
    for requests, taken in alone.items():
        yield _decoding(name, requests, taken, _bytes(target.model, requests), speed)
    for requests in (1, 8):
        taken = seconds(_step(target, requests, _VERIFIED))
        yield _verifying(name, requests, taken, alone[requests])


def _decoding(name: str, requests: int, taken: float, read: int, speed: float) -> Finding:
    least = read / speed
    return Finding(
        f"{name}: decoding, {requests} at once over {_CONTEXT} tokens",
        f"{taken * 1e3:.2f} ms, {taken / least:.2f} times what {read / 1e9:.1f} GB take at that speed",
        numbers={"seconds": taken, "bytes": read, "least_seconds": least},
    )


def _verifying(name: str, requests: int, taken: float, decoding: float) -> Finding:
    return Finding(
        f"{name}: verifying {_VERIFIED} tokens, {requests} at once",
        f"{taken * 1e3:.2f} ms, {taken / decoding:.2f} of a decoding step",
        numbers={"seconds": taken, "decoding_seconds": decoding},
    )


def _step(target: Target, requests: int, tokens: int) -> Callable[[], object]:
    rng = random.Random(tokens)
    pieces = [
        Piece(
            [rng.randrange(100_000)],
            Proposal.chain([rng.randrange(100_000) for _ in range(tokens - 1)]),
            _CONTEXT,
            target.pages(request),
            1,
        )
        for request in range(requests)
    ]
    return lambda: target.run(pieces)


def _bytes(model: PreTrainedModel, requests: int) -> int:
    """What a decoding step reads: weights, of the embedding what is looked up, and keys and values."""
    config = model.config
    embedding = next(model.get_input_embeddings().parameters())
    weights = sum(one.numel() for one in model.parameters())
    if not config.tie_word_embeddings:
        weights -= embedding.numel()
    each = config.num_hidden_layers * 2 * config.num_key_value_heads * config.head_dim
    return int((weights + requests * _CONTEXT * each) * embedding.element_size())


def _attention(tile: int, device: torch.device) -> Finding:
    """A layer of Llama 3.1 8B. One tile serves decoding and verification: what does that cost decoding?"""
    heads, group, size, requests, context, layers = 8, 4, 128, 8, 4096, 32
    each = context // PAGE + 1
    pieces = [
        Piece([1], Proposal(), context, range(one * each, (one + 1) * each), 1) for one in range(requests)
    ]
    batch = pack(pieces, PAGE, torch.device("cpu"))
    maxima = Maxima(requests, requests, each, PAGE, nodes=64, tile=tile)
    # Each layer has its own keys and values, as those of one would be found in the cache.
    shapes = {layer: KVShape(heads, size, size) for layer in range(layers)}
    store = KVStore(shapes, requests * each * PAGE, torch.bfloat16, device)
    for keys_and_values in store.pairs:
        for tensor in keys_and_values:
            tensor.normal_()
    tables = Tables.on(device, maxima)
    tables.put(tables_of(pieces, batch, maxima))
    attention, scoring = TritonPass(store, tables), Scoring(size**-0.5)
    query, key, value = (
        torch.randn((count, requests, size), device=device).to(torch.bfloat16)
        for count in (heads * group, heads, heads)
    )

    def work() -> None:
        for layer in range(layers):
            attention.attend(layer, query, key, value, scoring)

    taken = seconds(CudaCapture(device)(work)) / layers
    read = 2 * heads * size * 2 * requests * context
    return Finding(
        f"attention alone, tile {tile}: {requests} decode over {context} tokens",
        f"{taken * 1e6:.0f} us a layer, {read / taken / 1e12:.2f} TB/s",
        numbers={"seconds": taken, "bytes": read},
    )
