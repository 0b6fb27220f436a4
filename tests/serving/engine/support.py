"""What the engine's tests share: engines, whole results, the reference by transformers itself."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import count, product
from typing import Any, cast

import torch

from outrider_serving.depth import FullDepth
from outrider_serving.engine.core import EngineCore
from outrider_serving.engine.records import StepRecord
from outrider_serving.engine.residence import Build
from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.types import (
    Delta,
    EngineError,
    FinishReason,
    Labels,
    Request,
    SamplingParams,
    SpeculationOverride,
    TokenLogprobs,
)
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Proposer as ProposerProtocol
from outrider_serving.settings import Arm, Method, NgramSettings, PodSettings, Proposer, default_settings

ARM = SpeculationOverride()
NONE = SpeculationOverride(method=Method.NONE)
NGRAM = SpeculationOverride(method=Method.NGRAM)
SUFFIX = SpeculationOverride(method=Method.SUFFIX)

LONG = os.environ.get("OUTRIDER_TEST_LONG") == "1"

NEAR_TIE = 1e-5
"""Two logits closer than this may swap: norms, RoPE and eager softmax run in float32 inside transformers."""

_ids = count()


def sampled(*axes: Iterable[str]) -> list[tuple[str, ...]]:
    """All combinations in a long run; else the last axis turns with the others."""
    *others, last = [list(axis) for axis in axes]
    if LONG:
        return list(product(*others, last))
    return [(*one, last[n % len(last)]) for n, one in enumerate(product(*others))]


def request(
    prompt: Sequence[int],
    *,
    speculation: SpeculationOverride = ARM,
    tenant: str = "",
    history: str | None = "everybody",
    private: bool = False,
    group: str = "",
    deadline: float | None = None,
    **params: Any,
) -> Request:
    """A request with a fresh id; greedy and 32 tokens unless said otherwise."""
    chosen = SamplingParams(**{"max_tokens": 32, "temperature": 0, **params})
    labels = Labels("other", "completions", chosen.sampling_class, "stable", 0)
    return Request(
        f"r{next(_ids)}",
        tuple(prompt),
        chosen,
        labels,
        tenant=tenant,
        history=history,
        private=private,
        group=group,
        deadline=deadline,
        speculation=speculation,
    )


@dataclass
class Result:
    """Everything that a request gave."""

    deltas: list[Delta] = field(default_factory=list)
    error: EngineError | None = None

    @property
    def tokens(self) -> tuple[int, ...]:
        return tuple(token for delta in self.deltas for token in delta.tokens)

    @property
    def logprobs(self) -> tuple[TokenLogprobs, ...]:
        return tuple(logprob for delta in self.deltas for logprob in delta.logprobs)

    @property
    def finish_reason(self) -> FinishReason | None:
        return self.deltas[-1].finish_reason if self.deltas else None

    @property
    def ended(self) -> bool:
        return self.error is not None or self.finish_reason is not None

    @property
    def steps(self) -> int:
        return len(self.deltas)

    @property
    def proposed(self) -> int:
        return sum(delta.proposed for delta in self.deltas)

    @property
    def accepted(self) -> int:
        return sum(delta.accepted for delta in self.deltas)


@dataclass
class Bench:
    """An engine, and what all its requests have given so far."""

    core: EngineCore
    results: dict[str, Result] = field(default_factory=dict)
    records: list[StepRecord] = field(default_factory=list)

    def submit(self, *wanted: Request) -> list[Result]:
        for one in wanted:
            self.core.submit(one)
            self.results[one.id] = Result()
        return [self.results[one.id] for one in wanted]

    def step(self, meanwhile: Callable[[], None] = lambda: None) -> None:
        """One step; `meanwhile` is called while its pass runs."""
        end = self.core.begin_step()
        meanwhile()
        output = end()
        for delta in output.deltas:
            self.results[delta.request_id].deltas.append(delta)
        for request_id, error in output.failures:
            self.results[request_id].error = error
        if output.record is not None:
            self.records.append(output.record)

    def run(self, *wanted: Request, between: Callable[[], None] = lambda: None) -> list[Result]:
        """All requests at once, each to its end; `between` is called before every step."""
        results = self.submit(*wanted)
        for _ in range(10_000):
            if not self.core.busy:
                return results
            between()
            self.step()
        raise AssertionError("the requests do not end")


def bench(
    loaded: LoadedModel,
    proposer: Proposer | PodSettings | None = None,
    *,
    pages: int = 256,
    page_size: int = 4,
    max_running: int = 16,
    max_waiting: int = 10_000,
    step_tokens: int = 256,
    **how: Any,
) -> Bench:
    """An engine with small pages."""
    settings = proposer if isinstance(proposer, PodSettings) else default_settings(proposer)
    limits = EngineLimits(
        pages=pages,
        page_size=page_size,
        max_running=max_running,
        max_waiting=max_waiting,
        step_tokens=step_tokens,
    )
    how.setdefault("depths", FullDepth())  # what is proposed must not depend on how long things take
    return Bench(EngineCore(loaded, settings, limits, **how))


def run(loaded: LoadedModel, *wanted: Request, **how: Any) -> list[Result]:
    """All requests at once in an engine of their own; `how` is for `bench`."""
    return bench(loaded, **how).run(*wanted)


def building(proposer: object) -> Build:
    """What builds this proposer for every method but none."""
    return lambda settings: None if settings.method is Method.NONE else cast("ProposerProtocol", proposer)


def two_arms(in_force: str = "first") -> PodSettings:
    """Settings with two arms, whose proposers `building_two` tells apart."""
    arms = {
        name: Arm(proposer=Proposer(ngram=NgramSettings(min_match=least)))
        for name, least in (("first", 1), ("second", 2))
    }
    return PodSettings(generation=0, arms=arms, in_force=in_force)


def building_two(first: object, second: object) -> Build:
    """What builds the proposers of `two_arms`."""

    def build(settings: Proposer) -> ProposerProtocol | None:
        if settings.method is Method.NONE:
            return None
        least = settings.ngram.min_match if settings.ngram is not None else 1
        return cast("ProposerProtocol", first if least == 1 else second)

    return build


@contextmanager
def own_attention(loaded: LoadedModel) -> Iterator[None]:
    """Meanwhile the model attends as transformers does by default; no engine may run it."""
    loaded.model.set_attn_implementation("sdpa" if loaded.model._supports_sdpa else "eager")
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
            eos_token_id=sorted(loaded.eos_token_ids) if eos else loaded.vocab_size,
            do_sample=False,
            pad_token_id=0,
        )
    return tuple(out[0, len(prompt) :].tolist())


@torch.inference_mode()
def logits_of(loaded: LoadedModel, text: Sequence[int]) -> torch.Tensor:
    """[tokens, vocabulary]: what transformers itself gives after every token of a text."""
    with own_attention(loaded):
        logits: torch.Tensor = loaded.model(torch.tensor([list(text)]), use_cache=False).logits[0]
    return logits


def narrowest(loaded: LoadedModel, prompt: Sequence[int], output: Sequence[int]) -> float:
    """The least gap between the two highest logits that decided a token of a greedy output."""
    logits = logits_of(loaded, [*prompt, *output])[len(prompt) - 1 : -1]
    top = logits.topk(2).values
    return float((top[:, 0] - top[:, 1]).min())


def gap(loaded: LoadedModel, text: Sequence[int], first: int, second: int) -> float:
    """How far apart the logits of two candidates for the next token are."""
    logits = logits_of(loaded, text)[-1]
    return abs(float(logits[first] - logits[second]))
