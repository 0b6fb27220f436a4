"""The n-gram proposer finds what a naive search finds, and keeps to its limits."""

from __future__ import annotations

import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.types import SamplingParams
from outrider_serving.proposers.base import Advanced, Began, Row
from outrider_serving.proposers.ngram import NgramProposer
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.settings import NgramSettings


def row(request_id: str, depth: int) -> Row:
    """A request that wants a proposal; only its id and the depth matter here."""
    params = SamplingParams(max_tokens=depth + 1, temperature=0)
    law = TokenLaw(params, (), vocab_size=10, ends=frozenset())
    return Row(request_id, 1, depth, depth, 0, 0, (), law, None, GeneratorRandomness())


def advanced(request_id: str, *tokens: int) -> Advanced:
    """Tokens joined the text."""
    return Advanced(request_id, 0, (), {}, (), tokens)


def naive(text: list[int], shortest: int, longest: int, depth: int) -> tuple[int, ...]:
    """Longest suffix first, latest place first; what follows is copied into the copy."""
    for width in range(min(longest, len(text) - 1), shortest - 1, -1):
        for start in range(len(text) - width - 1, -1, -1):
            if text[start : start + width] == text[-width:]:
                whole = list(text)
                for n in range(depth):
                    whole.append(whole[start + width + n])
                return tuple(whole[len(text) :])
    return ()


@given(
    parts=st.lists(st.lists(st.integers(0, 3), max_size=8), min_size=1, max_size=8),
    shortest=st.integers(1, 4),
    more=st.integers(0, 4),
    depth=st.integers(1, 10),
)
def test_it_finds_what_a_naive_search_finds(
    parts: list[list[int]], shortest: int, more: int, depth: int
) -> None:
    proposer = NgramProposer(NgramSettings(min_match=shortest, max_match=shortest + more))
    proposer.observe([Began("a", ())])
    text: list[int] = []
    for part in parts:
        proposer.observe([advanced("a", *part)])
        text += part
        (proposal,) = proposer.propose([row("a", depth)])
        assert proposal.tokens == naive(text, shortest, shortest + more, depth)


def test_a_short_period_is_repeated_to_the_full_depth() -> None:
    proposer = NgramProposer(NgramSettings())
    proposer.observe([Began("a", (1, 2, 1, 2))])
    assert proposer.propose([row("a", 5)])[0].tokens == (1, 2, 1, 2, 1)


def test_requests_are_kept_apart_and_forgotten() -> None:
    proposer = NgramProposer(NgramSettings())
    proposer.observe([Began("a", (1, 2, 3, 1)), Began("b", (1, 7, 7, 1))])
    found = proposer.propose([row("b", 2), row("a", 2)])
    assert [proposal.tokens for proposal in found] == [(7, 7), (2, 3)]
    proposer.forget("a")
    proposer.forget("a")
    with pytest.raises(KeyError):
        proposer.propose([row("a", 2)])


def test_long_texts_stay_cheap() -> None:
    """30,000 tokens in which the last one is frequent: a step looks at a bounded number of places."""
    proposer = NgramProposer(NgramSettings(min_match=1, max_match=4))
    text = tuple(n if n % 2 else 1 for n in range(30_000))
    proposer.observe([Began("a", (*text, 1))])
    started = time.process_time()
    for _ in range(10):
        proposer.propose([row("a", 8)])
    assert time.process_time() - started < 0.5
