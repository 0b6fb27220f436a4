"""A request's text: what joins it, and what ends it."""

from __future__ import annotations

from outrider_serving.engine.schedule.sequence import Sequence, end_tokens
from outrider_serving.engine.types import FinishReason, SamplingParams
from unit.engine.simulation import request

EOS = frozenset({8, 9})


def sequence(max_tokens: int = 4, ends: frozenset[int] = EOS) -> Sequence:
    return Sequence(request("a", (1, 2, 3), max_tokens), 0, ends)


def test_counts_follow_the_text() -> None:
    made = sequence()
    assert (made.tokens, made.outputs, made.pending, made.remaining) == ([1, 2, 3], 0, 3, 4)
    made.computed = 3
    assert made.commit([5, 6]) == (5, 6)
    made.computed = 4
    assert (made.tokens, made.outputs, made.pending, made.remaining) == ([1, 2, 3, 5, 6], 2, 1, 2)
    assert made.finish_reason is None


def test_an_end_token_counts_and_drops_what_follows() -> None:
    made = sequence()
    assert made.commit([5, 9, 6]) == (5, 9)
    assert made.tokens == [1, 2, 3, 5, 9]
    assert made.finish_reason is FinishReason.STOP


def test_the_last_of_max_tokens_ends_it_and_drops_what_follows() -> None:
    made = sequence(max_tokens=2)
    assert made.commit([5, 6, 7]) == (5, 6)
    assert made.finish_reason is FinishReason.LENGTH


def test_an_end_token_at_the_last_place_is_a_stop() -> None:
    made = sequence(max_tokens=2)
    assert made.commit([5, 9]) == (5, 9)
    assert made.finish_reason is FinishReason.STOP


def test_an_end_token_beyond_max_tokens_is_not_seen() -> None:
    made = sequence(max_tokens=1)
    assert made.commit([5, 9]) == (5,)
    assert made.finish_reason is FinishReason.LENGTH


def test_tokens_of_the_prompt_end_nothing() -> None:
    made = Sequence(request("a", (9, 9)), 0, EOS)
    assert made.commit([5]) == (5,)
    assert made.finish_reason is None


def test_stop_tokens_end_a_request_also_where_it_ignores_the_end_of_sequence() -> None:
    assert end_tokens(SamplingParams(4), EOS) == {8, 9}
    assert end_tokens(SamplingParams(4, stop_token_ids=(5,)), EOS) == {5, 8, 9}
    assert end_tokens(SamplingParams(4, stop_token_ids=(5,), ignore_eos=True), EOS) == {5}
