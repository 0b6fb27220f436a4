"""Two tokenizers that differ in everything that matters for text."""

from __future__ import annotations

from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from serving.tiny import make_tokenizer


def sentencepiece_like() -> PreTrainedTokenizerFast:
    """Words begin with a marked space, a text's first is dropped; other characters are spelled in bytes."""
    words = ["▁", "▁the", "▁cat", "s", "at", ".", "▁日"]
    vocabulary = {"<eos>": 0, **{f"<0x{byte:02X}>": byte + 1 for byte in range(256)}}
    vocabulary |= {word: 257 + n for n, word in enumerate(words)}
    tokenizer = Tokenizer(models.BPE(vocabulary, [], byte_fallback=True, fuse_unk=True))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<eos>")  # type: ignore[no-untyped-call]


BYTES = make_tokenizer()
"""Byte-level: `<bos>` 0, `<eos>` 1, a symbol for each byte from 2 to 257, then merges."""

PIECES = sentencepiece_like()
"""With byte fallback: `<eos>` 0, byte b at b + 1, then ▁ 257, ▁the 258, ▁cat 259, s, at, ., ▁日 263."""


def spelled(text: str) -> list[int]:
    """In the tokens of `PIECES` for bytes."""
    return [byte + 1 for byte in text.encode()]
