"""The whole engine, sampled: the frequency of outputs is that of the target, with proposals and without."""

from __future__ import annotations

import os
from collections import Counter
from itertools import count
from typing import Any

import numpy as np
import pytest
import torch
from scipy import stats

from outrider_serving.engine.types import Request
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.distribution import distribution
from outrider_serving.sampling.randomness import GeneratorRandomness
from serving.engine.support import NONE, Oracle, building, engine_of, own_attention, request, run

PROMPT = (30, 31, 32)
TEMPERATURE, TOP_P = 0.7, 0.8
N = 20_000 if os.environ.get("OUTRIDER_TEST_LONG") == "1" else 600


@torch.inference_mode()
def law(loaded: LoadedModel, text: tuple[int, ...]) -> dict[int, float]:
    """The target's distribution after a text, by transformers' own attention."""
    with own_attention(loaded):
        logits = loaded.model(torch.tensor([text]), use_cache=False).logits[0, -1]
    found = distribution(logits, TEMPERATURE, TOP_P)
    return {found.token(n): prob for n, prob in enumerate(found.probs.tolist())}


@pytest.mark.parametrize("how", ["plain", "right", "wrong"])
def test_frequencies_of_two_tokens_are_those_of_the_target(tiny_gemma3: LoadedModel, how: str) -> None:
    first = law(tiny_gemma3, PROMPT)
    likely = max(first, key=first.__getitem__)
    second = law(tiny_gemma3, (*PROMPT, likely))
    expected: dict[tuple[int, ...], float] = {
        (likely, token): first[likely] * prob for token, prob in second.items()
    }
    expected |= {(token,): prob for token, prob in first.items() if token != likely}

    # One continuation is proposed to every request: the likely tokens, or an unlikely one after them.
    after = (max if how == "right" else min)(second, key=second.__getitem__)
    oracle = Oracle([(*PROMPT, likely, after, after)])
    seeds = count()

    def randomness(_: Request) -> GeneratorRandomness:
        return GeneratorRandomness(np.random.default_rng([3, next(seeds)]))

    counts: Counter[tuple[int, ...]] = Counter()
    wanted: dict[str, Any] = {"max_tokens": 3, "temperature": TEMPERATURE, "top_p": TOP_P, "ignore_eos": True}
    if how == "plain":
        wanted["speculation"] = NONE
    with engine_of(tiny_gemma3, build=building(oracle), randomness=randomness) as engine:
        accepted = 0
        for _ in range(0, N, 100):
            for result in run(engine, *(request(PROMPT, **wanted) for _ in range(100))):
                accepted += result.usage.accepted_tokens
                counts[result.tokens[:2] if result.tokens[0] == likely else result.tokens[:1]] += 1

    assert set(counts) <= set(expected)
    assert (accepted > 0) == (how != "plain")
    outcomes = [outcome for outcome, prob in expected.items() if prob * N >= 5]
    observed = [counts[outcome] for outcome in outcomes]
    wanted_counts = [expected[outcome] * N for outcome in outcomes]
    rest = N - sum(wanted_counts)
    if rest >= 1:
        observed.append(N - sum(observed))
        wanted_counts.append(rest)
    wanted_counts = [value * sum(observed) / sum(wanted_counts) for value in wanted_counts]
    assert stats.chisquare(observed, wanted_counts).pvalue > 1e-3
