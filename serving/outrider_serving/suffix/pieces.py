"""Long outputs are remembered piece by piece, so that no step and no request waits for one."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, NamedTuple, TypeVar

from outrider_serving.suffix.lookup import LESSON_TOKENS, MAX_MATCH

if TYPE_CHECKING:  # the API's process has no compiled code, and parts outputs too
    from outrider_serving.suffix.history import History

Tokens = TypeVar("Tokens", bound=Sequence[int])


def pieces(output: Tokens) -> Iterator[Tokens]:
    """Its parts, of LESSON_TOKENS at most.

    Each begins with the last tokens of the one before, as many as a match has at most, so that matches go on.
    """
    for at in range(0, max(1, len(output) - MAX_MATCH), LESSON_TOKENS - MAX_MATCH):
        yield output[at : at + LESSON_TOKENS]  # type: ignore[misc]  # a slice is of the same kind


class _Piece(NamedTuple):
    tenant: str
    tokens: Sequence[int]
    time: int


class Coming:
    """What requests have written and a history has not taken in yet; true while there is something."""

    def __init__(self, history: History) -> None:
        """Nothing waits for this history."""
        self._history = history
        self._pieces: deque[_Piece] = deque()

    def __len__(self) -> int:
        """How many pieces wait."""
        return len(self._pieces)

    def put(self, tenant: str, output: Sequence[int], time: int) -> None:
        """Let an output wait; see `History.learn`."""
        if self._history.kept:
            self._pieces.extend(_Piece(tenant, tokens, time) for tokens in pieces(output))

    def go_on(self) -> None:
        """Let the history take in what has waited longest: LESSON_TOKENS at most."""
        left = LESSON_TOKENS
        while self._pieces and (left := left - len(self._pieces[0].tokens)) >= 0:
            self._history.learn(*self._pieces.popleft())

    def purge(self, tenant: str) -> None:
        """Forget what a tenant's requests have written."""
        self._pieces = deque(piece for piece in self._pieces if piece.tenant != tenant)

    def erase(self, before: int) -> None:
        """Forget what is of an earlier time."""
        self._pieces = deque(piece for piece in self._pieces if piece.time >= before)
