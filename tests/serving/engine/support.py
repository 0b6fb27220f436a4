"""What the engine's tests share: engines, whole results, the reference, a proposer that knows."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import count
from typing import Any, cast

import torch

from outrider_serving.engine.attention import IMPLEMENTATION
from outrider_serving.engine.engine import Engine
from outrider_serving.engine.speculation import Build
from outrider_serving.engine.types import (
    Chunk,
    EngineError,
    FinishReason,
    Labels,
    Request,
    SamplingParams,
    SpeculationOverride,
    Usage,
)
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Observed, Proposal, Query
from outrider_serving.proposers.base import Proposer as ProposerProtocol
from outrider_serving.settings import Method, PodSettings, Proposer, default_settings

ARM = SpeculationOverride()
NONE = SpeculationOverride(method=Method.NONE)
NGRAM = SpeculationOverride(method=Method.NGRAM)

_ids = count()


def request(prompt: Sequence[int], *, speculation: SpeculationOverride = ARM, **params: Any) -> Request:
    """A request with a fresh id; greedy and 32 tokens unless said otherwise."""
    chosen = SamplingParams(**{"max_tokens": 32, "temperature": 0, **params})
    labels = Labels("other", "completions", chosen.sampling_class, "stable", 0)
    return Request(f"r{next(_ids)}", tuple(prompt), chosen, labels, speculation=speculation)


@dataclass(frozen=True)
class Result:
    """Everything that a request gave."""

    chunks: tuple[Chunk, ...]

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for chunk in self.chunks for token in chunk.token_ids)

    @property
    def text(self) -> str:
        return "".join(chunk.text for chunk in self.chunks)

    @property
    def usage(self) -> Usage:
        return self.chunks[-1].usage

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.chunks[-1].finish_reason


async def collect(engine: Engine, wanted: Request) -> Result:
    return Result(tuple([chunk async for chunk in engine.generate(wanted)]))


def run(engine: Engine, *wanted: Request) -> list[Result]:
    """All requests at once, each to its end."""

    async def together() -> list[Result]:
        return await asyncio.gather(*(collect(engine, one) for one in wanted))

    return asyncio.run(together())


@contextmanager
def engine_of(
    loaded: LoadedModel, proposer: Proposer | PodSettings | None = None, **how: Any
) -> Iterator[Engine]:
    settings = proposer if isinstance(proposer, PodSettings) else default_settings(proposer)
    engine = Engine(loaded, settings, **how)
    engine.start()
    try:
        yield engine
    finally:
        engine.close(drain=False)


@contextmanager
def own_attention(loaded: LoadedModel) -> Iterator[None]:
    """Meanwhile the model attends as transformers does by default; no engine may run it."""
    loaded.model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        loaded.model.set_attn_implementation(IMPLEMENTATION)


@torch.inference_mode()
def reference(
    loaded: LoadedModel, prompt: Sequence[int], max_tokens: int, *, eos: bool = True
) -> tuple[int, ...]:
    """Greedy output of transformers' own `generate`."""
    with own_attention(loaded):
        out = cast("Any", loaded.model).generate(
            torch.tensor([list(prompt)]),
            attention_mask=torch.ones((1, len(prompt)), dtype=torch.int64),
            max_new_tokens=max_tokens,
            min_new_tokens=None if eos else max_tokens,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


@torch.inference_mode()
def gap(loaded: LoadedModel, text: Sequence[int], first: int, second: int) -> float:
    """How far apart the logits of two candidates for the next token are."""
    with own_attention(loaded):
        logits = loaded.model(torch.tensor([list(text)]), use_cache=False, logits_to_keep=1).logits[0, -1]
    return abs(float(logits[first] - logits[second]))


def building(proposer: object) -> Build:
    """What builds this proposer for every method but none."""
    return lambda settings: None if settings.method is Method.NONE else cast("ProposerProtocol", proposer)


class Silent:
    """A sink for what nobody reads."""

    cancelled = False

    def put(self, chunk: Chunk) -> None:
        """Nothing."""

    def fail(self, error: EngineError) -> None:
        """Nothing."""


class Oracle:
    """Proposes the known continuation of each text, with a wrong token at every `wrong`-th position."""

    def __init__(self, texts: Sequence[Sequence[int]], wrong: int | None = None) -> None:
        self._known = [tuple(text) for text in texts]
        self._wrong = wrong
        self.texts: dict[str, tuple[int, ...]] = {}

    def propose(self, queries: Sequence[Query]) -> list[Proposal]:
        return [Proposal(self._continue(self.texts[q.request_id], q.max_depth)) for q in queries]

    def _continue(self, text: tuple[int, ...], depth: int) -> tuple[int, ...]:
        whole = next((known for known in self._known if known[: len(text)] == text), ())
        tokens = whole[len(text) : len(text) + depth]
        if self._wrong is None:
            return tokens
        return tuple(t ^ ((len(text) + n) % self._wrong == 0) for n, t in enumerate(tokens))

    def observe(self, events: Sequence[Observed]) -> None:
        for event in events:
            self.texts[event.request_id] = self.texts.get(event.request_id, ()) + event.tokens

    def forget(self, request_id: str) -> None:
        self.texts.pop(request_id, None)
