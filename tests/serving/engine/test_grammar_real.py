"""The real model's tokenizer, of 262,144 tokens: what a grammar allows, its own decoder writes."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable

import pytest
import torch

from outrider_serving.engine.types import SamplingParams
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.grammar import choice_grammar, json_schema_grammar, regex_grammar
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.matcher import GrammarCompiler, Matcher
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.sampling.verification import Verdict, VerifyRow, verify

ITEM = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 9}, "n": {"type": "integer", "maximum": 99}},
    "required": ["name", "n"],
    "additionalProperties": False,
}

GRAMMARS: dict[str, tuple[str, Callable[[str], bool]]] = {
    "schema": (json_schema_grammar(ITEM), lambda text: list(json.loads(text)) == ["name", "n"]),
    "expression": (
        regex_grammar(r" [A-Z]\w{2,9}, (é|🦦|\n){3}"),
        lambda text: re.fullmatch(r" [A-Z]\w{2,9}, (é|🦦|\n){3}", text, re.ASCII) is not None,
    ),
    "choices": (
        choice_grammar([" the otter", "日本語 🦦", "<eos>"]),
        lambda text: text[:2] in (" t", "日本", "<e"),
    ),
}


@pytest.fixture(scope="module")
def compiler(gemma: LoadedModel) -> GrammarCompiler:
    return GrammarCompiler(gemma.tokenizer, vocab_size=gemma.vocab_size, eos_token_ids=gemma.eos_token_ids)


@pytest.mark.parametrize("name", GRAMMARS)
def test_walks_end_in_text_of_the_grammar(gemma: LoadedModel, compiler: GrammarCompiler, name: str) -> None:
    grammar, accepts = GRAMMARS[name]
    for seed in range(10):
        matcher, rng, tokens = compiler.matcher(grammar), random.Random(seed), list[int]()
        while not tokens or tokens[-1] not in gemma.eos_token_ids:
            mask = matcher.mask()
            assert mask.shape == (gemma.vocab_size,)
            tokens.append(rng.choice(mask.nonzero().flatten().tolist()))
            matcher.advance(tokens[-1:])
        text = gemma.tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        assert accepts(text), text


@pytest.mark.parametrize("indent", [None, 4])
def test_json_as_the_tokenizer_spells_it_is_allowed(
    gemma: LoadedModel, compiler: GrammarCompiler, indent: int | None
) -> None:
    schema = {"type": "array", "items": ITEM}
    text = json.dumps([{"name": "naïve 🦦\n", "n": -7}] * 20, ensure_ascii=False, indent=indent)
    tokens = gemma.tokenizer(text, add_special_tokens=False).input_ids
    matcher = compiler.matcher(json_schema_grammar(schema))
    for at, token in enumerate(tokens):
        assert matcher.mask(tokens[:at])[token]
    matcher.advance(tokens)
    assert set(matcher.mask().nonzero().flatten().tolist()) == gemma.eos_token_ids


PATTERNS = json_schema_grammar(
    {
        "type": "object",
        "properties": {
            f"f{i}": {"type": "string", "pattern": f"^.*[A-Z].{{0,{300 + i}}}$"} for i in range(10)
        },
        "required": [f"f{i}" for i in range(10)],
        "additionalProperties": False,
    }
)
"""A parser that is asked all along is worn out in 60 tokens."""


@pytest.mark.parametrize("neighbour", [False, True])
def test_a_schema_that_wears_parsers_out_is_followed_on(
    gemma: LoadedModel, compiler: GrammarCompiler, neighbour: bool
) -> None:
    def law(constraint: Matcher | None) -> TokenLaw:
        params = SamplingParams(max_tokens=150, temperature=0, presence_penalty=0.1)
        ends = gemma.eos_token_ids
        return TokenLaw(params, (5,), vocab_size=gemma.vocab_size, ends=ends, constraint=constraint)

    constrained, generator = law(compiler.matcher(PATTERNS)), torch.Generator().manual_seed(0)
    while constrained.position < 150:
        logits = torch.randn(2, gemma.vocab_size, generator=generator)
        logits[:, 30_000:] -= 20  # words rather than what only looks like them
        laws = [constrained, law(None)] if neighbour else [constrained]
        rows = [VerifyRow(each, Proposal(), at, None, GeneratorRandomness()) for at, each in enumerate(laws)]
        verdict = verify(rows, logits)[0]
        assert isinstance(verdict, Verdict), (constrained.position, verdict)
        constrained.append(verdict.tokens)
