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

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from outrider_serving.sampling.coupling import coupled_tokens
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.highest import highest
from outrider_serving.sampling.law import NoTokenLeftError, TokenLaw, best, distributions
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.rejection import sample

_Answer = TypeVar("_Answer")

_MASS_SLACK = 1e-6
"""How far from 1 the sum of a proposer's q may be: more is no rounding, even of weights in float32."""

_ELEMENTS_AT_ONCE = 1 << 24
"""Most probabilities that are made at once: 128 MiB each of logits, their softmax and noise."""


@dataclass(frozen=True, slots=True)
class VerifyRow:
    """One request's part in a verification step. Set by the step loop.

    A greedy law is verified greedily; another one by coupling where there is noise, by rejection where not.

    Attributes:
        law: as of the committed text.
        proposal: within what may still be committed; `proposal_fault` has found nothing.
        root: row of the logits that follow the committed text; those after node n are in row root + 1 + n.
        noise: the key of the first token to commit, which is `law.noise` for a request with a seed.
        randomness: the request's own source, used by rejection only.
    """

    law: TokenLaw
    proposal: Proposal
    root: int
    noise: NoiseKey | None
    randomness: Randomness


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


def proposal_fault(proposal: Proposal, vocab_size: int) -> str | None:
    """What makes a proposal impossible to verify; None where nothing does.

    The step goes on without such a proposal. That can bias nothing where the proposer keeps its contract,
    because then there never is one.
    """
    tokens, nodes = proposal.tokens, len(proposal)
    if len(proposal.parents) != nodes or len(proposal.q) not in (0, nodes):
        return f"{nodes} tokens, {len(proposal.parents)} parents, {len(proposal.q)} distributions"
    if not all(ROOT <= parent < node for node, parent in enumerate(proposal.parents)):
        return "a node comes before its parent"
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        return f"a token that is no whole number from 0 to {vocab_size - 1}"
    if len(set(zip(proposal.parents, tokens, strict=True))) != nodes:
        return "two siblings of the same token"
    drawn = [(token, q) for token, q in zip(tokens, proposal.q, strict=False) if q is not None]
    for token, q in drawn:
        if fault := _law_fault(q, vocab_size):
            return fault
        if not q.prob(token) > 0:
            return "a token that its distribution cannot have drawn"
    return None


def _law_fault(q: object, vocab_size: int) -> str | None:
    """What makes a proposer's q no distribution; None where nothing does."""
    if not isinstance(q, Distribution) or q.probs.dtype is not torch.float64 or q.probs.dim() != 1:
        return "a q that is no Distribution of float64 [support]"
    ids = q.ids
    if len(q.probs) != (vocab_size if ids is None else len(ids)):
        return "a distribution of the wrong size"
    if ids is not None and (ids.dtype is not torch.int64 or not _are_tokens(ids, vocab_size)):
        return "a support that is not int64, distinct and within the vocabulary"
    least, mass = torch.stack([q.probs.amin(), q.probs.sum()]).tolist()
    if not (least >= 0 and abs(mass - 1) < _MASS_SLACK):
        return f"a distribution with the sum {mass:g} and the least probability {least:g}"
    return None


def _are_tokens(ids: Tensor, vocab_size: int) -> bool:
    least, most = torch.stack(ids.aminmax()).tolist()
    in_order = ids.sort().values
    return least >= 0 and most < vocab_size and bool((in_order[1:] > in_order[:-1]).all())


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
        _walk(others[start : start + size], logits)
    return [walk.error or Verdict(tuple(walk.path), tuple(walk.tokens)) for walk in walks]


@dataclass(slots=True)
class _Walk:
    """How far down its tree a row has come.

    Attributes:
        node: the one whose logits decide on the next token.
        path, tokens: what is accepted so far; at the end `tokens` has the target's own too.
    """

    row: VerifyRow
    node: int = ROOT
    path: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    ended: bool = False
    error: Exception | None = None

    @property
    def plain(self) -> bool:
        return self.row.law.greedy and self.row.law.plain

    @property
    def logits(self) -> int:
        """Row of the logits that follow the node."""
        return self.row.root + 1 + self.node

    @property
    def key(self) -> NoiseKey:
        noise = self.row.noise
        assert noise is not None
        return noise._replace(position=noise.position + len(self.tokens))

    @property
    def children(self) -> Sequence[int]:
        return self.row.proposal.children.get(self.node, ())

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

    def follow(self, token: int) -> None:
        """Commit a token that was decided on without a look at the proposal."""
        proposed = self.row.proposal.tokens
        self.take(token, next((child for child in self.children if proposed[child] == token), None))

    def follow_all(self, found: Mapping[int, tuple[int, bool]]) -> None:
        """Go down to the end: for each row of logits a token, and whether its logit is finite."""
        while not self.ended:
            token, sound = found[self.logits]
            self.follow(token) if sound else self.fail(NoTokenLeftError())

    def draw(self, p: Distribution) -> None:
        """Commit a token of law p by rejection."""
        proposal, children = self.row.proposal, self.children
        candidates = [(proposal.tokens[child], proposal.q_of(child)) for child in children]
        token, accepted = sample(p, candidates, self.row.randomness)
        self.take(token, None if accepted is None else children[accepted])


def _walk(walks: Sequence[_Walk], logits: Tensor) -> None:
    """All rows level by level, so that each level is one batch for each way to verify."""
    while walks:
        greedy = [walk for walk in walks if walk.row.law.greedy]
        coupled = [walk for walk in walks if not walk.row.law.greedy and walk.row.noise is not None]
        rejection = [walk for walk in walks if not walk.row.law.greedy and walk.row.noise is None]
        _step(greedy, logits, _best, _Walk.follow)
        _step(coupled, logits, _coupled, _Walk.follow)
        _step(rejection, logits, _distributions, _Walk.draw)
        walks = [walk for walk in walks if not walk.ended]


def _highest(walks: Sequence[_Walk], logits: Tensor) -> list[Mapping[int, tuple[int, bool]]]:
    """Where nothing edits the logits: one argmax over all positions, for `_Walk.follow_all`."""
    spans = [range(walk.row.root, walk.row.root + 1 + len(walk.row.proposal)) for walk in walks]
    positions = [position for span in spans for position in span]
    theirs = logits if positions == list(range(len(logits))) else logits[positions]
    tokens = highest(theirs)
    finite = theirs.gather(-1, tokens[:, None])[:, 0].isfinite()
    found = dict(zip(positions, zip(tokens.tolist(), finite.tolist(), strict=True), strict=True))
    return [found] * len(walks)


def _best(walks: Sequence[_Walk], logits: Tensor) -> list[int]:
    return best(_current(walks, logits), [(walk.row.law, walk.tokens) for walk in walks])


def _distributions(walks: Sequence[_Walk], logits: Tensor) -> list[Distribution]:
    return distributions(_current(walks, logits), [(walk.row.law, walk.tokens) for walk in walks])


def _coupled(walks: Sequence[_Walk], logits: Tensor) -> list[int]:
    return coupled_tokens(_distributions(walks, logits), [walk.key for walk in walks])


def _current(walks: Sequence[_Walk], logits: Tensor) -> Tensor:
    """The logits that decide on each walk's next token."""
    return logits[[walk.logits for walk in walks]]


def _step(
    walks: Sequence[_Walk],
    logits: Tensor,
    ask: Callable[[Sequence[_Walk], Tensor], Sequence[_Answer]],
    go_on: Callable[[_Walk, _Answer], None],
) -> None:
    """Part of some rows' way. Where the batch raises, each row is asked alone: it may be one that does."""
    if not walks:
        return
    try:
        answers = ask(walks, logits)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if len(walks) == 1:
            walks[0].fail(error)
        else:
            for walk in walks:
                _step([walk], logits, ask, go_on)
        return
    for walk, answer in zip(walks, answers, strict=True):
        try:
            go_on(walk, answer)
        except torch.AcceleratorError:
            raise
        except Exception as error:
            walk.fail(error)
