"""Passes from graphs against the same passes launched as they come, as tables change between replays."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from functools import partial

import torch
from tools.gpu_check.finding import Finding, Findings
from tools.gpu_check.target import SHAPES, Target, model_of, target_of

from outrider_serving.engine.target.batch import Piece
from outrider_serving.engine.target.cuda.graphs import CaptureError, Work
from outrider_serving.engine.target.cuda.shapes import SIZES
from outrider_serving.engine.target.runner import Pass
from outrider_serving.sampling.proposal import ROOT, Proposal

_LAYERS = 4
_REQUESTS, _TOKENS = 32, 1024

_LIMIT = {torch.bfloat16: 0.1, torch.float32: 1e-4}
"""Most that logits and hidden states may differ by, in standard deviations of theirs (root mean square).

A padded pass is a matrix product of another shape, which may add in another order.
"""


def find(device: torch.device) -> Findings:
    """Two models of few layers, each with graphs and without."""
    for dtype in _LIMIT:
        model = model_of({**SHAPES["Llama 3.2 1B"], "num_hidden_layers": _LAYERS}, device, dtype)
        make = partial(target_of, model, _REQUESTS, _TOKENS)
        launched, without = _made(device, partial(make, captures=lambda: _refuse))
        graphs, taken = _made(device, make)
        name = str(dtype).removeprefix("torch.")
        captured = graphs.runner.captured
        yield Finding(f"{name}: captured", f"{captured} of {len(SIZES)} sizes", right=captured == len(SIZES))
        yield _memory(name, taken - without, graphs.reserve)
        texts = _Texts()
        for layers in ((), (2, _LAYERS)):
            what = f"{name}, hidden states {list(layers)}"
            yield from _compare(what, texts, graphs, launched, layers, _LIMIT[dtype])
        yield Finding(
            f"{name}: captured anew", str(graphs.runner.captured - captured), graphs.runner.fallbacks == 0
        )


def _made(device: torch.device, make: Callable[[], Target]) -> tuple[Target, int]:
    """A target, and how many bytes of the device it keeps."""
    torch.cuda.empty_cache()
    free, _ = torch.cuda.mem_get_info(device)
    target = make()
    torch.cuda.synchronize(device)
    torch.cuda.empty_cache()
    return target, free - torch.cuda.mem_get_info(device)[0]


def _memory(name: str, taken: int, reserve: int) -> Finding:
    """What a target with graphs takes beyond one without is in what an engine leaves free for them."""
    return Finding(
        f"{name}: memory of the graphs",
        f"{taken / 2**20:.0f} MiB of {reserve / 2**20:.0f} MiB that are left free for them",
        right=taken <= reserve,
        numbers={"bytes": taken, "reserve": reserve},
    )


def _refuse(_: Work) -> Work:
    raise CaptureError("graphs are not wanted here")


class _Texts:
    """Requests that grow at random, in batches of so many tokens."""

    def __init__(self) -> None:
        self._rng = random.Random(1)
        self._contexts = [0] * _REQUESTS

    def pieces(self, tokens: int, graphs: Target) -> list[Piece]:
        """Decoding, trees and pieces of prompts; all their logits are wanted."""
        pieces: list[Piece] = []
        for request in self._rng.sample(range(_REQUESTS), _REQUESTS):
            left = tokens - sum(piece.tokens for piece in pieces)
            if not left:
                break
            last = len(pieces) == _REQUESTS - 1
            pending = left if last else self._rng.choice([1, min(left, self._rng.randint(1, 200))])
            nodes = 0 if last else self._rng.choice([0, min(left - pending, 12)])
            pieces.append(self._piece(request, pending, nodes, graphs))
        return pieces

    def _piece(self, request: int, pending: int, nodes: int, graphs: Target) -> Piece:
        if self._contexts[request] + pending + nodes > _TOKENS:
            self._contexts[request] = 0
        context, self._contexts[request] = self._contexts[request], self._contexts[request] + pending
        parents = tuple(self._rng.randrange(ROOT, node) if node else ROOT for node in range(nodes))
        text = [self._rng.randrange(100_000) for _ in range(pending)]
        proposal = Proposal(tuple(range(nodes)), parents)
        return Piece(text, proposal, context, graphs.pages(request), pending)


def _compare(
    what: str, texts: _Texts, graphs: Target, launched: Target, layers: Sequence[int], limit: float
) -> Findings:
    """Full sizes, whose products have the same shapes, and padded ones; each size comes several times."""
    for name, spared in (("full", 0), ("padded", 1)):
        worst, equal, count = 0.0, 0, 0
        for size in (*SIZES[1:], *SIZES[1:], *SIZES[:0:-1]):
            pieces = texts.pieces(size - spared, graphs)
            ran, wanted = graphs.run(pieces, layers), launched.run(pieces, layers)
            worst = max(worst, _difference(ran, wanted))
            equal += torch.equal(ran.logits, wanted.logits)
            count += 1
        figure = (
            f"off by {worst:.1e} of at most {limit:g} standard deviations; bits equal in {equal} of {count}"
        )
        numbers = {"worst": worst, "limit": limit, "equal": equal, "passes": count}
        yield Finding(f"{what}: {name} sizes", figure, worst <= limit, numbers)


def _difference(ran: Pass, wanted: Pass) -> float:
    pairs = [
        (ran.logits, wanted.logits),
        *((ran.hidden[layer], wanted.hidden[layer]) for layer in wanted.hidden),
    ]
    return max(
        float((one.double() - other.double()).pow(2).mean().sqrt() / other.double().std())
        for one, other in pairs
    )
