"""Proposes what followed the same tokens earlier in the request's own text (prompt lookup)."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice

from outrider_serving.proposers.base import Advanced, Began, Event, Row, TextOnly
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import NgramSettings

_MAX_CANDIDATES = 1024


class NgramProposer(TextOnly):
    """Looks the last tokens of each request up in its own prompt and output.

    Among earlier places where the last `min_match` tokens occur, the one that shares the longest suffix with
    the end of the text wins (up to `max_match` tokens), the latest of them on a tie; the tokens after it are
    proposed. Where they reach the end of the text, copying goes on into the copy, as in LZ77: a period
    shorter than the depth is repeated. To bound a step, only the latest 1,024 places are looked at. What a
    request begins with is indexed at once, what it adds when a proposal is asked for: O(tokens) in all.
    """

    def __init__(self, settings: NgramSettings) -> None:
        """Take the shortest and longest suffix to look for."""
        super().__init__()
        self._settings = settings
        self._texts: dict[str, _Text] = {}

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        """One chain of chosen tokens for each row; it is empty where nothing matches.

        Raises:
            KeyError: a request was never observed.
        """
        longest = self._settings.max_match
        return [
            Proposal.chain(self._texts[row.request_id].continuation(longest, row.max_depth)) for row in rows
        ]

    def observe(self, events: Sequence[Event]) -> None:
        """Append to the requests' texts; a preemption changes none."""
        for event in events:
            match event:
                case Began():
                    text = _Text(self._settings.min_match)
                    text.extend(event.tokens)
                    text.index()
                    self._texts[event.request_id] = text
                case Advanced():
                    self._texts[event.request_id].extend(event.committed)

    def forget(self, request_id: str) -> None:
        """Drop a request's text."""
        self._texts.pop(request_id, None)


class _Text:
    """One request's tokens, and where each sequence of `width` tokens was followed by something."""

    def __init__(self, width: int) -> None:
        self._width = width
        self._tokens: list[int] = []
        self._followers: dict[tuple[int, ...], list[int]] = {}
        self._indexed = width  # tokens that are in `_followers`, or have too few before them

    def extend(self, tokens: Sequence[int]) -> None:
        """Append tokens."""
        self._tokens.extend(tokens)

    def index(self) -> None:
        """Each token so far is the follower of the `width` tokens before it."""
        tokens, width = self._tokens, self._width
        for at in range(self._indexed, len(tokens)):
            self._followers.setdefault(tuple(tokens[at - width : at]), []).append(at)
        self._indexed = max(self._indexed, len(tokens))

    def continuation(self, longest: int, depth: int) -> tuple[int, ...]:
        """The `depth` tokens after the best earlier match of the end of the text; empty without a match."""
        at = self._best_match(longest)
        if at is None:
            return ()
        copied = self._tokens[at : at + depth]
        period = len(copied)
        while len(copied) < depth:
            copied.append(copied[len(copied) - period])
        return tuple(copied)

    def _best_match(self, longest: int) -> int | None:
        """Where the continuation of the best match begins."""
        self.index()
        places = self._followers.get(tuple(self._tokens[-self._width :]), [])
        best, best_length = None, 0
        for at in islice(reversed(places), _MAX_CANDIDATES):
            length = self._common_suffix(at, longest)
            if length > best_length:
                best, best_length = at, length
            if length == longest:
                break
        return best

    def _common_suffix(self, at: int, longest: int) -> int:
        """How many tokens before `at`, at most `longest`, equal those at the end of the text."""
        tokens, end = self._tokens, len(self._tokens)
        length = self._width
        while length < longest and length < at and tokens[at - 1 - length] == tokens[end - 1 - length]:
            length += 1
        return length
