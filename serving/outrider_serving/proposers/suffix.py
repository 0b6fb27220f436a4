"""Proposes what most often followed the longest known suffix of a text: there, or in its tenant's history."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from outrider_serving.proposers.base import Advanced, Began, Event, Needs, Row, Surroundings
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import Scope, SuffixSettings
from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import Indexes
from outrider_serving.suffix.lookup import MAX_MATCH, Look, SuffixIndex

PIECE = 2048
"""Tokens of texts that have begun that are taken in each time that something is observed: 0.1 to 0.3 ms."""


@dataclass(slots=True)
class _Text:
    """A request's text.

    Attributes:
        index: of as much of it as was taken in.
        history: whose finished outputs it may be continued by.
        begun: what it began with, until all of that is taken in; `taken` tokens are.
        since: what it went on with meanwhile.
        tail: of its last tokens and `since`, to be looked up until all is taken in.
    """

    index: SuffixIndex
    history: str | None
    begun: Sequence[int]
    taken: int = 0
    since: list[int] = field(default_factory=list)
    tail: SuffixIndex | None = None

    @property
    def missing(self) -> int:
        """Tokens of what it began with that are not taken in yet."""
        return len(self.begun) - self.taken

    def take_in(self, most: int) -> int:
        """Take in more of what it began with, so many tokens at most; how many that were."""
        piece = self.begun[self.taken : self.taken + most]
        self.index.extend(piece)
        self.taken += len(piece)
        if not self.missing:
            self.index.extend(self.since)
            self.begun, self.taken, self.since, self.tail = (), 0, [], None
        return len(piece)

    def wait(self, indexes: Indexes) -> None:
        """Have the end looked up, as not all is taken in."""
        if self.tail is None:
            self.tail = indexes.tail()
            self.tail.extend(self.begun[-MAX_MATCH:])
            self.tail.extend(self.since)

    def go_on(self, tokens: Sequence[int]) -> None:
        """Append what was committed."""
        if not self.missing:
            self.index.extend(tokens)
            return
        self.since += tokens
        if self.tail is not None:
            self.tail.extend(tokens)


class SuffixProposer:
    """Looks the end of each request's text up in it and in the finished outputs of its tenant.

    A long text is taken in over several steps, so that none waits for it; what is not in yet is not found.

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
        self._texts: dict[str, _Text] = {}
        self._missing: dict[str, _Text] = {}

    def load(self, surroundings: Surroundings) -> None:  # noqa: ARG002
        """The history is filled from now on."""
        if self._shared:
            self._history.hold(self, self._settings.history_tokens)

    def close(self) -> None:
        """And for this one not any more."""
        for request_id in tuple(self._texts):
            self.forget(request_id)
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
                    self.forget(event.request_id)
                    text = _Text(self._indexes.text(len(event.tokens)), event.history, event.tokens)
                    self._texts[event.request_id] = self._missing[event.request_id] = text
                case Advanced() if event.committed:
                    self._texts[event.request_id].go_on(event.committed)
        if self._missing:
            self._take_in()

    def forget(self, request_id: str) -> None:
        """Drop a request's text."""
        self._missing.pop(request_id, None)
        if (text := self._texts.pop(request_id, None)) is not None:
            text.index.discard()

    def _take_in(self) -> None:
        """Take in a piece of the texts that are not in yet, of the shortest first."""
        left = PIECE
        for request_id, text in sorted(self._missing.items(), key=lambda item: item[1].missing):
            left -= text.take_in(left)
            if text.missing:
                text.wait(self._indexes)
            else:
                del self._missing[request_id]

    def _propose(self, row: Row) -> Proposal:
        text = self._texts[row.request_id]
        tenant = text.history
        scopes = {Scope.REQUEST: text.index} if self._own else {}
        if self._shared and tenant is not None and (history := self._history.index(tenant)) is not None:
            scopes[Scope.HISTORY] = history
        depth = row.max_depth
        nodes = max(depth, min(row.max_nodes, self.needs.width * depth))
        end = text.index if text.tail is None else text.tail
        found = self._indexes.look_up(end, tuple(scopes.values()), self._look, depth, nodes)
        if not found.tokens:
            return Proposal()
        return Proposal(found.tokens, found.parents, source=tuple(scopes)[found.scope].value)
