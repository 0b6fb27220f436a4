"""The real model in float32: greedy output is that of transformers' own generate, with and without proposals.

A target pass over several tokens can differ from one over a single token in the last bits. Where that turns
the argmax, the two candidates are a near-tie: it is counted, and a gap above NEAR_TIE fails the test.
"""

from __future__ import annotations

import pytest

from outrider_serving.engine.detokenize import Detokenizer
from outrider_serving.models.loading import LoadedModel
from serving.engine.support import NGRAM, NONE, engine_of, gap, reference, request, run

NEAR_TIE = 1e-3
"""Largest gap of logits, in float32, that other last bits may turn; logits of this model are around 20."""

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


def decode(loaded: LoadedModel, tokens: list[int]) -> str:
    text = loaded.tokenizer.decode(tokens, skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.mark.parametrize("kind", PROMPTS)
def test_greedy_output_is_that_of_generate(gemma: LoadedModel, kind: str) -> None:
    prompt = gemma.tokenizer(PROMPTS[kind]).input_ids
    expected = reference(gemma, prompt, TOKENS, eos=False)
    with engine_of(gemma) as engine:
        results = [
            run(engine, request(prompt, max_tokens=TOKENS, ignore_eos=True, speculation=how))[0]
            for how in (NONE, NGRAM)
        ]
    ties = 0
    for result in results:
        if result.tokens != expected:
            at = next(n for n in range(TOKENS) if result.tokens[n] != expected[n])
            assert gap(gemma, [*prompt, *expected[:at]], result.tokens[at], expected[at]) < NEAR_TIE
            ties += 1
    print(f"{kind}: {len(prompt)} prompt tokens, {ties} near-ties, {results[1].usage}")
    if kind != "open":
        assert results[1].usage.accepted_tokens > TOKENS / 2
    assert results[1].text == decode(gemma, [*prompt, *results[1].tokens])[len(decode(gemma, prompt)) :]


def test_seeded_output_is_the_same_with_and_without_proposals(gemma: LoadedModel) -> None:
    prompt = gemma.tokenizer(PROMPTS["repeat"]).input_ids
    how = {"max_tokens": 32, "temperature": 0.7, "top_p": 0.95, "seed": 11, "ignore_eos": True}
    with engine_of(gemma) as engine:
        plain, ngram = (run(engine, request(prompt, speculation=s, **how))[0] for s in (NONE, NGRAM))
    assert ngram.tokens == plain.tokens
    assert ngram.usage.accepted_tokens > 0


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
