"""Verification is exact: every branch of its draws is followed, and the law of the output is the target's."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Callable, Iterator

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling.distribution import Distribution, distribution
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.verification import coupled_token, verify, verify_coupled, verify_greedy

VOCABULARY = 3
LENGTH = 3

Text = tuple[int, ...]
Target = Callable[[Text], torch.Tensor]
"""Logits of the next token, given the text so far."""
Proposing = Callable[[Text], Text]


class Branch:
    """Draws that follow given outcomes, then take the first possible one and note the alternatives."""

    def __init__(self, script: tuple[int, ...]) -> None:
        self.script = script
        self.taken: list[int] = []
        self.weight = 1.0
        self.alternatives: list[tuple[int, ...]] = []

    def bernoulli(self, p: float) -> bool:
        return self._draw([1 - p, p]) == 1

    def categorical(self, weights: torch.Tensor) -> int:
        return self._draw((weights / weights.sum()).tolist())

    def _draw(self, probs: list[float]) -> int:
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


def branches(run: Callable[[Randomness], Text]) -> Iterator[tuple[Text, float]]:
    """Every result of `run` with its probability."""
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branch = Branch(todo.pop())
        yield run(branch), branch.weight
        todo += branch.alternatives


def generate(target: Target, proposing: Proposing, params: SamplingParams, draws: Randomness) -> Text:
    """Speculative decoding of LENGTH tokens, as the step loop does it."""
    text: Text = ()
    while len(text) < LENGTH:
        proposal = proposing(text)
        logits = torch.stack([target(text + proposal[:n]) for n in range(len(proposal) + 1)])
        verdict = verify(logits, proposal, params, position=len(text), randomness=draws)
        assert verdict.tokens[: verdict.accepted] == proposal[: verdict.accepted]
        assert len(verdict.tokens) == verdict.accepted + 1
        text += verdict.tokens
    return text[:LENGTH]


def random_target(seed: int, spread: float) -> Target:
    """Fixed random logits for each text; every third has a certain token."""

    def target(text: Text) -> torch.Tensor:
        rng = np.random.default_rng([seed, *(token + 1 for token in text)])
        logits = rng.normal(scale=spread, size=VOCABULARY)
        if rng.random() < 1 / 3:
            logits[rng.integers(VOCABULARY)] += 1e4
        return torch.tensor(logits)

    return target


def random_proposing(seed: int) -> Proposing:
    """A fixed function of the text so far: zero to three tokens."""

    def proposing(text: Text) -> Text:
        rng = np.random.default_rng([seed, 99, *(token + 1 for token in text)])
        return tuple(rng.integers(VOCABULARY, size=rng.integers(4)).tolist())

    return proposing


def law_of_target(target: Target, params: SamplingParams) -> dict[Text, float]:
    law: dict[Text, float] = {}
    for text in itertools.product(range(VOCABULARY), repeat=LENGTH):
        prob = 1.0
        for n, token in enumerate(text):
            prob *= distribution(target(text[:n]), params.temperature, params.top_p).prob(token)
        law[text] = prob
    return law


@given(
    seed=st.integers(0, 10**6),
    spread=st.sampled_from([0.3, 1.0, 4.0]),
    temperature=st.sampled_from([0.5, 1.0, 1.7]),
    top_p=st.sampled_from([0.5, 0.8, 0.95, 1.0]),
)
def test_rejection_leaves_the_law_of_the_output_unchanged(
    seed: int, spread: float, temperature: float, top_p: float
) -> None:
    params = SamplingParams(max_tokens=LENGTH, temperature=temperature, top_p=top_p)
    target, proposing = random_target(seed, spread), random_proposing(seed)
    law: dict[Text, float] = defaultdict(float)
    for text, weight in branches(lambda draws: generate(target, proposing, params, draws)):
        law[text] += weight
    expected = law_of_target(target, params)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert max(abs(law[text] - expected[text]) for text in expected) < 1e-9


@given(seed=st.integers(0, 10**6), noise=st.integers(0, 2**64), top_p=st.sampled_from([0.6, 1.0]))
def test_coupled_output_does_not_depend_on_proposals(seed: int, noise: int, top_p: float) -> None:
    params = SamplingParams(max_tokens=LENGTH, temperature=0.9, top_p=top_p, seed=noise)
    target = random_target(seed, 1.0)
    no_draws = Branch(())
    plain = generate(target, lambda _: (), params, no_draws)
    for proposer in range(10):
        assert generate(target, random_proposing(proposer), params, no_draws) == plain
    assert not no_draws.taken


def test_coupled_tokens_have_the_law_of_the_target() -> None:
    """Chi-square of two positions' joint law over 4,000 fixed seeds, plain and with proposals."""
    target = random_target(5, 1.0)
    n = 4000
    expected = law_of_target(target, SamplingParams(max_tokens=LENGTH))
    for proposing in (lambda _: (), random_proposing(1)):
        counts: dict[Text, int] = defaultdict(int)
        for seed in range(n):
            counts[generate(target, proposing, SamplingParams(LENGTH, seed=seed), Branch(()))] += 1
        likely = [text for text, prob in expected.items() if prob * n >= 5]
        observed = [counts[text] for text in likely]
        wanted = [expected[text] * n for text in likely]
        rest = (n - sum(observed), n - sum(wanted))
        assert stats.chisquare([*observed, rest[0] + 1], [*wanted, rest[1] + 1]).pvalue > 1e-3


def test_coupled_tokens_of_another_choice_differ() -> None:
    p = Distribution(None, torch.full((1000,), 1e-3, dtype=torch.float64))
    tokens = {coupled_token(p, NoiseKey(1, choice, 0)) for choice in range(20)}
    assert len(tokens) > 15


def test_coupled_keeps_the_proposal_up_to_the_first_difference() -> None:
    p = Distribution(None, torch.full((50,), 0.02, dtype=torch.float64))
    key = NoiseKey(3, 0, 10)
    truth = tuple(coupled_token(p, key._replace(position=10 + n)) for n in range(4))
    assert verify_coupled(lambda _: p, truth[:3], key).tokens == truth
    wrong = (truth[0], (truth[1] + 1) % 50, truth[2])
    verdict = verify_coupled(lambda _: p, wrong, key)
    assert (verdict.accepted, verdict.tokens) == (1, truth[:2])


def test_greedy_keeps_the_longest_run_of_argmaxes() -> None:
    logits = torch.eye(5)[[4, 2, 0, 1]]
    assert verify_greedy(logits, (4, 2, 3)).tokens == (4, 2, 0)
    assert verify_greedy(logits, (4, 2, 0)) == verify_greedy(logits, [4, 2, 0])
    assert verify_greedy(logits, (4, 2, 0)).accepted == 3
    assert verify_greedy(logits[:1], ()).tokens == (4,)


def test_distributions_are_only_made_where_they_are_needed() -> None:
    asked: list[int] = []
    p = Distribution(None, torch.tensor([1.0, 0.0], dtype=torch.float64))

    def law(n: int) -> Distribution:
        asked.append(n)
        return p

    assert verify_coupled(law, (0, 1, 0), NoiseKey(0, 0, 0)).tokens == (0, 0)
    assert asked == [0, 1]
