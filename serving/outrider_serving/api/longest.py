"""The most text that one token can stand for: a hopelessly long prompt is known without encoding it."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from outrider_serving.api.tokens import SYMBOLS_OF_BYTES

_BYTE_PIECES = frozenset(f"<0x{byte:02X}>" for byte in range(256))

Part = Mapping[str, Any] | None
"""A part of a tokenizer as its file (tokenizer.json) describes it; None where there is none."""


def longest_token(tokenizer: Any) -> int | None:
    """Bytes of text (UTF-8) that a token of a transformers' tokenizer stands for at most.

    None where no such bound is known: a tokenizer may drop text, or have one token for whatever it does not
    know. Takes a good part of a second for a large vocabulary.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    return None if backend is None else longest_token_of(json.loads(backend.to_str()))


def longest_token_of(described: Mapping[str, Any]) -> int | None:
    """The same, from the tokenizer's file."""
    model, normalizer, splitter = described["model"], described["normalizer"], described["pre_tokenizer"]
    added = described["added_tokens"]
    if model["type"] != "BPE" or not _only_grows(normalizer) or not _keeps_all(splitter):
        return None
    if any(token["lstrip"] or token["rstrip"] or (token["normalized"] and normalizer) for token in added):
        return None  # it takes spaces with it, or is itself normalized
    pieces = model["vocab"].keys()
    if _is_byte_level(splitter) and pieces >= SYMBOLS_OF_BYTES:
        lengths = list(map(len, pieces))
    elif model["byte_fallback"] and pieces >= _BYTE_PIECES:
        lengths = [len(piece.encode()) for piece in pieces]
    else:
        return None
    return max(lengths + [len(token["content"].encode()) for token in added])


def _parts(part: Part, within: str) -> list[Mapping[str, Any]]:
    """A part, or those that it is a sequence of."""
    if part is None:
        return []
    return [leaf for inner in part[within] for leaf in _parts(inner, within)] if within in part else [part]


def _only_grows(normalizer: Part) -> bool:
    """Whether no text is shorter for having been normalized."""
    return all(
        part["type"] == "Prepend"
        or (
            part["type"] == "Replace"
            and "String" in part["pattern"]
            and len(part["content"].encode()) >= len(part["pattern"]["String"].encode())
        )
        for part in _parts(normalizer, "normalizers")
    )


def _keeps_all(splitter: Part) -> bool:
    """Whether all of the text is in some of the parts that it is split into."""
    return all(
        part["type"] in ("ByteLevel", "Metaspace", "Digits")
        or (part["type"] == "Split" and part["behavior"] != "Removed")
        for part in _parts(splitter, "pretokenizers")
    )


def _is_byte_level(splitter: Part) -> bool:
    return any(part["type"] == "ByteLevel" for part in _parts(splitter, "pretokenizers"))
