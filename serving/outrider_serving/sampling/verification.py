"""Decides which proposed tokens are kept, so that the output has the law of the target alone.

A proposal is a tree of tokens after the committed text. One target pass gives logits after the text and after
every node; from these and the tokens between the text and a node, `law` makes p, the target's distribution
(with all parameters) of the next token there. Verification walks down from the root: at each node it decides
on a token; where a child has that token, the child is accepted and the walk goes on below it, and otherwise
the token is the last one of this step.

So p is only ever used at a node whose whole path was committed: it is the target's distribution given exactly
the committed text. It is then enough to show, for one node, that the token committed there has law p given
everything before it; by induction over positions the whole output has the law of the target, whatever the
proposer, the shape of the tree, or where steps begin. After a token that ends the request nothing follows, on
any path.

**Greedy.** The token is the best one, by `law.best`. Nothing is random: the output is that of plain greedy
decoding.

**Rejection.** The children are the candidates of `rejection.sample`, whose docstring has the proof that the
token has law p. Draws are fresh at every node, and independent of those that made the proposal.

**Coupled** (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The token is `coupling.coupled_token` of p and
the output position: clocks of different positions are independent, and the proposal does not enter. So the
output is a function of the request alone: turning speculation on or off, another proposer or depth, changes
no token. This is exact given equal logits; a target pass over another number of tokens can differ in the last
bits.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import islice
from typing import TypeVar

import numpy as np
import torch
from torch import Tensor

from outrider_serving.sampling.coupling import coupled_tokens
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.highest import highest, with_finiteness
from outrider_serving.sampling.law import NoTokenLeftError, TokenLaw, best, distributions
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.reading import Reading, together
from outrider_serving.sampling.rejection import sample
from outrider_serving.sampling.transfer import sent

_Answer = TypeVar("_Answer")

_ELEMENTS_AT_ONCE = 1 << 24
"""Most probabilities that are made at once: 128 MiB each of logits, softmax, and noise or residuals."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request's part in a verification step. Set by the step loop.

    A greedy law is verified greedily; another one by coupling where there is noise, by rejection where not.

    Attributes:
        law: as of the committed text.
        proposal: within what may still be committed; `fault.proposal_fault` has found nothing.
        root: row of the logits that follow the committed text; those after node n are in row root + 1 + n.
        noise: the key of the first token to commit, which is `law.noise` for a request with a seed.
        randomness: the request's own source, used by rejection only.
        expected: an accepted length that is likely to be reached: so much is computed at once.
    """

    law: TokenLaw
    proposal: Proposal
    root: int
    noise: NoiseKey | None
    randomness: Randomness
    expected: int = 0


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a row commits in a step.

    Attributes:
        path: the accepted nodes, from below the root downwards.
        tokens: their tokens, then the target's own, which is absent where an accepted token ends the request.
    """

    path: tuple[int, ...]
    tokens: tuple[int, ...]

    @property
    def accepted(self) -> int:
        """The accepted length."""
        return len(self.path)


def verify(rows: Sequence[VerifyRow], logits: Tensor) -> list[Verdict | Exception]:
    """Verify a batch of proposals. Rows do not influence each other.

    Args:
        rows: at most one for each request.
        logits: [positions, vocabulary] of one target pass, any float dtype.

    Returns:
        For each row its verdict, or what was raised while it was verified; the request must then fail, since
        some of its draws may be spent.

    Raises:
        torch.AcceleratorError: the device is broken, and with it every request.
    """
    walks = [_Walk(row) for row in rows]
    _step([walk for walk in walks if walk.plain], logits, _highest, _Walk.follow_all)
    others = [walk for walk in walks if not walk.plain]
    size = max(1, _ELEMENTS_AT_ONCE // logits.shape[-1])
    for start in range(0, len(others), size):
        _walk(others[start : start + size], logits, size)
    return [walk.error or Verdict(tuple(walk.path), tuple(walk.tokens)) for walk in walks]


@dataclass(slots=True)
class _Walk:
    """How far down its tree a row has come.

    Attributes:
        node: the one whose logits decide on the next token.
        path, tokens: what is accepted so far; at the end `tokens` has the target's own too.
        ahead: the nodes that are asked about: this one, and those after it if each first child is accepted.
    """

    row: VerifyRow
    node: int = ROOT
    path: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ahead: list[int] = field(default_factory=list)
    ended: bool = False
    error: Exception | None = None

    @property
    def plain(self) -> bool:
        return self.row.law.greedy and self.row.law.plain

    def logits(self, node: int) -> int:
        """Row of the logits that follow a node."""
        return self.row.root + 1 + node

    def key(self, after: int) -> NoiseKey:
        """The noise for the token that comes so many after the next one."""
        noise = self.row.noise
        assert noise is not None
        return noise._replace(position=noise.position + len(self.tokens) + after)

    @property
    def children(self) -> Sequence[int]:
        return self.row.proposal.children.get(self.node, ())

    def look_ahead(self, free: int, most: int) -> None:
        """Choose what to ask about: as many nodes as are expected to be reached, at least `free` of them.

        Where the logits are edited it is one node: each path needs edits of its own.

        Args:
            free: so many cost no more time than one.
            most: so many at most.
        """
        self.ahead = [self.node]
        if self.row.law.plain:
            below = self.row.proposal.children
            reach = min(most, max(free, self.row.expected + 1 - len(self.path)))
            while len(self.ahead) < reach and self.ahead[-1] in below:
                self.ahead.append(below[self.ahead[-1]][0])

    def paths(self) -> list[tuple[int, Sequence[int]]]:
        """For each node that is asked about: its row of logits, and the tokens up to it."""
        tokens = [*self.tokens, *(self.row.proposal.tokens[node] for node in self.ahead[1:])]
        return [(self.logits(node), tokens[: len(self.tokens) + n]) for n, node in enumerate(self.ahead)]

    def take(self, token: int, child: int | None) -> None:
        """Commit a token, and go down to the child that has it."""
        self.tokens.append(token)
        if child is not None:
            self.path.append(child)
            self.node = child
        self.ended = child is None or self.row.law.ends_with(token)

    def fail(self, error: Exception) -> None:
        """End without a verdict."""
        self.error, self.ended = error, True

    def reached(self, answers: Sequence[_Answer]) -> Iterator[_Answer]:
        """Of the answers, one for each node that was asked about, those for nodes that the walk comes to."""
        for node, answer in zip(self.ahead, answers, strict=True):
            if self.ended or node != self.node:
                return
            yield answer

    def follow(self, tokens: Sequence[int]) -> None:
        """Commit tokens that were decided on without a look at the proposal, as far as it has them."""
        for token in self.reached(tokens):
            self._follow(token)

    def _follow(self, token: int) -> None:
        proposed = self.row.proposal.tokens
        self.take(token, next((child for child in self.children if proposed[child] == token), None))

    def follow_all(self, found: Mapping[int, tuple[int, bool]]) -> None:
        """Go down to the end: for each row of logits a token, and whether its logit is finite."""
        while not self.ended:
            token, sound = found[self.logits(self.node)]
            self._follow(token) if sound else self.fail(NoTokenLeftError())

    def draw(self, laws: Sequence[Distribution]) -> Reading[None]:
        """Commit tokens of these laws by rejection, as far as the proposal has them."""
        proposal = self.row.proposal
        for p in self.reached(laws):
            children = self.children
            candidates = [(proposal.tokens[child], proposal.q_of(child)) for child in children]
            token, accepted = yield from sample(p, candidates, self.row.randomness)
            self.take(token, None if accepted is None else children[accepted])


def _walk(walks: Sequence[_Walk], logits: Tensor, most: int) -> None:
    """All rows some levels at a time, so that these are one batch for each way to verify.

    Args:
        walks: `most` at most.
        logits: see `verify`.
        most: rows of logits that are made into distributions at once.
    """
    while walks:
        each = most // len(walks)
        free = max(1, torch.get_num_threads() // len(walks)) if logits.is_cpu else each
        for walk in walks:
            walk.look_ahead(free, each)
        greedy = [walk for walk in walks if walk.row.law.greedy]
        coupled = [walk for walk in walks if not walk.row.law.greedy and walk.row.noise is not None]
        rejection = [walk for walk in walks if not walk.row.law.greedy and walk.row.noise is None]
        _step(greedy, logits, _best, _Walk.follow)
        _step(coupled, logits, _coupled, _Walk.follow)
        _draw(rejection, logits)
        walks = [walk for walk in walks if not walk.ended]


def _draw(walks: Sequence[_Walk], logits: Tensor) -> None:
    """A token for each walk by rejection: all look at their numbers together."""
    drawing = list[tuple[_Walk, Reading[None]]]()
    _step(walks, logits, _laws, lambda walk, laws: drawing.append((walk, walk.draw(laws))))
    for (walk, _), error in zip(drawing, together([reading for _, reading in drawing]), strict=True):
        if error is not None:
            walk.fail(error)


def _highest(walks: Sequence[_Walk], logits: Tensor) -> list[Mapping[int, tuple[int, bool]]]:
    """Where nothing edits the logits: one argmax over all positions, for `_Walk.follow_all`."""
    spans = [range(walk.row.root, walk.row.root + 1 + len(walk.row.proposal)) for walk in walks]
    positions = [position for span in spans for position in span]
    theirs = _rows(logits, positions)
    return [dict(zip(positions, with_finiteness(theirs, highest(theirs)), strict=True))] * len(walks)


def _best(walks: Sequence[_Walk], logits: Tensor) -> list[list[int]]:
    return _shared(walks, best(*_asked(walks, logits)))


def _laws(walks: Sequence[_Walk], logits: Tensor) -> list[list[Distribution]]:
    return _shared(walks, distributions(*_asked(walks, logits)))


def _coupled(walks: Sequence[_Walk], logits: Tensor) -> list[list[int]]:
    keys = [walk.key(after) for walk in walks for after in range(len(walk.ahead))]
    return _shared(walks, coupled_tokens(distributions(*_asked(walks, logits)), keys))


def _asked(walks: Sequence[_Walk], logits: Tensor) -> tuple[Tensor, list[tuple[TokenLaw, Sequence[int]]]]:
    """The logits that decide on the nodes that all walks ask about, and where each row of them stands."""
    paths = [(walk.row.law, *path) for walk in walks for path in walk.paths()]
    return _rows(logits, [row for _, row, _ in paths]), [(law, tokens) for law, _, tokens in paths]


def _shared(walks: Sequence[_Walk], answers: Sequence[_Answer]) -> list[list[_Answer]]:
    """To each walk those for the nodes that it asked about."""
    left = iter(answers)
    return [list(islice(left, len(walk.ahead))) for walk in walks]


def _rows(logits: Tensor, positions: Sequence[int]) -> Tensor:
    """Some rows; nothing is copied where they lie one after the other."""
    first, count = positions[0], len(positions)
    if list(positions) == list(range(first, first + count)):
        return logits[first : first + count]
    return logits[sent([np.array(positions, dtype=np.int64)], logits.device)[0]]


def _step(
    walks: Sequence[_Walk],
    logits: Tensor,
    ask: Callable[[Sequence[_Walk], Tensor], Sequence[_Answer]],
    go_on: Callable[[_Walk, _Answer], None],
) -> None:
    """Part of some rows' way. Where the batch raises, each row is asked alone: it may be one that does.

    And then each about no node that it may not come to.
    """
    if not walks:
        return
    try:
        answers = ask(walks, logits)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if len(walks) > 1:
            for walk in walks:
                _step([walk], logits, ask, go_on)
        elif len(walks[0].ahead) > 1:
            del walks[0].ahead[1:]
            _step(walks, logits, ask, go_on)
        else:
            walks[0].fail(error)
        return
    for walk, answer in zip(walks, answers, strict=True):
        try:
            go_on(walk, answer)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            walk.fail(error)
