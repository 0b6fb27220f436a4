"""The interface between the step loop and whatever proposes tokens."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol


@dataclass(frozen=True, slots=True)
class Observed:
    """Tokens that joined a request's text: a whole prompt when it is admitted, then what each step commits.

    A proposer that is loaded while a request runs is told the text so far at once.
    """

    request_id: str
    tokens: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Query:
    """A request that wants a proposal in this step. Set by the step loop.

    Attributes:
        request_id: the request; its whole text has been observed.
        min_depth: a shorter proposal will not be verified.
        max_depth: a longer one will be cut; at least `min_depth`.
    """

    request_id: str
    min_depth: int
    max_depth: int


@dataclass(frozen=True, slots=True)
class Proposal:
    """A chain of *chosen* tokens, maybe empty: each is a function of earlier text alone (q is one-hot)."""

    tokens: tuple[int, ...] = ()


class Proposer(Protocol):
    """Proposes continuations for a whole batch at once. Called by the thread of the step loop only.

    Any method may raise: the step goes on without proposals, the failure is counted, and no request fails.
    """

    def propose(self, queries: Sequence[Query]) -> Sequence[Proposal]:
        """One proposal for each query, in their order."""
        ...

    def observe(self, events: Sequence[Observed]) -> None:
        """Take note of new text; called for every loaded proposer, whether it is in force or not."""
        ...

    def forget(self, request_id: str) -> None:
        """Drop what is kept for a request that has ended; one that was never observed is no error."""
        ...
