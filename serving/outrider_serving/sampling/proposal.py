"""A proposal: a tree of tokens that may follow a text, and for each token how it came about."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from outrider_serving.sampling.distribution import Distribution

ROOT = -1
"""In the place of a node: the end of the committed text, where every path begins."""


@dataclass(frozen=True)
class Proposal:
    """A tree of tokens; a chain is a tree without branches, and nothing proposed an empty one.

    Siblings stand in the order in which verification tries them, and their tokens are distinct. A token is

    * *chosen* where its `q` is None: a function of earlier text alone (n-gram, suffix, greedy draft, top-k or
      pruned tree). A score is never a q;
    * *drawn* where it has a `q`: the distribution it was drawn from, given the text before it and the
      siblings before it, after any mask. Siblings drawn without replacement carry q, q without the first,
      renormalised, and so on.

    Whether a drawn token is kept in the proposal may depend on q and on earlier tokens, never on the token
    itself.

    Attributes:
        tokens: token of each node; a node comes after its parent.
        parents: index of each node's parent, ROOT for those that follow the text.
        q: see above; empty means that all are chosen.
        source: where it was found, for counts only; a proposer that looks in one place needs no name for it.
    """

    tokens: tuple[int, ...] = ()
    parents: tuple[int, ...] = ()
    q: tuple[Distribution | None, ...] = field(default=())
    source: str = ""

    @staticmethod
    def chain(tokens: Sequence[int], q: Sequence[Distribution | None] = ()) -> Proposal:
        """The tree in which each token follows the one before."""
        return Proposal(tuple(tokens), tuple(range(-1, len(tokens) - 1)), tuple(q))

    def __len__(self) -> int:
        return len(self.tokens)

    @cached_property
    def children(self) -> dict[int, list[int]]:
        """The nodes below each node that has any, ROOT's too, in order."""
        below: dict[int, list[int]] = {}
        for node, parent in enumerate(self.parents):
            below.setdefault(parent, []).append(node)
        return below

    @cached_property
    def depths(self) -> tuple[int, ...]:
        """The depth of each node: 1 for those that follow the text."""
        depths: list[int] = []
        for parent in self.parents:
            depths.append(1 if parent == ROOT else depths[parent] + 1)
        return tuple(depths)

    @property
    def is_chain(self) -> bool:
        """No node has a sibling; true of an empty proposal."""
        return all(parent == node - 1 for node, parent in enumerate(self.parents))

    @property
    def is_chosen(self) -> bool:
        """No token was drawn."""
        return all(q is None for q in self.q)

    def cut(self, depth: int, nodes: int) -> Proposal:
        """The first `nodes` nodes, less those deeper than `depth`: which stay depends on no token."""
        if self.depth <= depth and len(self) <= nodes:
            return self
        kept = [node for node in range(min(nodes, len(self))) if self.depths[node] <= depth]
        place = {ROOT: ROOT} | {node: at for at, node in enumerate(kept)}
        return Proposal(
            tuple(self.tokens[node] for node in kept),
            tuple(place[self.parents[node]] for node in kept),
            tuple(self.q[node] for node in kept) if self.q else (),
            self.source,
        )

    @property
    def depth(self) -> int:
        """Length of the longest path; 0 for an empty proposal."""
        return max(self.depths, default=0)

    def path(self, node: int) -> tuple[int, ...]:
        """The nodes from below the root to `node`, itself included; empty for ROOT."""
        nodes = []
        while node != ROOT:
            nodes.append(node)
            node = self.parents[node]
        return tuple(reversed(nodes))

    def q_of(self, node: int) -> Distribution | None:
        """What a node's token was drawn from, None where it was chosen."""
        return self.q[node] if self.q else None
