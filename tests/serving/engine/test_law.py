"""The whole engine, sampled: the frequency of outputs is that of the target, whoever proposes.

A dozen settings with fixed seeds; the chance that any of them fails although all is well is 1e-3.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from functools import partial
from itertools import count
from typing import Any

import numpy as np
import pytest
from scipy import stats

from outrider_serving.engine.types import Request, SamplingParams
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.settings import Proposer
from serving.engine import proposers
from serving.engine.suffixes import warm_suffix
from serving.engine.support import LONG, bench, building, logits_of, request

PROMPT = (30, 31, 32)
BASE: dict[str, Any] = {"temperature": 0.7, "top_p": 0.8}
N = 20_000 if LONG else 800

Make = Callable[[list[list[int]]], object]

OFTEN_ACCEPTED = ("suffix",)
"""Cases of which more than half of the proposed tokens are right."""

NOTHING_ACCEPTED = ("nobody", "wrong tokens")
"""Cases whose proposals, if there are any, are never right; add a proposer that has nothing to copy here."""

TIGHT = ("drawn trees", "stops by itself")
"""Cases whose proposals are cut to the room that a hundred requests leave each other in a pass."""

CASES: dict[str, tuple[Make, dict[str, Any]]] = {
    "nobody": (lambda _: proposers.Fixed(), BASE),
    "right tokens": (proposers.Oracle, BASE),
    "wrong tokens": (lambda known: proposers.Oracle(known, wrong=1), BASE),
    "a tree of chosen tokens": (proposers.Bushy, BASE),
    "drawn chains": (lambda _: proposers.Drawn(320, width=1), BASE),
    "drawn trees": (lambda _: proposers.Drawn(320, width=3), {"temperature": 1.0}),
    "drawn on a support": (lambda _: proposers.Drawn(320, width=2, support=40), {"temperature": 1.2}),
    "stops by itself": (lambda _: proposers.SelfStopping(320), BASE),
    "top_k and min_p": (lambda _: proposers.Drawn(320), {"temperature": 1.1, "top_k": 12, "min_p": 0.05}),
    "penalties": (proposers.Oracle, {"frequency_penalty": 1.5, "repetition_penalty": 1.4, **BASE}),
    "bans and biases": (
        lambda _: proposers.Drawn(320, width=2),
        {"banned_token_ids": tuple(range(100, 200)), "logit_bias": ((30, 3.0),), "temperature": 0.9},
    ),
    "seeds": (lambda _: proposers.Drawn(320, width=2), BASE),
    "suffix": (warm_suffix, {"temperature": 0.3}),
    "suffix, trees": (partial(warm_suffix, width=3), {"temperature": 0.5}),
}


def law(loaded: LoadedModel, params: dict[str, Any], *output: int) -> dict[int, float]:
    """The target's distribution after the prompt and an output, by transformers' own attention."""
    wanted = TokenLaw(
        SamplingParams(max_tokens=3, **params), PROMPT, vocab_size=loaded.vocab_size, ends=frozenset()
    )
    wanted.append(output)
    found = wanted.distribution(logits_of(loaded, [*PROMPT, *output])[-1])
    return {found.token(n): prob for n, prob in enumerate(found.probs.tolist())}


def written(first: dict[int, float], second: dict[int, float], likely: int) -> list[list[int]]:
    """Texts that begin with the prompt: the likeliest, first and most often, and two others."""
    *_, after, best = sorted(second, key=second.__getitem__)
    *_, other, _ = sorted(first, key=first.__getitem__)
    outputs = [likely, best, best], [likely, after, best], [likely, best, best], [other, best, best]
    return [[*PROMPT, *output] for output in outputs]


@pytest.mark.parametrize("name", CASES)
def test_frequencies_of_two_tokens_are_those_of_the_target(tiny_gemma3: LoadedModel, name: str) -> None:
    make, params = CASES[name]
    first = law(tiny_gemma3, params)
    likely = max(first, key=first.__getitem__)
    second = law(tiny_gemma3, params, likely)
    expected: dict[tuple[int, ...], float] = {
        (likely, token): first[likely] * prob for token, prob in second.items()
    }
    expected |= {(token,): prob for token, prob in first.items() if token != likely}

    proposer = make(written(first, second, likely))
    streams = count()

    def draws(_: Request) -> tuple[GeneratorRandomness, GeneratorRandomness]:
        one, two = np.random.default_rng([3, next(streams)]).spawn(2)
        return GeneratorRandomness(one), GeneratorRandomness(two)

    def asked(n: int) -> Request:
        seed = {"seed": 1000 + n} if name == "seeds" else {}
        return request(PROMPT, max_tokens=3, ignore_eos=True, **params, **seed)

    counts: Counter[tuple[int, ...]] = Counter()
    proposed = accepted = 0
    engine = bench(
        tiny_gemma3,
        Proposer(max_depth=2),
        build=building(proposer),
        draws=draws,
        max_running=100,
        pages=2000,
        step_tokens=150 if name in TIGHT else 1000,
    )
    for start in range(0, N, 100):
        for result in engine.run(*(asked(start + n) for n in range(100))):
            proposed += result.proposed
            accepted += result.accepted
            counts[result.tokens[:2] if result.tokens[0] == likely else result.tokens[:1]] += 1

    assert set(counts) <= set(expected)
    assert (proposed > 0) == (name != "nobody")
    assert (accepted > 0) == (name not in NOTHING_ACCEPTED)
    assert accepted > proposed / 2 or name not in OFTEN_ACCEPTED
    assert chi_square(counts, expected) > 1e-3 / len(CASES)


def chi_square(counts: Counter[tuple[int, ...]], expected: dict[tuple[int, ...], float]) -> float:
    """The p-value of the counts; outcomes that are expected less than five times are counted together."""
    outcomes = [outcome for outcome, prob in expected.items() if prob * N >= 5]
    observed = [counts[outcome] for outcome in outcomes]
    wanted = [expected[outcome] * N for outcome in outcomes]
    rest = N - sum(wanted)
    if rest >= 1:
        observed.append(N - sum(observed))
        wanted.append(rest)
    wanted = [value * sum(observed) / sum(wanted) for value in wanted]
    return float(stats.chisquare(observed, wanted).pvalue)
