"""Follows a grammar token by token: what may come next, after the committed text and along proposed paths.

A token is allowed exactly where the text and the token's bytes can be continued to a text of the grammar.
Since tokens are bytes here, characters spread over several tokens and leading spaces need no care.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np
import torch
from llguidance import LLTokenizer
from llguidance.hf import from_tokenizer
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider_serving.sampling.grammar import GrammarError, check, compiled


class GrammarCompiler:
    """Makes matchers for one model's tokens; may be used by several threads.

    Making one reads the whole vocabulary, with the interpreter's lock held: for 262,144 tokens that takes
    about 3 seconds on a small machine, and 360 MB for the moment. So make it once, while the model loads.
    """

    def __init__(
        self, tokenizer: PreTrainedTokenizerBase, *, vocab_size: int, eos_token_ids: frozenset[int]
    ) -> None:
        """Read the vocabulary.

        Args:
            tokenizer: the model's own, backed by the tokenizers library.
            vocab_size: number of token ids that the model knows, not less than the tokenizer's; surplus ones
                are never allowed.
            eos_token_ids: tokens that end a text.

        Raises:
            GrammarError: this model's output cannot be constrained; the message says why.
        """
        if not isinstance(tokenizer, PreTrainedTokenizerFast):
            raise GrammarError(
                f"output cannot be constrained with a {type(tokenizer).__name__}: its bytes are not known"
            )
        if not eos_token_ids:
            raise GrammarError("output cannot be constrained: the model has no token that ends a text")
        try:
            self._tokenizer = from_tokenizer(tokenizer, n_vocab=vocab_size, eos_token=sorted(eos_token_ids))
        except ValueError as error:
            raise GrammarError(f"output cannot be constrained with this tokenizer: {error}") from error
        self._vocab_size, self._eos = vocab_size, eos_token_ids

    def matcher(self, grammar: str) -> Matcher:
        """A matcher at the beginning of a grammar that `sampling.grammar` made.

        It takes about a millisecond, and about two seconds for the worst that `sampling.grammar` lets pass.
        Other threads run meanwhile: made in a thread of its own, none need hold up a step.

        Raises:
            GrammarError: the grammar cannot be compiled.
        """
        return Matcher(self._tokenizer, grammar, self._vocab_size, self._eos)


class Matcher:
    """Where one request's output stands in its grammar. For one thread at a time.

    A parser stands behind the committed tokens and those of the path asked about last. Another path costs
    only its difference to that: along a tree in depth-first order each token is read once.

    Where a limit on the parser's work or memory is reached, or nothing at all can follow, GrammarError is
    raised. The matcher stays where it was and may be asked again: after such an error of `mask(())` the
    request cannot go on, after that of a longer path it only cannot go along that path.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, vocab_size: int, eos: frozenset[int]) -> None:
        """See `GrammarCompiler.matcher`."""
        self._tokenizer, self._grammar = tokenizer, grammar
        self._vocab_size, self._eos = vocab_size, eos
        self._eos_ids = sorted(eos)
        self._parser = compiled(grammar, tokenizer)
        self._committed: list[int] = []
        self._path: list[int] = []
        self._ended = False

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Which tokens may follow the committed ones and a proposed path; changes nothing.

        About 40 microseconds for a vocabulary of 262,144 tokens.

        Args:
            path: tokens that would come first.

        Returns:
            bool [vocab_size], on the CPU. Where the text may end, all tokens that end it are allowed; where
            it must end, only these. All False after an end, and after a path that is itself forbidden.

        Raises:
            GrammarError: see the class.
        """
        if self._ended or not self._walk(path):
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        packed = np.frombuffer(self._parser.compute_bitmask(), dtype=np.uint8)
        self._check()
        bits = np.unpackbits(packed, count=self._vocab_size, bitorder="little")
        bits[self._eos_ids] = self._parser.is_accepting()  # even those that a tokenizer takes for text
        return torch.from_numpy(bits).view(torch.bool)

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens; one that ends the text may be the last.

        Raises:
            ValueError: they are forbidden; the matcher stays where it was.
            GrammarError: see the class.
        """
        if not tokens:
            return
        ends = tokens[-1] in self._eos
        text = tokens[:-1] if ends else tokens
        if self._ended or not self._walk(text) or (ends and not self._parser.is_accepting()):
            raise ValueError(f"the grammar does not allow the tokens {list(tokens)} here")
        self._committed += text
        self._path = []
        self._ended = ends

    def _walk(self, path: Sequence[int]) -> bool:
        """Bring the parser behind a path, or as far along it as it is allowed; whether that was all of it."""
        shared = _common(self._path, path)
        if shared < len(self._path):
            self._parser.rollback(len(self._path) - shared)
            del self._path[shared:]
        ahead = path[shared:]
        if not self._eos.isdisjoint(ahead):
            return False  # the parser is never told of an end, which it might not take back
        if ahead:
            read = self._parser.try_consume_tokens(list(ahead))
            self._path += ahead[:read]
            self._check()
        return len(self._path) == len(path)

    def _check(self) -> None:
        """Replace a parser that has stopped for good by one behind the committed tokens, and raise."""
        try:
            check(self._parser)
        except GrammarError:
            self._parser = compiled(self._grammar, self._tokenizer)
            self._parser.try_consume_tokens(self._committed)
            self._path = []
            raise


def _common(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
