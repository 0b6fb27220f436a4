"""Follows a grammar token by token: what may come next, after the committed text and along proposed paths.

A token is allowed exactly where the text and the token's bytes can be continued to a text of the grammar.
Since tokens are bytes here, characters spread over several tokens and leading spaces need no care.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from itertools import takewhile
from typing import TypeVar

import numpy as np
import torch
from llguidance import LLMatcher, LLTokenizer
from llguidance.hf import from_tokenizer
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedTokenizerBase, PreTrainedTokenizerFast

from outrider_serving.sampling.grammar import GrammarError, check, compiled

_Result = TypeVar("_Result")

_LEAST_TOKENS = 16
"""What a parser that replaced another must have read before it is replaced itself."""


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

    Where nothing at all can follow, or a limit on a parser's work or memory is reached that a fresh parser
    reaches too, GrammarError is raised; asked again, the matcher answers the same. Whether and where that
    happens to a request is a function of its grammar and committed text alone, not of what was proposed:

    - What a parser has worked out it keeps, so limits depend on all that it was asked. Behind the committed
      text therefore stands an `_OrderedParser`: it is asked at each position once, in order, as plain
      decoding asks, also for what a step commits at once. No path is ever shown to it.
    - Paths are followed by a parser of their own. A limit that it reaches says nothing about the request:
      a fresh one tries, and at last one that does what the first would do, were the path committed. An
      error there is the one that the request, having committed that path, meets by plain decoding. Where
      the parser of paths can do what the first cannot, the error comes once the path is committed.

    The parser of paths stands behind that asked about last, and another costs only its difference to that:
    along a tree in depth-first order each token is read once.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: str, vocab_size: int, eos: frozenset[int]) -> None:
        """See `GrammarCompiler.matcher`."""
        self._vocab_size, self._eos = vocab_size, eos
        self._eos_ids = sorted(eos)
        self._fresh = partial(compiled, grammar, tokenizer)
        self._text = _OrderedParser(self._fresh)
        self._paths: _PathParser | None = None
        self._ended = False

    def mask(self, path: Sequence[int] = ()) -> Tensor:
        """Which tokens may follow the committed ones and a proposed path; changes nothing.

        About 40 microseconds for a vocabulary of 262,144 tokens, and twice that along a path, as each parser
        is asked; near a limit, as much as that allows.

        Args:
            path: tokens that would come first.

        Returns:
            bool [vocab_size], on the CPU. Where the text may end, all tokens that end it are allowed; where
            it must end, only these. All False after an end, and after a path that is itself forbidden.

        Raises:
            GrammarError: see the class.
        """
        answer = None
        if not self._ended and self._eos.isdisjoint(path):  # parsers are never told of an end
            answer = self._along(path) if path else self._text.ask()
        if answer is None:
            return torch.zeros(self._vocab_size, dtype=torch.bool)
        bits = np.unpackbits(answer.packed, count=self._vocab_size, bitorder="little")
        bits[self._eos_ids] = answer.accepting  # even those that a tokenizer takes for text
        return torch.from_numpy(bits).view(torch.bool)

    def advance(self, tokens: Sequence[int]) -> None:
        """Commit tokens; one that ends the text may be the last.

        Raises:
            ValueError: they are forbidden; the matcher stays where it was.
            GrammarError: see the class; the matcher then stands behind some of the tokens.
        """
        if not tokens:
            return
        ends = tokens[-1] in self._eos
        text = tokens[:-1] if ends else tokens
        if not self._allows(text, ends):
            raise ValueError(f"the grammar does not allow all of the {len(tokens)} tokens here")
        self._ended = ends
        if self._paths is not None:
            try:
                self._paths.commit(text)
            except GrammarError:
                self._paths = None

    def _allows(self, text: Sequence[int], ends: bool) -> bool:
        """Whether a text, and after it an end, may come; it is read where they may."""
        if self._ended or not self._eos.isdisjoint(text):
            return False
        read = sum(1 for _ in takewhile(self._text.read, text))
        if read == len(text) and not (ends and not self._text.ask().accepting):
            return True
        self._text.forget(read)
        return False

    def _along(self, path: Sequence[int]) -> _Answer | None:
        """What may follow the committed text and a path; None where the path is forbidden."""
        if self._paths is not None:
            with suppress(GrammarError):
                return self._paths.ask(path)
        with suppress(GrammarError):
            self._paths = _PathParser(self._fresh(self._text.tokens))
            return self._paths.ask(path)
        self._paths = None
        ordered = self._text.copy()
        return ordered.ask() if all(map(ordered.read, path)) else None


@dataclass(frozen=True, slots=True)
class _Answer:
    """What may follow: a bit for each token, the lowest of a byte first, and whether the text may end."""

    packed: NDArray[np.uint8]
    accepting: bool


def _ask(parser: LLMatcher) -> _Answer:
    return _Answer(np.frombuffer(parser.compute_bitmask(), dtype=np.uint8), parser.is_accepting())


class _OrderedParser:
    """Reads a text token by token and is asked at each position once, so that its state is the text's alone.

    Where a limit is reached, a fresh parser reads the text at once, which needs far less than being asked all
    along, and goes on. It is replaced likewise, but not before it has read `_LEAST_TOKENS`, or else a text
    that comes near what any parser can follow would be read again for each of its tokens.
    """

    def __init__(
        self,
        fresh: Callable[[Sequence[int]], LLMatcher],
        tokens: Sequence[int] = (),
        replaced: int | None = None,
    ) -> None:
        """Read tokens, of which a replaced parser has read the first ones at once.

        Args:
            fresh: makes a parser behind a text.
            tokens: the text.
            replaced: where the parser is to have replaced another; None for nowhere.
        """
        self._fresh, self._replaced = fresh, replaced
        self.tokens = list(tokens[:replaced] if replaced is not None else ())
        self._parser = fresh(self.tokens)
        self._answer: _Answer | None = None
        for token in tokens[len(self.tokens) :]:
            self.read(token)

    def copy(self) -> _OrderedParser:
        """Another in the same state: llguidance's own copies share what they work out."""
        return _OrderedParser(self._fresh, self.tokens, self._replaced)

    def ask(self) -> _Answer:
        """What may follow.

        Raises:
            GrammarError: a limit is reached, or nothing can follow.
        """
        if self._answer is None:
            self._answer = self._tried(_ask)
        return self._answer

    def read(self, token: int) -> bool:
        """Read a token that does not end the text, if it is allowed; whether it is. Raises as `ask` does."""
        self.ask()
        if not self._tried(lambda parser: parser.try_consume_tokens([token])):
            return False
        self.tokens.append(token)
        self._answer = None
        return True

    def forget(self, count: int) -> None:
        """Go back by some tokens, which only a mistaken caller needs: the parser keeps what it worked out."""
        if count:
            self._parser.rollback(count)
            del self.tokens[-count:]
            self._answer = None

    def _tried(self, action: Callable[[LLMatcher], _Result]) -> _Result:
        result = action(self._parser)
        if self._parser.is_error():
            if self._replaced is not None and 0 < len(self.tokens) - self._replaced < _LEAST_TOKENS:
                check(self._parser)
            self._parser, self._replaced = self._fresh(self.tokens), len(self.tokens)
            _ask(self._parser)  # also where a token is to be read, as a copy does
            result = action(self._parser)
            check(self._parser)
        return result


class _PathParser:
    """Reads paths after a committed text; what it has worked out depends on all of them."""

    def __init__(self, parser: LLMatcher) -> None:
        """Begin with a parser behind the committed text."""
        self._parser = parser
        self._path: list[int] = []

    def ask(self, path: Sequence[int]) -> _Answer | None:
        """What may follow a path; None where it is forbidden.

        Raises:
            GrammarError: a limit is reached, or nothing can follow; the parser has stopped for good.
        """
        if not self._walk(path):
            return None
        answer = _ask(self._parser)
        check(self._parser)
        return answer

    def commit(self, tokens: Sequence[int]) -> None:
        """Take tokens, which are allowed, for committed. Raises as `ask` does."""
        self._walk(tokens)
        self._path = []

    def _walk(self, path: Sequence[int]) -> bool:
        """Go behind a path, or as far along it as it is allowed; whether that was all of it."""
        shared = _common(self._path, path)
        if shared < len(self._path):
            self._parser.rollback(len(self._path) - shared)
            del self._path[shared:]
        if ahead := path[shared:]:
            read = self._parser.try_consume_tokens(list(ahead))
            self._path += ahead[:read]
            check(self._parser)
        return len(self._path) == len(path)


def _common(left: Iterable[int], right: Iterable[int]) -> int:
    """Length of the common beginning."""
    length = 0
    for one, other in zip(left, right, strict=False):
        if one != other:
            break
        length += 1
    return length
