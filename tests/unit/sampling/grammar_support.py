"""What the tests of grammars share: a tiny tokenizer, the bytes of its tokens, random walks under a mask."""

from __future__ import annotations

import random

from outrider_serving.sampling.matcher import GrammarCompiler, Matcher
from serving.tiny import make_tokenizer

BOS, EOS, SECOND_EOS = 0, 1, 300
VOCABULARY = 340
"""The model's; the tokenizer knows 320 tokens, of which 300 is text to it and a second end to the model."""

TOKENIZER = make_tokenizer(320)
ENDS = {EOS, SECOND_EOS}
COMPILER = GrammarCompiler(TOKENIZER, vocab_size=VOCABULARY, eos_token_ids=frozenset(ENDS))
ONE_END = GrammarCompiler(TOKENIZER, vocab_size=VOCABULARY, eos_token_ids=frozenset({EOS}))


def _bytes_of_tokens() -> list[bytes]:
    """The bytes of every token by the alphabet of byte-level BPE (Radford et al. 2019): bytes that print
    stand for themselves, the others for characters from 256 on."""
    prints = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = [byte for byte in range(256) if byte not in prints]
    alphabet = {chr(byte): byte for byte in prints} | {chr(256 + n): byte for n, byte in enumerate(rest)}
    names = TOKENIZER.convert_ids_to_tokens(list(range(320)))
    return [b"" if i in {BOS, *ENDS} else bytes(alphabet[c] for c in name) for i, name in enumerate(names)]


BYTES = _bytes_of_tokens()


def tokens_of(text: str) -> list[int]:
    """One token a byte: any text can be spelled so."""
    return [BYTES.index(bytes([byte])) for byte in text.encode()]


def walk(matcher: Matcher, rng: random.Random, patience: int = 60) -> bytes | None:
    """The text of a random path to an end; None where none was found. Without patience, it closes things."""
    text = b""
    for step in range(400):
        allowed = matcher.mask().nonzero().flatten().tolist()
        assert allowed, text
        token = rng.choice(allowed)
        if step > patience:
            closing = [t for t in allowed if t in ENDS or BYTES[t] in (b"}", b"]", b'"')]
            token = max(closing or allowed, key=lambda t: (t in ENDS, rng.random()))
        matcher.advance([token])
        if token in ENDS:
            return text
        text += BYTES[token]
    return None
