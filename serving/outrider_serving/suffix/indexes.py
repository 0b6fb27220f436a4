"""Makes indexes of earlier text and looks things up in them: compiled ones where there is the library."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from outrider_serving.native.library import library
from outrider_serving.suffix.compiled import CompiledIndex, CompiledLookup, GivenBack
from outrider_serving.suffix.lookup import MAX_MATCH, Lookup, SuffixIndex
from outrider_serving.suffix.twin import TwinIndex, look_up

logger = logging.getLogger(__name__)

_LEAST, _MOST = 1 << 10, 1 << 18
"""Tokens of a segment; the least is that of a log that has just begun."""

_TEXT = 1 << 14
"""Tokens of the largest segment of a request's text: the first tokens touch all its pages of hashes, 80."""

_SEGMENTS = 8
"""A full log has about so many segments: more would go in smaller pieces, and take longer to look up in."""


@dataclass(frozen=True, slots=True)
class Indexes:
    """One kind of index.

    Attributes:
        compiled: whether it is compiled code.
        look_up: for one thread.
        leaving: bytes of memory that indexes had, and that are not given back yet.
    """

    compiled: bool
    look_up: Lookup
    leaving: Callable[[], int]
    _make: Callable[[int, int], SuffixIndex]

    def log(self, tokens: int) -> SuffixIndex:
        """An index that is to hold at most about so many tokens."""
        return self._make(_LEAST, self.segment(tokens))

    def segment(self, tokens: int) -> int:
        """Tokens of the largest segment of an index that is to hold about so many."""
        return min(_MOST, max(_LEAST, _power_of_two(tokens // _SEGMENTS)))

    def text(self, tokens: int) -> SuffixIndex:
        """An index of one text that begins with so many tokens and goes on."""
        first = min(_TEXT, max(_LEAST, _power_of_two(tokens + tokens // 8)))
        return self._make(first, _TEXT)

    def tail(self) -> SuffixIndex:
        """A small index of the end of a text, to look it up in others."""
        return self._make(2 * MAX_MATCH, 2 * MAX_MATCH)


def compiled_indexes() -> Indexes | None:
    """Those of compiled code; None where there is none for this machine, which the library has logged."""
    kernels = library()
    if kernels is None:
        return None
    functions = kernels.suffix
    look_up: Any = CompiledLookup(functions)
    given_back = GivenBack(functions)
    return Indexes(
        True,
        look_up,
        lambda: given_back.bytes,
        lambda first, most: CompiledIndex(functions, given_back, first, most),
    )


def twin_indexes() -> Indexes:
    """Those in plain Python."""
    plain: Any = look_up
    return Indexes(False, plain, lambda: 0, TwinIndex)


def best_indexes() -> Indexes:
    """Compiled ones; where there are none, those in plain Python, which is logged."""
    compiled = compiled_indexes()
    if compiled is None:
        logger.warning("the suffix index runs in plain Python: proposals take some 16 times as long")
    return compiled or twin_indexes()


def _power_of_two(least: int) -> int:
    return 1 << max(0, least - 1).bit_length()
