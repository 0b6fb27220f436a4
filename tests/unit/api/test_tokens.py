"""What single tokens stand for."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api.tokens import Token, Vocabulary
from unit.api.vocabularies import BYTES, PIECES, spelled

OF_BYTES, OF_PIECES = Vocabulary(BYTES), Vocabulary(PIECES)


@given(st.text(max_size=30))
def test_the_bytes_of_a_texts_tokens_are_those_of_the_text(text: str) -> None:
    tokens = [OF_BYTES[token] for token in BYTES(text).input_ids]
    assert b"".join(token.raw for token in tokens) == text.encode()
    assert all(token.text is None or token.text.encode() == token.raw for token in tokens)


def test_every_byte_of_a_byte_level_vocabulary_is_there_once() -> None:
    alphabet = [OF_BYTES[token].raw for token in range(2, 258)]
    assert sorted(alphabet) == [bytes([byte]) for byte in range(256)]


def test_every_byte_of_a_vocabulary_with_byte_fallback() -> None:
    assert [OF_PIECES[byte + 1].raw for byte in range(256)] == [bytes([byte]) for byte in range(256)]


@pytest.mark.parametrize(
    ("token", "text"), [(257, " "), (258, " the"), (259, " cat"), (260, "s"), (262, "."), (263, " 日")]
)
def test_pieces_keep_the_space_that_a_texts_start_drops(token: int, text: str) -> None:
    assert OF_PIECES[token] == Token(text.encode(), text, special=False)


def test_half_a_character_has_no_text() -> None:
    first, *_ = spelled("€")
    assert OF_PIECES[first] == Token(b"\xe2", None, special=False)


@pytest.mark.parametrize(("vocabulary", "token"), [(OF_BYTES, 1), (OF_PIECES, 0)])
def test_a_special_token_has_its_name(vocabulary: Vocabulary, token: int) -> None:
    assert vocabulary[token] == Token(b"<eos>", "<eos>", special=True)


@pytest.mark.parametrize("vocabulary", [OF_BYTES, OF_PIECES])
def test_an_id_that_only_the_model_knows_is_empty(vocabulary: Vocabulary) -> None:
    assert vocabulary[5000] == Token(b"", "", special=False)
