"""Proposes what most often followed the longest known suffix of a text: there, or in its tenant's history."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_serving.proposers.base import Advanced, Began, Event, Needs, Row, Surroundings
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import Scope, SuffixSettings
from outrider_serving.suffix.history import History
from outrider_serving.suffix.lookup import Look, SuffixIndex


class SuffixProposer:
    """Looks the end of each request's text up in it and in the finished outputs of its tenant.

    `suffix.lookup` says what is found. Its memory is not the target's: 44 to 90 bytes for each token of the
    requests that run, and the history's.
    """

    memory_bytes = 0

    def __init__(self, settings: SuffixSettings, history: History) -> None:
        """Take how to look, and the history, which others may look at and fill as well."""
        self.needs = Needs(width=settings.width)
        self._settings = settings
        self._history = history
        self._indexes = history.indexes
        self._look = Look(settings.max_match, settings.places, settings.min_probability)
        self._own = Scope.REQUEST in settings.scopes
        self._shared = Scope.HISTORY in settings.scopes
        self._texts: dict[str, tuple[SuffixIndex, str | None]] = {}

    def load(self, surroundings: Surroundings) -> None:  # noqa: ARG002
        """The history is filled from now on."""
        if self._shared:
            self._history.hold(self, self._settings.history_tokens)

    def close(self) -> None:
        """And for this one not any more."""
        self._texts.clear()
        self._history.release(self)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """Chosen tokens for each row: a chain, or a tree where the settings want one.

        Raises:
            KeyError: a request was never observed.
            MemoryError: there is not enough.
        """
        return [self._propose(row) for row in rows]

    def observe(self, events: Sequence[Event]) -> None:
        """Append to the requests' texts; a preemption changes none."""
        for event in events:
            match event:
                case Began():
                    text = self._indexes.text(len(event.tokens))
                    text.extend(event.tokens)
                    self._texts[event.request_id] = text, event.history
                case Advanced() if event.committed:
                    self._texts[event.request_id][0].extend(event.committed)

    def forget(self, request_id: str) -> None:
        """Drop a request's text."""
        self._texts.pop(request_id, None)

    def _propose(self, row: Row) -> Proposal:
        text, tenant = self._texts[row.request_id]
        scopes = {Scope.REQUEST: text} if self._own else {}
        if self._shared and tenant is not None and (history := self._history.index(tenant)) is not None:
            scopes[Scope.HISTORY] = history
        depth = row.max_depth
        nodes = max(depth, min(row.max_nodes, self.needs.width * depth))
        found = self._indexes.look_up(text, tuple(scopes.values()), self._look, depth, nodes)
        if not found.tokens:
            return Proposal()
        return Proposal(found.tokens, found.parents, source=tuple(scopes)[found.scope].value)
