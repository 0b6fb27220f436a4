"""A bound on what a token stands for: kept by every text, and not claimed where a tokenizer may drop text."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer

from outrider_serving.api.longest import longest_token, longest_token_of
from unit.api.vocabularies import BYTES, PIECES


def described(tokenizer: Any, **changes: Any) -> dict[str, Any]:
    """A tokenizer's file with parts replaced."""
    file: dict[str, Any] = json.loads(tokenizer.backend_tokenizer.to_str())
    return file | changes


def replacing(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


LLAMA = {
    "type": "Sequence",
    "normalizers": [{"type": "Prepend", "prepend": "▁"}, replacing({"String": " "}, "▁")],
}
LIKE_LLAMA = described(PIECES, normalizer=LLAMA, pre_tokenizer=None)


@pytest.mark.parametrize("file", [described(BYTES), described(PIECES), LIKE_LLAMA])
def test_no_text_has_fewer_tokens_than_the_bound_allows(file: dict[str, Any]) -> None:
    tokenizer = Tokenizer.from_str(json.dumps(file))
    longest = longest_token_of(file)
    assert longest is not None

    @given(st.text(max_size=60) | st.text("the cat s.日<eos>▁", max_size=60))
    def check(text: str) -> None:
        assert len(tokenizer.encode(text).ids) * longest >= len(text.encode())

    check()


def test_the_bound_is_the_longest_tokens_length() -> None:
    longest = max(len(BYTES.decode([token])) for token in range(len(BYTES)))
    assert longest_token(BYTES) == longest
    assert longest_token(PIECES) == len("<0xFF>")


@pytest.mark.parametrize(
    "changes",
    [
        {"normalizer": {"type": "Lowercase"}},
        {"normalizer": {"type": "Strip", "strip_left": True, "strip_right": True}},
        {"normalizer": replacing({"String": "  "}, " ")},
        {"normalizer": replacing({"Regex": " +"}, "▁▁▁▁▁")},
        {"normalizer": {"type": "Sequence", "normalizers": [LLAMA, {"type": "NFC"}]}},
        {"pre_tokenizer": {"type": "WhitespaceSplit"}},
        {"pre_tokenizer": {"type": "Split", "pattern": {"String": " "}, "behavior": "Removed"}},
        {"model": {"type": "WordPiece", "vocab": {}}},
        {"model": described(BYTES)["model"] | {"vocab": {"a": 0}}},
        {"pre_tokenizer": None},
    ],
)
def test_nothing_is_claimed_of_a_tokenizer_that_may_drop_text(changes: dict[str, Any]) -> None:
    assert longest_token_of(described(BYTES, **changes)) is None


@pytest.mark.parametrize("side", ["lstrip", "rstrip"])
def test_nothing_is_claimed_where_a_special_token_takes_the_spaces_around_it(side: str) -> None:
    file = described(BYTES)
    file["added_tokens"][0][side] = True
    assert longest_token_of(file) is None


def test_nothing_is_claimed_of_a_tokenizer_without_a_file() -> None:
    assert longest_token(object()) is None
