"""The index of earlier text in plain Python: the reference for the compiled one, and what takes its place.

`lookup.py` says what it does; here it is done in the same order and arithmetic as in native/suffix.cpp, so
that both give the same answers to the last bit.
"""

from __future__ import annotations

from array import array
from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from outrider_serving.suffix.lookup import (
    BREAK,
    MAX_MATCH,
    ORDERS,
    SCORE_OF_MATCH,
    SCORED_MATCH,
    Found,
    Look,
    Size,
)

_WORD = (1 << 64) - 1


@dataclass(slots=True)
class _Text:
    """A text in a segment, from `start` to the next one's."""

    start: int
    time: int
    used: bool = False


@dataclass(slots=True)
class _Segment:
    """A part of the log.

    Attributes:
        capacity: a power of two of tokens.
        tokens: ids, and BREAK after each text that has ended.
        latest: by order, [capacity]: one more than the latest place whose last tokens have this hash.
        earlier: by order, [capacity]: one more than the place before each place with the same hash.
        texts: in the order of their places.
    """

    capacity: int
    tokens: array[int] = field(default_factory=lambda: array("i"))
    latest: list[array[int]] = field(init=False)
    earlier: list[array[int]] = field(init=False)
    texts: list[_Text] = field(default_factory=list)

    def __post_init__(self) -> None:
        """Nothing is known."""
        empty = bytes(4 * self.capacity)
        self.latest = [array("I", empty) for _ in ORDERS]
        self.earlier = [array("I", empty) for _ in ORDERS]

    @property
    def bytes(self) -> int:
        """What arrays of this capacity take."""
        return 4 * self.capacity * (1 + 2 * len(ORDERS))

    def bucket(self, spread: int) -> int:
        """Where `latest` has a hash."""
        return spread >> (65 - self.capacity.bit_length())


class TwinIndex:
    """See `lookup.SuffixIndex`."""

    def __init__(self, first: int, most: int) -> None:
        """Take the tokens of the first segment and of the largest, both powers of two from 128 on."""
        self._first, self._most = first, most
        self._segments: list[_Segment] = []
        self._spare: _Segment | None = None
        self._open = False
        self._written = False  # since it lost memory to another one

    @property
    def size(self) -> Size:
        """What it holds."""
        spare = self._spare.bytes if self._spare is not None else 0
        taken = sum(segment.bytes for segment in self._segments)
        return Size(sum(len(segment.tokens) for segment in self._segments), taken + spare)

    def extend(self, tokens: Sequence[int], time: int = 0) -> None:
        """See `lookup.SuffixIndex.extend`."""
        self._written = True
        for token in tokens:
            segment = self._room(time)
            self._put(segment, token)

    def discard(self) -> None:
        """See `lookup.SuffixIndex.discard`."""
        self._segments, self._spare, self._open = [], None, False

    def limit(self, most: int) -> None:
        """See `lookup.SuffixIndex.limit`."""
        self._most, self._first = most, min(self._first, most)
        if self._spare is not None and not self._fits(self._spare):
            self._spare = None

    def end(self) -> None:
        """See `lookup.SuffixIndex.end`."""
        if self._open:
            self._segments[-1].tokens.append(BREAK)
            self._open = False

    def drop(self, heir: TwinIndex | None = None, /) -> list[tuple[int, Sequence[int]]] | None:
        """See `lookup.SuffixIndex.drop`."""
        if len(self._segments) < 2:
            return None
        segment = self._segments.pop(0)
        left = [segment]
        if heir is None or heir is self:
            self._keep(left)
        else:
            left += self._spares()
            self._spare = None
            heir._keep(left)
            if self._written:
                self._keep(left)
            self._written = False
        return [
            (text.time, segment.tokens[start:end])
            for text, start, end in _spans(segment)
            if text.used and end < len(segment.tokens)
        ]

    def erase(self, before: int) -> int:
        """See `lookup.SuffixIndex.erase`."""
        erased = 0
        for segment in self._segments:
            for text, start, end in _spans(segment):
                if text.time < before and segment.tokens[start] != BREAK:
                    segment.tokens[start:end] = array("i", [BREAK] * (end - start))
                    text.used = False
                    erased += end - start
        return erased

    def tail(self, count: int) -> Sequence[int]:
        """The last tokens of the open text, at most so many."""
        if not self._open:
            return ()
        segment = self._segments[-1]
        return segment.tokens[max(segment.texts[-1].start, len(segment.tokens) - count) :]

    def places(self, end: Sequence[int], look: Look) -> Iterator[_Place]:
        """Places that end as `end` does, as `lookup` says."""
        spreads = [_spread(h) for h in _hashes(end)]
        found, above = 0, MAX_MATCH + 1
        for n, order in reversed(list(enumerate(ORDERS[: len(spreads)]))):
            visits = 0
            for segment in reversed(self._segments):
                at = segment.latest[n][segment.bucket(spreads[n])]
                while at and visits < 2 * look.places:
                    visits += 1
                    place = at - 1
                    at = segment.earlier[n][place]
                    match = _match(segment.tokens, place, end, look.max_match)
                    if order <= match < above:
                        yield _Place(segment, place + 1, match)
                        found += 1
                        if found == look.places:
                            return
            above = order

    def _room(self, time: int) -> _Segment:
        """The segment that the next token goes to, with the open text in it; there is place for an end."""
        last = self._segments[-1] if self._segments else None
        if last is None or len(last.tokens) >= last.capacity - 1:
            segment = self._made(self._first if last is None else min(2 * last.capacity, self._most))
            if last is not None and self._open:
                # What a text had before goes on being its past, but is not a place of this segment.
                text = last.texts[-1]
                segment.texts.append(_Text(0, text.time))
                segment.tokens.extend(last.tokens[max(text.start, len(last.tokens) - MAX_MATCH) :])
            self._segments.append(segment)
            last = segment
        if not self._open:
            last.texts.append(_Text(len(last.tokens), time))
            self._open = True
        return last

    def _fits(self, dropped: _Segment) -> bool:
        """Whether a dropped segment is kept for the next one: it is of the largest size, or of half of it."""
        return self._most // 2 <= dropped.capacity <= self._most

    def _spares(self) -> list[_Segment]:
        return [] if self._spare is None else [self._spare]

    def _keep(self, some: list[_Segment]) -> None:
        """Keep the largest that fits, of some segments and the one that is kept; the rest is `some`."""
        candidates = [*self._spares(), *filter(self._fits, some)]
        best = max(candidates, key=lambda segment: segment.capacity, default=None)
        some[:] = [segment for segment in (*self._spares(), *some) if segment is not best]
        self._spare = best

    def _made(self, capacity: int) -> _Segment:
        """A segment; the compiled index clears one that was dropped, as new memory takes longer."""
        if self._spare is not None and self._spare.capacity <= capacity:
            capacity, self._spare = self._spare.capacity, None
        return _Segment(capacity)

    def _put(self, segment: _Segment, token: int) -> None:
        """Append a token: the place before it is now one that something followed."""
        at = len(segment.tokens)
        before = segment.tokens[max(segment.texts[-1].start, at - ORDERS[-1]) : at]
        for n, hashed in enumerate(_hashes(before)):
            bucket = segment.bucket(_spread(hashed))
            segment.earlier[n][at - 1] = segment.latest[n][bucket]
            segment.latest[n][bucket] = at
        segment.tokens.append(token)


@dataclass(frozen=True, slots=True)
class _Place:
    """A place: what followed begins at `at`, and `match` tokens before it are the text's last ones."""

    segment: _Segment
    at: int
    match: int

    def token(self, distance: int) -> int | None:
        """What followed at a distance: BREAK for the end of a text, None where it is not known."""
        tokens, at = self.segment.tokens, self.at + distance
        return tokens[at] if at < len(tokens) else None


def look_up(text: TwinIndex, scopes: Sequence[TwinIndex], look: Look, depth: int, nodes: int, /) -> Found:
    """See `lookup.Lookup`."""
    end = text.tail(look.max_match)
    best, voters = Found(), list[_Place]()
    for number, scope in enumerate(scopes):
        places = sorted(scope.places(end, look), key=lambda place: -place.match)
        for count in range(1, len(places) + 1):
            if count < len(places) and places[count].match == places[count - 1].match:
                continue
            match = places[count - 1].match
            path, score = _path(places[:count], look.least, depth)
            score += min(match, SCORED_MATCH) / SCORE_OF_MATCH
            if path and score > best.score:
                best = Found(tuple(path), tuple(range(-1, len(path) - 1)), score, number)
                voters = places[:count]
    if voters:
        _mark_used(voters[0])
    if nodes > depth:
        return _tree(best, voters, look.least, depth, nodes)
    return best


def _path(places: Sequence[_Place], least: float, depth: int) -> tuple[list[int], float]:
    """The path of majorities, and the sum of its probabilities."""
    path, score, probability = list[int](), 0.0, 1.0
    while len(path) < depth:
        votes, known = _votes(places, len(path))
        if not votes:
            break
        token = max(votes, key=lambda token: len(votes[token]))
        probability = probability * len(votes[token]) / known
        if probability < least:
            break
        score += probability
        path.append(token)
        places = votes[token]
    return path, score


def _votes(places: Sequence[_Place], distance: int) -> tuple[dict[int, list[_Place]], int]:
    """The places by the token that followed, in the order of the first of each; and how many have any."""
    votes, known = dict[int, list[_Place]](), 0
    for place in places:
        token = place.token(distance)
        if token is not None:
            known += 1
            if token != BREAK:
                votes.setdefault(token, []).append(place)
    return votes, known


@dataclass(slots=True)
class _Leaf:
    """A token that may join a tree."""

    token: int
    parent: int
    depth: int
    probability: float
    places: list[_Place]


def _tree(best: Found, voters: list[_Place], least: float, depth: int, nodes: int) -> Found:
    """The most probable continuations, from the most probable on, the first found of equal ones."""
    tokens, parents, leaves = list[int](), list[int](), list[_Leaf]()

    def add(parent: int, at: int, probability: float, places: list[_Place]) -> None:
        votes, known = _votes(places, at)
        for token, agreed in votes.items():
            share = probability * len(agreed) / known
            if share >= least:
                leaves.append(_Leaf(token, parent, at + 1, share, agreed))

    add(-1, 0, 1.0, voters)
    while leaves and len(tokens) < nodes:
        leaf = max(leaves, key=lambda leaf: leaf.probability)
        leaves.remove(leaf)
        tokens.append(leaf.token)
        parents.append(leaf.parent)
        if leaf.depth < depth:
            add(len(tokens) - 1, leaf.depth, leaf.probability, leaf.places)
    return Found(tuple(tokens), tuple(parents), best.score, best.scope)


def _mark_used(place: _Place) -> None:
    """Its text made a proposal."""
    texts = place.segment.texts
    texts[bisect_left(texts, place.at, key=lambda text: text.start) - 1].used = True


def _spans(segment: _Segment) -> Iterator[tuple[_Text, int, int]]:
    """Each text with the place of its first token, and the one after its last.

    There stands a BREAK, unless the text goes on in the next segment.
    """
    ends = [text.start - 1 for text in segment.texts[1:]]
    ends.append(len(segment.tokens) - (segment.tokens[-1] == BREAK))
    for text, end in zip(segment.texts, ends, strict=True):
        yield text, text.start, end


def _match(tokens: array[int], place: int, end: Sequence[int], most: int) -> int:
    """How many tokens up to a place equal the last ones of `end`."""
    match, limit = 0, min(most, len(end), place + 1)
    while match < limit and tokens[place - match] == end[-1 - match]:
        match += 1
    return match


def _hashes(tokens: Sequence[int]) -> Iterator[int]:
    """Of the last 1, 2, 4, ... tokens, as far as there are so many."""
    hashed, orders = 0, iter(ORDERS)
    order = next(orders)
    for count in range(1, min(len(tokens), ORDERS[-1]) + 1):
        hashed = (hashed * 0x9E3779B97F4A7C15 + tokens[-count] + 1) & _WORD
        if count == order:
            yield hashed
            order = next(orders, 0)


def _spread(hashed: int) -> int:
    """Lets every bit tell in the high ones."""
    return ((hashed ^ hashed >> 32) * 0xD6E8FEB86659FD93) & _WORD
