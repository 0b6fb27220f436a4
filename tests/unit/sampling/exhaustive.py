"""Follows every branch of every draw, so that the law of an output is a sum, not an estimate."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import numpy as np
import torch

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling import verification
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.fault import proposal_fault
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.reading import Reading, together
from outrider_serving.sampling.verification import Verdict, VerifyRow
from unit.sampling.reference import Target, Text, edited_logits, law_of, random_target

VOCABULARY = 4
EOS = 0
PROMPT = (1, 1, 2)


class Branch:
    """Draws that follow given outcomes, then take the first possible one and note the alternatives."""

    def __init__(self, script: tuple[int, ...] = ()) -> None:
        self.script = script
        self.taken: list[int] = []
        self.weight = 1.0
        self.alternatives: list[tuple[int, ...]] = []

    def bernoulli(self, p: float) -> bool:
        return self._follow([1 - p, p]) == 1

    def categorical(self, weights: torch.Tensor) -> int:
        return self._follow((weights / weights.sum()).tolist())

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        return torch.tensor([self.categorical(weights)])

    def _follow(self, probs: list[float]) -> int:
        possible = [outcome for outcome, prob in enumerate(probs) if prob > 0]
        step = len(self.taken)
        if step < len(self.script):
            outcome = self.script[step]
        else:
            outcome = possible[0]
            self.alternatives += [(*self.taken, other) for other in possible[1:]]
        self.taken.append(outcome)
        self.weight *= probs[outcome]
        return outcome


class Parity:
    """A constraint that looks at all of the text: rules out one or two tokens, by a hash of it."""

    def __init__(self) -> None:
        self.text: Text = ()

    def mask(self, path: Sequence[int]) -> torch.Tensor:
        return torch.tensor(parity_mask((*self.text, *path)))

    def advance(self, tokens: Sequence[int]) -> None:
        self.text = (*self.text, *tokens)


def parity_mask(text: Text) -> list[bool]:
    rng = np.random.default_rng([7, *text])
    mask = np.ones(VOCABULARY, dtype=bool)
    mask[rng.integers(VOCABULARY, size=2)] = False
    return [bool(allowed) for allowed in mask]


T = TypeVar("T")


def alone(reading: Reading[T]) -> T:
    """The answer of one reading, or what it raises."""
    (answer,) = together([reading])
    if isinstance(answer, Exception):
        raise answer
    return answer


Proposing = Callable[[Text, Randomness], Proposal]


def nothing(text: Text, randomness: Randomness) -> Proposal:
    return Proposal()


@dataclass(frozen=True)
class RandomTrees:
    """Proposes trees whose shape, q and chosen tokens are a fixed function of the text and of earlier draws.

    Attributes:
        siblings: most children of a node.
        drawn: share of the nodes whose token is drawn, from a random q on a random support.
    """

    seed: int
    nodes: int = 3
    siblings: int = 3
    drawn: float = 1.0

    def __call__(self, text: Text, randomness: Randomness) -> Proposal:
        tokens: list[int] = []
        parents: list[int] = []
        q: list[Distribution | None] = []
        todo: list[tuple[int, Text]] = [(ROOT, ())]
        while todo:
            parent, path = todo.pop(0)
            rng = np.random.default_rng([self.seed, *text, 99, *path])
            taken: list[int] = []
            for _ in range(rng.integers(1 if parent == ROOT else 0, self.siblings + 1)):
                if len(tokens) == self.nodes:
                    break
                token, law = self._node(
                    np.random.default_rng([self.seed, *text, *path, 98, *taken]), taken, randomness
                )
                taken.append(token)
                todo.append((len(tokens), (*path, token)))
                tokens.append(token)
                parents.append(parent)
                q.append(law)
        return Proposal(tuple(tokens), tuple(parents), tuple(q))

    def _node(
        self, rng: np.random.Generator, taken: list[int], randomness: Randomness
    ) -> tuple[int, Distribution | None]:
        free = [token for token in range(VOCABULARY) if token not in taken]
        if rng.random() >= self.drawn:
            return int(rng.choice(free)), None
        support = rng.permutation(free)[: rng.integers(1, len(free) + 1)]
        weights = torch.from_numpy(rng.dirichlet(np.ones(len(support))))
        if rng.random() < 0.5:
            q = Distribution(torch.from_numpy(support), weights)
        else:
            q = Distribution(
                None,
                torch.zeros(VOCABULARY, dtype=torch.float64).scatter(0, torch.from_numpy(support), weights),
            )
        return q.token(randomness.categorical(q.probs)), q


@dataclass(frozen=True)
class Setting:
    """A request, its target, and how many tokens of output to look at."""

    params: SamplingParams
    constrained: bool = False
    length: int = 2
    target: Target = field(default_factory=lambda: random_target(1, VOCABULARY))

    @property
    def ends(self) -> frozenset[int]:
        stops = frozenset(self.params.stop_token_ids)
        return stops if self.params.ignore_eos else stops | {EOS}

    def law(self, text: Text) -> TokenLaw:
        constraint = Parity() if self.constrained else None
        law = TokenLaw(self.params, PROMPT, vocab_size=VOCABULARY, ends=self.ends, constraint=constraint)
        law.append(text)
        return law

    def whole(self, text: Text) -> bool:
        return len(text) >= self.length or any(token in self.ends for token in text)


def step(setting: Setting, text: Text, proposing: Proposing) -> dict[Text, float]:
    """The law of the tokens that one verification step commits; branches share a batch."""
    law, outcomes = setting.law(text), defaultdict[Text, float](float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branches = [Branch(script) for script in todo]
        proposals = [proposing(text, branch) for branch in branches]
        rows, logits = [], []
        for branch, proposal in zip(branches, proposals, strict=True):
            assert alone(proposal_fault(proposal, VOCABULARY)) is None
            rows.append(VerifyRow(law, proposal, len(logits), law.noise, branch))
            paths = [
                tuple(proposal.tokens[n] for n in proposal.path(node)) for node in range(-1, len(proposal))
            ]
            logits += [setting.target(text + path) for path in paths]
        verdicts = verification.verify(rows, torch.stack(logits))
        for branch, proposal, verdict in zip(branches, proposals, verdicts, strict=True):
            assert isinstance(verdict, Verdict), verdict
            assert_consistent(verdict, proposal, setting.ends)
            outcomes[verdict.tokens] += branch.weight
        todo = [script for branch in branches for script in branch.alternatives]
    return outcomes


def assert_consistent(verdict: Verdict, proposal: Proposal, ends: frozenset[int]) -> None:
    """The path is one of the proposal, the tokens are its own, and what ends the request is last."""
    parents = (ROOT, *verdict.path)
    assert all(proposal.parents[node] == parent for node, parent in zip(verdict.path, parents, strict=False))
    assert verdict.tokens[: verdict.accepted] == tuple(proposal.tokens[node] for node in verdict.path)
    assert not any(token in ends for token in verdict.tokens[:-1])
    ended = verdict.accepted > 0 and verdict.tokens[verdict.accepted - 1] in ends
    assert len(verdict.tokens) == verdict.accepted + (0 if ended else 1)


def law_of_output(setting: Setting, proposing: Proposing) -> dict[Text, float]:
    """The law of whole outputs, over as many verification steps as they take."""
    reached, law = {(): 1.0}, defaultdict[Text, float](float)
    while reached:
        text = min(reached, key=len)
        weight = reached.pop(text)
        for tokens, prob in step(setting, text, proposing).items():
            longer = (text + tokens)[: setting.length]
            where = law if setting.whole(longer) else reached
            where[longer] = where.get(longer, 0.0) + weight * prob
    return law


def law_of_target(setting: Setting) -> dict[Text, float]:
    """The law of whole outputs of the target alone, by the naive reference."""
    reached, law = {(): 1.0}, dict[Text, float]()
    while reached:
        text, weight = reached.popitem()
        if setting.whole(text):
            law[text] = weight
            continue
        mask = parity_mask(text) if setting.constrained else None
        edited = edited_logits(
            setting.target(text).tolist(), setting.params, PROMPT, text, setting.ends, mask
        )
        reached |= {(*text, token): weight * prob for token, prob in law_of(edited, setting.params).items()}
    return law


def difference(one: dict[Text, float], other: dict[Text, float]) -> float:
    """The largest difference of any output's probability."""
    return max(abs(one.get(text, 0.0) - other.get(text, 0.0)) for text in one.keys() | other.keys())
