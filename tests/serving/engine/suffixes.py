"""Suffix proposers with a history."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from outrider_serving.proposers.suffix import SuffixProposer
from outrider_serving.settings import SuffixSettings
from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import Indexes, best_indexes


def warm_suffix(
    known: Sequence[Sequence[int]], *, width: int = 1, indexes: Callable[[], Indexes] = best_indexes
) -> SuffixProposer:
    """One that has seen these texts, as those of `support.request`."""
    history = History(indexes())
    history.hold("the test", 1 << 20)
    for text in known:
        history.learn("everybody", text, 0)
    return SuffixProposer(SuffixSettings(width=width, min_probability=0), history)
