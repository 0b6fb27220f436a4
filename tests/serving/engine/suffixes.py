"""Suffix proposers with a history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider_serving.proposers.base import Row
from outrider_serving.proposers.suffix import SuffixProposer
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import SuffixSettings
from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import Indexes, best_indexes


class Noting(SuffixProposer):
    """A suffix proposer that tells what it has proposed.

    Attributes:
        proposed: the tokens.
    """

    def __init__(self, settings: SuffixSettings, history: History) -> None:
        super().__init__(settings, history)
        self.proposed: set[int] = set()

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        proposals = super().propose(rows)
        self.proposed.update(*(proposal.tokens for proposal in proposals))
        return proposals


def warm_suffix(
    known: Sequence[Sequence[int]], *, width: int = 1, indexes: Callable[[], Indexes] = best_indexes
) -> Noting:
    """One that has seen these texts, as those of `support.request`."""
    history = History(indexes())
    history.hold("the test", 1 << 20)
    for text in known:
        history.learn("everybody", text, 0)
    return Noting(SuffixSettings(width=width, min_probability=0), history)
