"""Lookups by brute force, straight from what `suffix.lookup` says: no hashes, no chains, no segments."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_serving.suffix.lookup import ORDERS, Found, Look

Text = list[int]
Place = tuple[Text, int, int]
"""A text, where what followed begins in it, and the match before that."""


def places(texts: Sequence[Text], end: Text, look: Look) -> list[Place]:
    """The places that are to be collected, those of the longest match first.

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


def voters(texts: Sequence[Text], end: Text, look: Look) -> list[list[Place]]:
    """The places that vote for each length of a match, the longest first."""
    collected = places(texts, end, look)
    lengths = sorted({match for _, _, match in collected}, reverse=True)
    return [[place for place in collected if place[2] >= length] for length in lengths]


def votes(some: list[Place], path: Sequence[int], open_text: Text) -> tuple[Text, int]:
    """What followed where it had gone on like a path, and at how many places it is known what did."""
    alive = [(t, at + len(path)) for t, at, _ in some if t[at : at + len(path)] == [*path]]
    known = [(t, at) for t, at in alive if at < len(t) or t is not open_text]
    return [t[at] for t, at in known if at < len(t)], len(known)


def follow(some: list[Place], depth: int, least: float, open_text: Text) -> tuple[Text, float]:
    """The path of majorities, and the sum of its probabilities."""
    path: Text = []
    probability, score = 1.0, 0.0
    while len(path) < depth:
        tokens, known = votes(some, path, open_text)
        if not tokens:
            break
        token = max(tokens, key=tokens.count)
        probability = probability * tokens.count(token) / known
        if probability < least:
            break
        score += probability
        path.append(token)
    return path, score


def grow(
    some: list[Place], depth: int, nodes: int, least: float, open_text: Text
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Tokens and parents: of the continuations whose parent is in the tree always the most probable one.

    Of equal ones that whose parent came first; then the one that followed the first place.
    """
    every = {tuple(t[at : at + n]) for t, at, _ in some for n in range(1, min(depth, len(t) - at) + 1)}
    probabilities: dict[tuple[int, ...], float] = {(): 1.0}
    order: dict[tuple[int, ...], int] = {}
    for path in sorted(every, key=len):
        tokens, known = votes(some, path[:-1], open_text)
        probabilities[path] = probabilities[path[:-1]] * tokens.count(path[-1]) / known
        order[path] = tokens.index(path[-1])
    left = {path for path in every if probabilities[path] >= least}
    tree: dict[tuple[int, ...], int] = {(): -1}
    while len(tree) <= nodes and (ready := [path for path in left if path[:-1] in tree]):
        best = min(ready, key=lambda path: (-probabilities[path], tree[path[:-1]], order[path]))
        tree[best] = len(tree) - 1
        left.remove(best)
    _, *chosen = tree
    return tuple(path[-1] for path in chosen), tuple(tree[path[:-1]] for path in chosen)


def look_up(scopes: Sequence[Sequence[Text]], text: Text, look: Look, depth: int, nodes: int = 0) -> Found:
    """The best-scored chain after `text`, which may be the last one of a scope; a tree of more nodes."""
    best, chosen, end = Found(), list[Place](), text[-look.max_match :]
    for number, texts in enumerate(scopes):
        for some in voters(texts, end, look):
            path, score = follow(some, depth, look.least, text)
            score += min(some[-1][2], 16) / 20
            if path and score > best.score:
                best = Found(tuple(path), tuple(range(-1, len(path) - 1)), score, number)
                chosen = some
    if nodes > depth:
        return Found(*grow(chosen, depth, nodes, look.least, text), best.score, best.scope)
    return best
