"""What a token of the vocabulary stands for by itself: its text, or bytes that are no whole character."""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import lru_cache
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CACHED = 1 << 16
"""Tokens kept; far more than a service shows in a minute."""

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")
"""How vocabularies with byte fallback spell a byte."""


def _symbols_of_bytes() -> dict[str, int]:
    """The symbol of each byte in a byte-level vocabulary (GPT-2): printable ones of Latin-1 are their own."""
    own = [*range(ord("!"), ord("~") + 1), *range(ord("¡"), ord("¬") + 1), *range(ord("®"), ord("ÿ") + 1)]
    others = [byte for byte in range(256) if byte not in own]
    return {chr(byte): byte for byte in own} | {chr(256 + n): byte for n, byte in enumerate(others)}


_BYTE_OF = _symbols_of_bytes()

SYMBOLS_OF_BYTES = frozenset(_BYTE_OF)
"""What a byte-level vocabulary needs to spell any text."""


@dataclass(frozen=True, slots=True)
class Token:
    """A token as one shows it.

    Attributes:
        raw: what it adds to a text, in UTF-8; the name of a special token, which adds nothing.
        text: the same in characters; None where `raw` is not made of whole ones.
        special: it marks something, such as the end of a text, and is never part of the text.
    """

    raw: bytes
    text: str | None
    special: bool


class Vocabulary:
    """The tokens of one tokenizer, by id; for any thread."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase) -> None:
        """Any tokenizer of transformers."""
        self.tokenizer = tokenizer
        self._cached = lru_cache(_CACHED)(self._token)

    def __getitem__(self, token_id: int) -> Token:
        """The token with this id; an empty one where only the model knows the id."""
        return self._cached(token_id)

    def _token(self, token_id: int) -> Token:
        # A tokenizer may drop the space at the start of a text, so what a second one adds is looked at.
        once, twice = self._decode([token_id]), self._decode([token_id, token_id])
        text = twice[len(once) :]
        raw = text.encode() if "�" not in text else self._bytes(token_id, text)
        return Token(raw, _decoded(raw), special=bool(text) and not self._decode([token_id] * 2, skip=True))

    def _bytes(self, token_id: int, text: str) -> bytes:
        """The bytes of a token that is not made of whole characters, or that is a replacement character."""
        symbols = self.tokenizer.convert_ids_to_tokens(token_id)
        assert isinstance(symbols, str)
        if byte := _BYTE.fullmatch(symbols):
            return bytes.fromhex(byte[1])
        if all(symbol in _BYTE_OF for symbol in symbols):
            return bytes(_BYTE_OF[symbol] for symbol in symbols)
        return text.encode()

    def _decode(self, ids: list[int], *, skip: bool = False) -> str:
        text = self.tokenizer.decode(ids, skip_special_tokens=skip, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


def _decoded(raw: bytes) -> str | None:
    try:
        return raw.decode()
    except UnicodeDecodeError:
        return None
