"""What an index of earlier text is asked, and what it answers: by compiled code, or by its readable twin.

The index is a log of texts. For each place in it, and each of `ORDERS`, it knows the place before it at which
the same last 1, 2, 4, ... tokens stood (hash chains, as LZ77 compressors keep them). Nothing is ever rebuilt
or merged: a token more costs the same at any size, and the oldest segment of the log can go at once.

A lookup collects *places* that end as the text in question ends:

* chains of the longest order first, newest segment and newest place first, so that of each order at most
  twice `places` are visited, and `places` are collected in all;
* of each place the match is counted backwards, exactly, up to `max_match` tokens: a hash only says where to
  look. What the chains of a longer order tell is not collected again;
* what followed a place is known up to the end of its segment, in which a text may go on.

What is proposed is what followed. For each length m of a match among the places, those that match at least m
tokens vote: a path is followed from the end of the text, at each token by the majority of the places that
went on like it so far (the longest match, then the newest place, on a tie); its probability is the product of
the majorities' shares, and it ends before it falls under `least`. The score of m is the sum of these
probabilities, one for each token, which estimates the accepted length as in SuffixDecoding (Oliaro et al.
2024, arXiv 2411.04975, section 3), and a twentieth for each token of m up to 16: of equally agreed places
those with more in common are more often right. The best score wins, the longer match on a tie.

A chain is the path of the winner. A tree holds its most probable continuations, from the most probable on.
The shares are scores, never a proposal's q.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, Self

ORDERS = (1, 2, 4, 8, 16)
"""How many last tokens each chain goes by."""

MAX_MATCH = 64
MAX_PLACES = 64
LEAST_OUTPUT = 4
"""Tokens: shorter outputs are worth no place in a log, here or shared."""
LESSON_TOKENS = 2048
"""What was written elsewhere is learned so much at a time: compiled code takes it in 0.3 ms."""

BREAK = -1
"""Stands in the log where a text ends; no token."""

SCORED_MATCH = 16
SCORE_OF_MATCH = 20
"""A match of m tokens adds min(m, 16) / 20 to a score."""


@dataclass(frozen=True, slots=True)
class Look:
    """How to look something up.

    Attributes:
        max_match: of a match so many tokens are counted, 1 to MAX_MATCH.
        places: so many places are collected, 1 to MAX_PLACES.
        least: a path ends where its probability would fall under it, 0 to 1.
    """

    max_match: int = 32
    places: int = 16
    least: float = 0.1


@dataclass(frozen=True, slots=True)
class Found:
    """A continuation.

    Attributes:
        tokens: of each node; a chain is a tree without branches.
        parents: index of each node's parent, which comes before it; -1 for those that follow the text.
        score: see the module; 0 where nothing was found.
        scope: index of the log that it was found in.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    score: float = 0.0
    scope: int = 0


@dataclass(frozen=True, slots=True)
class Size:
    """What a log holds: tokens with those that were erased, and bytes that are reserved for it.

    One dropped segment, if it is of the largest size or half of it, is kept for the next one.
    """

    tokens: int
    bytes: int


@dataclass(frozen=True, slots=True)
class HistorySize:
    """What is remembered of what requests have written.

    Attributes:
        tenants: that have one.
        tokens, bytes: of all of them, with what waits to be taken back, and the memory that they had and that
            is not given back yet.
        evicted: tokens that had to go for others so far, with those that were taken back because they were
            used.
        kept: what comes is remembered, since a proposer makes use of it, or did.
    """

    tenants: int = 0
    tokens: int = 0
    bytes: int = 0
    evicted: int = 0
    kept: bool = False


class SuffixIndex(Protocol):
    """A log of texts. Calls must not overlap.

    Every method that appends may raise MemoryError; the log is then as it was, but for what it had appended.
    """

    @property
    def size(self) -> Size:
        """What it holds."""
        ...

    def extend(self, tokens: Sequence[int], time: int = 0) -> None:
        """Append to the text that is open; if none is, one begins, which is said to be of that time.

        Args:
            tokens: ids of at least 0, under 2**31.
            time: of any unit.
        """
        ...

    def discard(self) -> None:
        """Give the memory back; the last call."""
        ...

    def limit(self, most: int) -> None:
        """Segments that begin from now on hold at most so many tokens: a power of two from 128 on."""
        ...

    def end(self) -> None:
        """The open text ends here, and what is appended next begins another."""
        ...

    def drop(self, heir: Self | None = None, /) -> list[tuple[int, Sequence[int]]] | None:
        """Drop the oldest segment.

        Args:
            heir: the log that may use its memory. What that does not want, this one may, if something was
                appended since the last time; the rest is given back.

        Returns:
            (time, tokens) of the ended texts in it that proposals were made from; None if there was no
            segment but the one that is appended to.
        """
        ...

    def erase(self, before: int) -> int:
        """Overwrite the texts that are of an earlier time, while none is open; how many tokens that were."""
        ...


class Lookup(Protocol):
    """Looks the end of a text up in logs of one kind."""

    def __call__(
        self,
        text: SuffixIndex,
        scopes: Sequence[SuffixIndex],
        look: Look,
        depth: int,
        nodes: int,
        /,
    ) -> Found:
        """The best-scored continuation of the open text of `text`, the first scope's on a tie.

        Args:
            text: its open text is what is to be continued.
            scopes: where to look; `text` may be one of them.
            look: how.
            depth: longest path, at least 1.
            nodes: a chain where it is `depth`; otherwise a tree of at most so many nodes.
        """
        ...
