"""One choice: the same text, tokens, logprobs and usage, whatever the cutting into deltas."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api.completion import Completion, Echo, Piece, joined
from outrider_serving.api.records import Usage
from outrider_serving.api.tokens import Vocabulary
from outrider_serving.engine.types import Delta, FinishReason, TokenLogprobs
from unit.api.vocabularies import BYTES, PIECES

VOCABULARY = Vocabulary(BYTES)
EOS = 1


def ids(text: str) -> list[int]:
    return list(BYTES(text).input_ids)


def decoded(tokens: Sequence[int]) -> str:
    text = BYTES.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def scores(tokens: Sequence[int]) -> tuple[TokenLogprobs, ...]:
    """A logprob for each token that tells which one it is."""
    return tuple(TokenLogprobs(-float(token), ((token, -float(token)), (EOS, -900.0))) for token in tokens)


def deltas(
    tokens: Sequence[int], cuts: Sequence[int] = (), reason: FinishReason = FinishReason.LENGTH
) -> list[Delta]:
    """The tokens in steps that end at the cuts, the last one with the reason."""
    edges = sorted({0, len(tokens), *(cut for cut in cuts if 0 < cut < len(tokens))})
    steps = [tuple(tokens[start:end]) for start, end in pairwise(edges)]
    return [
        Delta("id", step, float(number), accepted=len(step) - 1, proposed=len(step), logprobs=scores(step))
        if number < len(steps) - 1
        else Delta("id", step, float(number), logprobs=scores(step), finish_reason=reason)
        for number, step in enumerate(steps)
    ]


def run(steps: Sequence[Delta], prompt: Sequence[int] = (5,), **how: Any) -> tuple[list[Piece], Usage]:
    """Push deltas until the choice ends, as whoever asks the engine does."""
    completion = Completion(VOCABULARY, prompt, **how)
    pieces = []
    for step in steps:
        pieces.append(completion.push(step))
        if pieces[-1].finish_reason:
            break
    return pieces, completion.usage


def reference(
    tokens: Sequence[int], stops: Sequence[str], min_tokens: int
) -> tuple[str, list[int], FinishReason]:
    """Token by token and character by character, decoding everything each time."""
    known = ""
    for count in range(1, len(tokens) + 1):
        text = decoded(tokens[:count])
        if count < len(tokens):
            text = text.rstrip("�")
        for end in range(len(known) + 1, len(text) + 1):
            ending = [stop for stop in stops if text[:end].endswith(stop)]
            if ending and count >= min_tokens:
                return text[: end - max(map(len, ending))], list(tokens[:count]), FinishReason.STOP
        known = text
    return known, list(tokens), FinishReason.LENGTH


few = st.sampled_from("ab é日🦦")
cuts = st.lists(st.integers(1, 40), max_size=12)


@given(
    text=st.text(few, min_size=1, max_size=16),
    half=st.integers(0, 3),
    cut=cuts,
    other=cuts,
    stops=st.lists(st.text(few, min_size=1, max_size=3), max_size=3),
    min_tokens=st.integers(0, 6),
)
def test_any_cutting_gives_the_same_answer(
    text: str, half: int, cut: list[int], other: list[int], stops: list[str], min_tokens: int
) -> None:
    tokens = ids(text)[: max(1, len(ids(text)) - half)]
    expected, kept, reason = reference(tokens, stops, min_tokens)
    found = []
    for edges in (cut, other, range(40)):
        pieces, usage = run(deltas(tokens, edges), stops=stops, min_tokens=min_tokens)
        whole = joined(pieces)
        assert (whole.text, list(whole.tokens), whole.finish_reason) == (expected, kept, reason)
        assert [piece.finish_reason for piece in pieces[:-1]] == [None] * (len(pieces) - 1)
        assert all("�" not in piece.text for piece in pieces[:-1])
        assert usage.completion_tokens == len(kept)
        assert usage.verification_steps == len(pieces)
        found.append((whole.logprobs, usage.completion_tokens))
    assert found[0] == found[1] == found[2]
    assert [scored.logprob for scored in found[0][0]] == [-float(token) for token in kept]


@given(text=st.text(few, max_size=12), cut=cuts, stop_token=st.booleans())
def test_a_token_that_ends_the_request_counts_but_has_no_text(
    text: str, cut: list[int], stop_token: bool
) -> None:
    last = ids("b")[0] if stop_token else EOS
    tokens = [*ids(text), last]
    pieces, usage = run(deltas(tokens, cut, FinishReason.STOP))
    whole = joined(pieces)
    assert (whole.text, list(whole.tokens), whole.finish_reason) == (text, tokens, FinishReason.STOP)
    assert usage.completion_tokens == len(tokens)
    assert len(whole.logprobs) == len(tokens)
    assert whole.logprobs[-1].offset == len(text)


@given(text=st.text(few, min_size=1, max_size=12), cut=cuts)
def test_offsets_are_where_a_tokens_characters_begin(text: str, cut: list[int]) -> None:
    tokens = ids(text)
    whole = joined(run(deltas(tokens, cut))[0])
    assert [scored.offset for scored in whole.logprobs] == [
        len(decoded(tokens[:place]).rstrip("�")) for place in range(len(tokens))
    ]


def test_a_stop_string_within_one_step_drops_the_rest_of_it_and_what_was_proposed_there() -> None:
    a, b = ids("a")[0], ids("b")[0]
    steps = [
        Delta("id", (a, a), 0.0, proposed=9, depth=4, accepted=1),
        Delta("id", (a, b, a, a), 1.0, proposed=9, depth=5, accepted=3),
    ]
    pieces, usage = run(steps, stops=["ab"])
    assert [(piece.text, piece.tokens) for piece in pieces] == [("a", (a, a)), ("a", (a, b))]
    assert pieces[-1].finish_reason is FinishReason.STOP
    assert usage == Usage(
        prompt_tokens=1,
        completion_tokens=4,
        verification_steps=2,
        proposed_tokens=11,
        accepted_tokens=3,
        proposed_by_position=(2, 2, 1, 1),
        accepted_by_position=(2, 1),
    )
    assert usage.accepted_length == 1.5


def test_a_stop_string_over_several_steps_is_never_shown() -> None:
    steps = deltas(ids("x###y"), range(9))
    pieces, _ = run(steps, stops=["###"])
    assert [piece.text for piece in pieces] == ["x", "", "", ""]
    assert pieces[-1].finish_reason is FinishReason.STOP


def test_what_was_held_back_is_shown_when_the_text_ends_otherwise() -> None:
    pieces, _ = run(deltas(ids("x##"), range(9)), stops=["###"])
    assert [piece.text for piece in pieces] == ["x", "", "##"]
    assert pieces[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_in_what_is_left_at_the_end() -> None:
    half = ids("é")[0]
    pieces, usage = run(deltas([*ids("a"), half]), stops=["�"])
    assert (joined(pieces).text, pieces[-1].finish_reason) == ("a", FinishReason.STOP)
    assert usage.completion_tokens == 2


@given(
    text=st.text("abcé ", min_size=1, max_size=12),
    cuts=st.lists(st.integers(1, 20), max_size=6),
    stops=st.lists(st.text("abc ", min_size=1, max_size=3), max_size=2),
    least=st.integers(0, 5),
)
def test_token_by_token_it_is_the_same(text: str, cuts: list[int], stops: list[str], least: int) -> None:
    prompt, steps = ids("the cat"), deltas(ids(text), cuts)
    how: Any = {"stops": stops, "min_tokens": least, "echo": Echo("the cat", tuple(range(len(prompt))))}
    steps = [Delta("id", (), 0.0, reused=2, prompt_logprobs=scores(prompt[1:])), *steps]
    wholes, usage = run(steps, prompt, **how)
    completion, singles = Completion(VOCABULARY, prompt, **how), list[Piece]()
    for step in steps:
        singles += completion.push_singly(step)
        if singles[-1].finish_reason:
            break
    assert joined(singles) == joined(wholes)
    assert completion.usage == usage
    assert all(len(piece.tokens) == 1 for piece in singles[1:])


@pytest.mark.parametrize(("min_tokens", "text"), [(0, ""), (1, ""), (2, "a"), (3, "aa"), (4, "aaa")])
def test_a_stop_string_before_min_tokens_is_text(min_tokens: int, text: str) -> None:
    pieces, usage = run(deltas(ids("aaaa")), stops=["a"], min_tokens=min_tokens)
    assert joined(pieces).text == text
    assert usage.completion_tokens == max(1, min_tokens)


def test_a_delta_that_only_tells_of_the_prompt_shows_nothing() -> None:
    prompt = ids("the cat")
    first = Delta("id", (), 0.0, reused=2, prompt_logprobs=scores(prompt[1:]))
    echo = Echo("the cat", tuple(len(decoded(prompt[:place])) for place in range(len(prompt))))
    pieces, usage = run([first, *deltas(ids("ab"), [1])], prompt, echo=echo)
    assert pieces[0] == Piece(0, "", (), (), 0.0)
    assert (usage.cached_tokens, usage.verification_steps) == (2, 2)
    assert [piece.text for piece in pieces[1:]] == ["the cata", "b"]
    shown = joined(pieces).logprobs
    assert (shown[0].logprob, shown[0].top) == (None, ())
    assert [scored.logprob for scored in shown[1:]] == [-float(id_) for id_ in [*prompt, *ids("ab")][1:]]
    assert [scored.offset for scored in shown][-2:] == [7, 8]
    assert "".join(scored.token.text or "" for scored in shown) == joined(pieces).text


def test_an_echo_without_logprobs() -> None:
    pieces, _ = run(deltas(ids("b")), ids("a"), echo=Echo("a"))
    assert joined(pieces).text == "ab"
    assert len(joined(pieces).logprobs) == 1


def test_an_echo_of_one_token_has_its_null() -> None:
    pieces, _ = run(deltas(ids("b")), ids("a"), echo=Echo("a", (0,)))
    assert [scored.logprob is None for scored in joined(pieces).logprobs] == [True, False]


def test_a_space_after_the_prompt_is_kept() -> None:
    completion = Completion(Vocabulary(PIECES), [258])
    assert completion.push(Delta("id", (259,), 0.0, finish_reason=FinishReason.LENGTH)).text == " cat"


def test_the_usage_of_choices_counts_their_prompt_once() -> None:
    left = Usage(5, 3, 2, 4, 1, 2, (2, 2), (1,))
    right = Usage(5, 4, 3, 2, 1, 5, (2,), (1,))
    assert left + right == Usage(5, 7, 5, 6, 2, 2, (4, 2), (2,))
