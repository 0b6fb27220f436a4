"""How a completion ends: end of sequence, stop strings, max_tokens; in an accepted run or across steps."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest

from outrider_serving.engine.sequence import Sequence as Running
from outrider_serving.engine.types import FinishReason
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.settings import Proposer
from serving.engine.support import NONE, Oracle, Result, Silent, building, engine_of, request, run

PROMPT = [40, 41, 42, 43, 44]
LENGTH = 24


def outputs(loaded: LoadedModel, known: tuple[int, ...], **how: Any) -> list[Result]:
    """The same request without proposals, and with right ones of every depth that matters."""
    results = []
    with engine_of(loaded) as engine:
        results += run(engine, request(PROMPT, speculation=NONE, **how))
    for depth in (1, 3, 8):
        oracle = Oracle([(*PROMPT, *known)])
        with engine_of(loaded, Proposer(max_depth=depth), build=building(oracle)) as engine:
            results += run(engine, request(PROMPT, **how))
    return results


def decode(loaded: LoadedModel, tokens: Sequence[int]) -> str:
    text = loaded.tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


@pytest.fixture(scope="module")
def plain(tiny: LoadedModel) -> Result:
    """A sampled output: greedy ones of a random model tend to repeat one token."""
    with engine_of(tiny) as engine:
        (result,) = run(
            engine,
            request(PROMPT, speculation=NONE, max_tokens=LENGTH, temperature=1, seed=8, ignore_eos=True),
        )
    return result


SAMPLED = {"temperature": 1, "seed": 8}


def invariants(result: Result) -> None:
    usage = result.usage
    assert usage.completion_tokens == len(result.tokens)
    assert usage.verification_steps == len(result.chunks)
    assert usage.accepted_tokens <= usage.proposed_tokens
    assert len(result.tokens) - usage.accepted_tokens in (
        usage.verification_steps,
        usage.verification_steps - 1,
    )
    assert [chunk.finish_reason for chunk in result.chunks[:-1]] == [None] * (len(result.chunks) - 1)


@pytest.mark.parametrize("limit", [1, 2, 3, 4, 9, 23])
def test_max_tokens_is_exact(tiny: LoadedModel, plain: Result, limit: int) -> None:
    for result in outputs(tiny, plain.tokens, max_tokens=limit, ignore_eos=True, **SAMPLED):
        assert result.tokens == plain.tokens[:limit]
        assert result.finish_reason is FinishReason.LENGTH
        invariants(result)


@pytest.mark.parametrize("at", [0, 1, 5, 6, 7, 20])
def test_end_of_sequence_counts_but_has_no_text(tiny: LoadedModel, plain: Result, at: int) -> None:
    eos = plain.tokens[at]
    first = plain.tokens.index(eos)
    ending = replace(tiny, eos_token_ids=frozenset({eos}))
    for result in outputs(ending, plain.tokens, max_tokens=LENGTH, **SAMPLED):
        assert result.tokens == plain.tokens[: first + 1]
        assert result.finish_reason is FinishReason.STOP
        before = decode(tiny, [*PROMPT, *plain.tokens[:first]])
        assert decode(tiny, PROMPT) + result.text == before
        invariants(result)


def test_end_of_sequence_can_be_ignored(tiny: LoadedModel, plain: Result) -> None:
    ending = replace(tiny, eos_token_ids=frozenset(plain.tokens))
    for result in outputs(ending, plain.tokens, max_tokens=LENGTH, ignore_eos=True, **SAMPLED):
        assert result.tokens == plain.tokens
        assert result.finish_reason is FinishReason.LENGTH


def test_text_ends_before_a_stop_string_wherever_steps_begin(tiny: LoadedModel, plain: Result) -> None:
    text = plain.text
    whole = [n for n in range(len(text)) if "�" not in text[n : n + 3]]
    for at in whole[::4]:
        for length in (1, 2, 3):
            stop = text[at : at + length]
            results = outputs(
                tiny, plain.tokens, max_tokens=LENGTH, ignore_eos=True, stop=(stop, "zzz"), **SAMPLED
            )
            for result in results:
                assert result.text == text[: text.index(stop)]
                assert result.finish_reason is FinishReason.STOP
                assert result.tokens == plain.tokens[: len(result.tokens)]
                assert stop in decode(tiny, result.tokens)
                assert stop not in decode(tiny, result.tokens[:-1])
                invariants(result)


def test_a_stop_string_that_never_comes_holds_nothing_back_in_the_end(
    tiny: LoadedModel, plain: Result
) -> None:
    stop = plain.text[-1] + "never"
    for result in outputs(tiny, plain.tokens, max_tokens=LENGTH, ignore_eos=True, stop=(stop,), **SAMPLED):
        assert result.text == plain.text
        assert result.finish_reason is FinishReason.LENGTH


def test_the_context_can_be_filled_to_its_end(tiny: LoadedModel) -> None:
    small = replace(tiny, context_length=64)
    with engine_of(small) as engine:
        (result,) = run(engine, request([7, 8] * 16, max_tokens=32, ignore_eos=True))
    assert result.usage.completion_tokens == 32


@pytest.mark.parametrize("stop", ["�", "a�"])
def test_a_stop_string_in_the_text_of_half_a_character(tiny_llama: LoadedModel, stop: str) -> None:
    """Only the end of the request shows that the character stays half: that is a stop as any other."""
    tokens = tiny_llama.tokenizer("xa€").input_ids
    asked = request(PROMPT, max_tokens=3, stop=(stop,))
    sequence = Running(asked, Silent(), tiny_llama.tokenizer, GeneratorRandomness())
    chunk = sequence.commit(tuple(tokens), proposed=0, accepted=0, eos_token_ids=frozenset())
    assert (chunk.text, chunk.finish_reason) == ("xa".removesuffix(stop[:-1]), FinishReason.STOP)
