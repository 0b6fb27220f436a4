"""How much of what a model writes was seen before: in stored outputs, and in the text itself."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

WIDTH: Final = 8
"""Tokens in a window: a token is covered if a window that it lies in occurs in a stored output."""


@dataclass(frozen=True, slots=True)
class Written:
    """A prompt and what was written after it, as token ids."""

    prompt: tuple[int, ...]
    output: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """How much of some outputs was seen before.

    Attributes:
        tokens: of these outputs.
        covered: those that lie in a window which occurs in a stored output.
        looked_up: those that a lookup in the request's own text gives, see `looked_up`.
        verbatim: prompts that occur in a stored prompt with its output.
    """

    tokens: int
    covered: int
    looked_up: int
    verbatim: int

    @property
    def share(self) -> float:
        """Of covered tokens."""
        return self.covered / self.tokens if self.tokens else 0.0

    @property
    def own_share(self) -> float:
        """Of tokens that the own text gives."""
        return self.looked_up / self.tokens if self.tokens else 0.0


def examine(stored: Sequence[Written], written: Sequence[Written]) -> Coverage:
    """Hold what was written against what was stored."""
    seen = frozenset(window for one in stored for window in windows(one.output))
    whole = [(*one.prompt, *one.output) for one in stored]
    return Coverage(
        tokens=sum(len(one.output) for one in written),
        covered=sum(covered(one.output, seen) for one in written),
        looked_up=sum(looked_up(one.prompt, one.output) for one in written),
        verbatim=sum(any(_occurs(one.prompt, text) for text in whole) for one in written),
    )


def _occurs(run: Sequence[int], text: Sequence[int]) -> bool:
    return tuple(run) in windows(text, len(run))


def windows(tokens: Sequence[int], width: int = WIDTH) -> Iterator[tuple[int, ...]]:
    """All runs of so many tokens, from the first one on; none where there are fewer."""
    return (tuple(tokens[at : at + width]) for at in range(len(tokens) - width + 1))


def covered(output: Sequence[int], seen: frozenset[tuple[int, ...]], width: int = WIDTH) -> int:
    """How many tokens lie in a window that is among those seen; each counts once."""
    count, end = 0, 0
    for at, window in enumerate(windows(output, width)):
        if window in seen:
            count += at + width - max(at, end)
            end = at + width
    return count


def looked_up(prompt: Sequence[int], output: Sequence[int], least: int = 2) -> int:
    """How many output tokens a lookup in the text before them gives, each asked for alone.

    Given is the token that followed the longest suffix of the text, of at least `least` tokens, where it
    occurred before; the latest such place on a tie.
    """
    text = [*prompt, *output]
    followers: defaultdict[tuple[int, ...], list[int]] = defaultdict(list)
    right = 0
    for at in range(least, len(text)):
        places = followers[tuple(text[at - least : at])]
        if places and at >= len(prompt):
            best = max(places, key=lambda place: (_common_suffix(text, place, at), place))
            right += text[best] == text[at]
        places.append(at)
    return right


def _common_suffix(text: Sequence[int], one: int, other: int) -> int:
    """How many tokens before one place equal those before the other, later one."""
    length = 0
    while length < one and text[one - 1 - length] == text[other - 1 - length]:
        length += 1
    return length
