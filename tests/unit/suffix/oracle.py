"""Lookups by brute force, straight from what `suffix.lookup` says: no hashes, no chains, no segments."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_serving.suffix.lookup import ORDERS, Found, Look

Text = list[int]


def places(texts: Sequence[Text], end: Text, look: Look) -> list[tuple[Text, int, int]]:
    """(text, where what followed begins, match) of the places that are to be collected, the longest first.

    Right where no chain is longer than what is visited of one.
    """
    orders = [order for order in ORDERS if order <= min(len(end), look.max_match)]
    found = []
    for number, text in enumerate(texts):
        for at in range(1, len(text)):
            match = 0
            while match < min(at, len(end), look.max_match) and text[at - 1 - match] == end[-1 - match]:
                match += 1
            if match:
                order = max(order for order in orders if order <= match)
                found.append((-order, -number, -at, match))
    found.sort()
    chosen = [(texts[-number], -at, match) for _, number, at, match in found[: look.places]]
    return sorted(chosen, key=lambda place: -place[2])


def voters(texts: Sequence[Text], end: Text, look: Look) -> list[list[tuple[Text, int, int]]]:
    """The places that vote for each length of a match, the longest first."""
    collected = places(texts, end, look)
    lengths = sorted({match for _, _, match in collected}, reverse=True)
    return [[place for place in collected if place[2] >= length] for length in lengths]


def follow(
    some: list[tuple[Text, int, int]], depth: int, least: float, open_text: Text
) -> tuple[Text, float]:
    """The path of majorities, and the sum of its probabilities."""
    path: Text = []
    probability, score = 1.0, 0.0
    while len(path) < depth:
        alive = [(t, at) for t, at, _ in some if t[at : at + len(path)] == path]
        known = [(t, at) for t, at in alive if at + len(path) < len(t) or t is not open_text]
        votes = [t[at + len(path)] for t, at in known if at + len(path) < len(t)]
        if not votes:
            break
        token = max(votes, key=votes.count)
        probability = probability * votes.count(token) / len(known)
        if probability < least:
            break
        score += probability
        path.append(token)
    return path, score


def look_up(scopes: Sequence[Sequence[Text]], text: Text, look: Look, depth: int) -> Found:
    """The best-scored chain after `text`, which may be the last one of a scope."""
    best, end = Found(), text[-look.max_match :]
    for number, texts in enumerate(scopes):
        for some in voters(texts, end, look):
            path, score = follow(some, depth, look.least, text)
            score += min(some[-1][2], 16) / 20
            if path and score > best.score:
                best = Found(tuple(path), tuple(range(-1, len(path) - 1)), score, number)
    return best
