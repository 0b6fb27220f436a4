"""Proposers that no user would want: each shows one thing that the engine must bear or get right."""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_serving.engine.target.kv import KVShape
from outrider_serving.proposers.base import (
    Advanced,
    Began,
    Event,
    Needs,
    Preempted,
    Row,
    Surroundings,
    TextOnly,
)
from outrider_serving.sampling.coupling import coupled_token
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.proposal import ROOT, Proposal


class Reader(TextOnly):
    """Base of those that know the text of every request."""

    def __init__(self) -> None:
        super().__init__()
        self.texts: dict[str, list[int]] = {}

    def observe(self, events: Sequence[Event]) -> None:
        for event in events:
            match event:
                case Began():
                    self.texts[event.request_id] = list(event.tokens)
                case Advanced():
                    self.texts[event.request_id].extend(event.committed)
                case Preempted():
                    del self.texts[event.request_id]

    def forget(self, request_id: str) -> None:
        self.texts.pop(request_id, None)

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        for row in rows:
            assert len(self.texts[row.request_id]) == row.length
        return [self.one(row, self.texts[row.request_id]) for row in rows]

    def one(self, row: Row, text: list[int]) -> Proposal:
        raise NotImplementedError


class Oracle(Reader):
    """Proposes the known continuation of each text, with a wrong token at every `wrong`-th position."""

    def __init__(self, known: Sequence[Sequence[int]], wrong: int | None = None) -> None:
        super().__init__()
        self._known = [list(text) for text in known]
        self._wrong = wrong

    def one(self, row: Row, text: list[int]) -> Proposal:
        whole = next((known for known in self._known if known[: len(text)] == text), [])
        tokens = whole[len(text) : len(text) + row.max_depth]
        if self._wrong is not None:
            tokens = [t ^ ((len(text) + n) % self._wrong == 0) for n, t in enumerate(tokens)]
        return Proposal.chain(tokens)


class Bushy(Oracle):
    """Hides the known continuation in a tree: at each depth it is the last of `width` siblings."""

    def __init__(self, known: Sequence[Sequence[int]], width: int = 3, vocabulary: int = 320) -> None:
        super().__init__(known)
        self.needs = Needs(width=width)
        self._vocabulary = vocabulary

    def one(self, row: Row, text: list[int]) -> Proposal:
        chain = super().one(row, text).tokens
        tokens: list[int] = []
        parents: list[int] = []
        right = ROOT
        for token in chain:
            for other in range(self.needs.width - 1, -1, -1):
                tokens.append((token + 7 * other) % self._vocabulary)
                parents.append(right)
            right = len(tokens) - 1
        return Proposal(tuple(tokens), tuple(parents))


def pseudo_law(text: Sequence[int], vocabulary: int, *, support: int | None = None) -> Distribution:
    """A distribution that is a fixed function of a text and has nothing to do with any model."""
    seed = int.from_bytes(hashlib.sha256(repr(list(text[-4:])).encode()).digest()[:8]) >> 1
    generator = torch.Generator().manual_seed(seed)
    weights = torch.rand(vocabulary, generator=generator, dtype=torch.float64) ** 8
    if support is None:
        return Distribution(None, weights / weights.sum())
    ids = torch.randperm(vocabulary, generator=generator)[:support]
    return Distribution(ids, weights[ids] / weights[ids].sum())


def without(q: Distribution, token: int) -> Distribution:
    """q given that it is not this token."""
    probs = q.probs.clone()
    index = q.index(token)
    assert index is not None
    probs[index] = 0
    return Distribution(q.ids, probs / probs.sum())


class Drawn(Reader):
    """A random tree of drawn tokens: siblings without replacement, dense q or q on a support."""

    def __init__(self, vocabulary: int, *, width: int = 2, support: int | None = None) -> None:
        super().__init__()
        self.needs = Needs(width=width)
        self._vocabulary = vocabulary
        self._support = support

    def one(self, row: Row, text: list[int]) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        laws: list[Distribution | None] = []
        frontier = ROOT
        path = list(text)
        for depth in range(row.max_depth):
            q = pseudo_law(path, self._vocabulary, support=self._support)
            if not self.goes_on(q):
                break
            for _ in range(self.needs.width):
                if len(tokens) == row.max_nodes:
                    break
                token = self.draw(row, q, depth)
                tokens.append(token)
                parents.append(frontier)
                laws.append(q)
                q = without(q, token)
            frontier = len(tokens) - 1
            path.append(tokens[-1])
        return Proposal(tuple(tokens), tuple(parents), tuple(laws))

    def goes_on(self, q: Distribution) -> bool:
        """Whether to draw one token more: decided before it is drawn."""
        return True

    def draw(self, row: Row, q: Distribution, depth: int) -> int:
        if row.noise is not None:
            return coupled_token(q, row.noise._replace(position=row.noise.position + depth))
        return q.token(row.randomness.categorical(q.probs))


class DrawnByItself(Drawn):
    """Draws from its own randomness even where it could take the noise of the verification."""

    def draw(self, row: Row, q: Distribution, depth: int) -> int:
        return q.token(row.randomness.categorical(q.probs))


class SelfStopping(Drawn):
    """Stops where q is too flat: legal, since q is known before the token is."""

    def goes_on(self, q: Distribution) -> bool:
        return float(q.probs.max()) > 0.027


class Fixed(Reader):
    """Proposes the same tokens again and again, whatever is allowed."""

    def __init__(self, *tokens: int) -> None:
        super().__init__()
        self._tokens = tokens

    def one(self, row: Row, text: list[int]) -> Proposal:
        return Proposal.chain((self._tokens * row.max_depth)[: row.max_depth])


class Raising(Oracle):
    """Raises whenever `fails` says so: it is called with the method's name and the number of the call."""

    def __init__(self, known: Sequence[Sequence[int]], fails: Callable[[str, int], bool]) -> None:
        super().__init__(known)
        self._fails = fails
        self.calls: dict[str, int] = {}

    def _call(self, name: str) -> None:
        self.calls[name] = self.calls.get(name, 0) + 1
        if self._fails(name, self.calls[name]):
            raise RuntimeError(f"{name} fails")

    def load(self, surroundings: Surroundings) -> None:
        self._call("load")

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        self._call("propose")
        return super().propose(rows)

    def observe(self, events: Sequence[Event]) -> None:
        self._call("observe")
        super().observe(events)

    def forget(self, request_id: str) -> None:
        self._call("forget")
        super().forget(request_id)

    def close(self) -> None:
        self.texts.clear()
        self._call("close")


class Slow(Oracle):
    """Takes its time."""

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        time.sleep(0.02)
        return super().propose(rows)


class HiddenReader(Bushy):
    """Keeps the rows of two layers' hidden states of every token that it is told of."""

    def __init__(self, known: Sequence[Sequence[int]], layers: tuple[int, ...]) -> None:
        super().__init__(known)
        self.needs = Needs(hidden_layers=layers, width=3)
        self.rows: dict[str, dict[int, list[Tensor]]] = {}
        self.reused: dict[str, int] = {}
        self.whole: dict[str, list[int]] = {}

    def observe(self, events: Sequence[Event]) -> None:
        super().observe(events)
        for event in events:
            match event:
                case Began():
                    assert event.missing == event.reused
                    self.reused[event.request_id] = event.reused
                    self.rows[event.request_id] = {layer: [] for layer in self.needs.hidden_layers}
                case Advanced():
                    rows = self.rows[event.request_id]
                    for layer, have in rows.items():
                        assert event.start == self.reused[event.request_id] + len(have)
                        assert event.hidden[layer].shape[0] == len(event.ran)
                        have.extend(event.hidden[layer])
                    text = self.texts[event.request_id]
                    assert tuple(text[event.start : event.start + len(event.ran)]) == event.ran
                    self.whole[event.request_id] = list(text)


@dataclass
class Ledger:
    """What an `OwnPages` found."""

    checked: int = 0
    asked: int = 0


class OwnPages(Bushy):
    """Has a layer of keys and values of its own: it writes there which token a slot holds, after which text.

    Before every proposal it reads the layer through the request's pages: a page that was reused, moved,
    shared or preempted in the wrong way shows.
    """

    def __init__(self, known: Sequence[Sequence[int]], *, weights: int = 0, page_size: int = 4) -> None:
        super().__init__(known)
        self.needs = Needs(kv_layers=(KVShape(1, 1, 2),), width=3)
        self.memory_bytes = weights
        self.ledger = Ledger()
        self.begins: list[Began] = []
        self._page_size = page_size
        self._kv: tuple[Tensor, Tensor] | None = None

    def load(self, surroundings: Surroundings) -> None:
        assert surroundings.page_size == self._page_size
        ((keys, values),) = surroundings.kv
        self._kv = keys, values
        keys.fill_(-1)

    def observe(self, events: Sequence[Event]) -> None:
        super().observe(events)
        assert self._kv is not None
        for event in events:
            if isinstance(event, Began):
                self.begins.append(event)
            if isinstance(event, Advanced):
                text = self.texts[event.request_id]
                for place in range(event.start, event.start + len(event.ran)):
                    self._kv[0][self._slot(event.pages, place)] = float(text[place])
                    self._kv[1][self._slot(event.pages, place)] = float(_digest(text[: place + 1]))

    def propose(self, rows: Sequence[Row]) -> list[Proposal]:
        assert self._kv is not None
        for row in rows:
            self.ledger.asked += 1
            text = self.texts[row.request_id]
            for place in range(row.ran):
                slot = self._slot(row.pages, place)
                assert float(self._kv[0][slot]) == text[place], f"slot {slot} of place {place}"
                assert float(self._kv[1][slot, 0, 0]) == _digest(text[: place + 1])
                self.ledger.checked += 1
        return super().propose(rows)

    def _slot(self, pages: Sequence[int], place: int) -> int:
        return pages[place // self._page_size] * self._page_size + place % self._page_size


def _digest(text: Sequence[int]) -> int:
    """A number below 2 ** 40 that stands for a text: exact in float64."""
    return int.from_bytes(hashlib.sha256(repr(list(text)).encode()).digest()[:5])
