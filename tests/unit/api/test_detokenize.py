"""Text comes in whole characters, is that of decoding everything at once, and ends before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import pytest
from hypothesis import given
from hypothesis import strategies as st
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from outrider_serving.api.detokenize import Detokenizer, StopMatcher
from unit.api.vocabularies import BYTES, PIECES, spelled

BYTE_OF = {symbol: byte for byte, symbol in bytes_to_unicode().items()}
"""The byte that a symbol of a byte-level vocabulary stands for."""


def decode(tokenizer: PreTrainedTokenizerFast, tokens: Sequence[int]) -> str:
    text = tokenizer.decode(list(tokens), skip_special_tokens=True)
    assert isinstance(text, str)
    return text


def stream(tokenizer: PreTrainedTokenizerFast, prompt: Sequence[int], output: Sequence[int]) -> list[str]:
    detokenizer = Detokenizer(tokenizer, prompt)
    return [*(detokenizer.push(token) for token in output), detokenizer.flush()]


@given(prompt=st.text(max_size=8), text=st.text(max_size=40))
def test_any_text_comes_whole(prompt: str, text: str) -> None:
    pieces = stream(BYTES, BYTES(prompt).input_ids, BYTES(text).input_ids)
    assert "".join(pieces) == text
    if "�" not in text:
        assert all("�" not in piece for piece in pieces)


@given(text=st.text(st.sampled_from("aé日🦦 \n"), max_size=30), cut=st.integers(0, 60))
def test_text_cut_inside_a_character_ends_in_a_replacement_character(text: str, cut: int) -> None:
    tokens = BYTES(text).input_ids[:cut]
    pieces = stream(BYTES, [], tokens)
    assert "".join(pieces) == decode(BYTES, tokens)
    assert all("�" not in piece for piece in pieces[:-1])


@given(tokens=st.lists(st.integers(2, 319), max_size=50))
def test_tokens_that_are_no_text_give_what_decoding_them_gives(tokens: list[int]) -> None:
    assert "".join(stream(BYTES, [], tokens)) == decode(BYTES, tokens)


@given(
    prompt=st.lists(st.integers(257, 263), min_size=1, max_size=9),
    output=st.lists(st.one_of(st.integers(257, 263), st.just(0)), max_size=30),
)
def test_leading_spaces_are_those_of_the_whole_text(prompt: list[int], output: list[int]) -> None:
    whole = decode(PIECES, [*prompt, *output])
    assert decode(PIECES, prompt) + "".join(stream(PIECES, prompt, output)) == whole


def test_a_space_between_prompt_and_output_is_kept() -> None:
    the, cat = 258, 259
    assert stream(PIECES, [the], [cat, cat]) == [" cat", " cat", ""]
    assert decode(PIECES, [cat]) == "cat"


@pytest.mark.parametrize("text", ["日本", "🦦🦦", "é"])
def test_characters_spelled_in_bytes(text: str) -> None:
    tokens = [258, *(byte + 1 for byte in text.encode()), 259]
    pieces = stream(PIECES, [258], tokens)
    assert "".join(pieces) == f" the{text} cat"
    assert all("�" not in piece for piece in pieces)


def test_broken_text_is_not_held_back_for_ever() -> None:
    byte = BYTES.convert_tokens_to_ids("ĉ")  # a byte that continues no character
    assert isinstance(byte, int)
    continuation = next(t for t in range(2, 258) if decode(BYTES, [t]) == "�")
    pieces = stream(BYTES, [], [continuation] * 200)
    assert any(pieces[:70])
    assert "".join(pieces) == "�" * 200


@given(text=st.text(st.sampled_from("aé€日🦦"), max_size=12), cut=st.integers(0, 12), end=st.integers(8, 40))
def test_a_character_that_the_prompt_begins_and_the_output_completes(text: str, cut: int, end: int) -> None:
    """The output's text begins with it; one that is never completed belongs to neither."""
    tokens = BYTES(text).input_ids[:end]
    whole, prompt = decode(BYTES, tokens), decode(BYTES, tokens[:cut])
    if not whole.startswith(prompt):
        symbols = "".join(BYTES.convert_ids_to_tokens(tokens[:cut]))
        prompt = bytes(BYTE_OF[symbol] for symbol in symbols).decode(errors="ignore")
    pieces = stream(BYTES, tokens[:cut], tokens[cut:])
    assert "".join(pieces) == whole[len(prompt) :]
    assert all("�" not in piece for piece in pieces[:-1])


@given(text=st.text(st.sampled_from("aé€日🦦"), max_size=8), cut=st.integers(0, 40))
def test_a_character_spelled_in_bytes_that_the_prompt_begins(text: str, cut: int) -> None:
    """Also after a run of bytes longer than what is decoded again."""
    the, cat, tokens = 258, 259, spelled(text)
    prompt = text.encode()[:cut].decode(errors="ignore")
    pieces = stream(PIECES, [the, *tokens[:cut]], [*tokens[cut:], cat])
    assert "".join(pieces) == f"{text} cat"[len(prompt) :]
    assert all("�" not in piece for piece in pieces)


@pytest.mark.parametrize("bytes_seen", [1, 2])
def test_a_euro_sign_after_one_or_two_of_its_bytes(bytes_seen: int) -> None:
    euro = spelled("€")
    assert "".join(stream(PIECES, [258, *euro[:bytes_seen]], [*euro[bytes_seen:], 259])) == "€ cat"
    tokens = BYTES("a€b").input_ids
    assert "".join(stream(BYTES, tokens[: 1 + bytes_seen], tokens[1 + bytes_seen :])) == "€b"


def test_half_a_character_of_the_prompt_that_stays_half_belongs_to_the_prompt() -> None:
    euro = spelled("€")
    assert "".join(stream(PIECES, [258, *euro[:2]], [259])) == " cat"
    assert "".join(stream(PIECES, [258, *euro[:2]], [])) == ""
    assert "".join(stream(BYTES, BYTES("x�").input_ids, BYTES("�y").input_ids)) == "�y"


@pytest.mark.parametrize("prompt", ["x", ""])
def test_tokens_without_text_cost_the_same_however_many_they_are(prompt: str) -> None:
    """What is decoded again for each of them is counted, and what comes after them is still right."""
    sizes: list[int] = []

    class Counting:
        def decode(self, tokens: list[int], **how: object) -> str:
            sizes.append(len(tokens))
            return decode(PIECES, tokens)

    detokenizer = Detokenizer(cast("PreTrainedTokenizerBase", Counting()), PIECES(prompt).input_ids)
    euro = spelled("€")
    marks = [0, 500] * 500  # one special, one that the tokenizer does not have
    output = [257, *marks, *euro[:2], *marks, euro[2], 259]
    pieces = [*(detokenizer.push(token) for token in output), detokenizer.flush()]
    assert "".join(pieces) == decode(PIECES, [*PIECES(prompt).input_ids, *output])[len(prompt) :]
    assert max(sizes) < 20


def naive_stop(text: str, stops: Sequence[str], armed: int = 0) -> tuple[str, bool]:
    """Read character by character until some stop string ends here, beyond `armed`; the longest such."""
    for end in range(armed + 1, len(text) + 1):
        ending = [stop for stop in stops if text[:end].endswith(stop)]
        if ending:
            return text[: end - max(map(len, ending))], True
    return text, False


abc = st.text("ab", min_size=1, max_size=4)


@given(
    pieces=st.lists(st.text("abc", max_size=4), max_size=12),
    stops=st.lists(abc, max_size=3),
    unarmed=st.integers(0, 6),
)
def test_stop_strings_in_any_pieces(pieces: list[str], stops: list[str], unarmed: int) -> None:
    """Those that end within the first pieces, which are not armed, are text."""
    matcher = StopMatcher(stops)
    expected, stopped = naive_stop("".join(pieces), stops, len("".join(pieces[:unarmed])))
    shown = ""
    for number, piece in enumerate(pieces):
        shown += matcher.push(piece, armed=number >= unarmed)
        assert expected.startswith(shown)
        if matcher.stopped:
            break
    else:
        shown += matcher.flush()
    assert (shown, matcher.stopped) == (expected, stopped)


def test_only_what_may_become_a_stop_string_is_held_back() -> None:
    matcher = StopMatcher(["###", "#!"])
    assert [matcher.push(piece) for piece in ("a#", "b", "c##", "d", "#", "#")] == [
        "a",
        "#b",
        "c",
        "##d",
        "",
        "",
    ]
    assert matcher.push("#") == ""
    assert matcher.stopped
