"""The law of the output is that of the target alone, for every parameter and every pair of them.

Every branch of every draw, the proposer's and verification's, is followed (`exhaustive`), through the shipped
functions; what must come out is computed by a naive reference.
"""

from __future__ import annotations

import itertools
from typing import Any

import numpy as np
import pytest
import torch

from conftest import LONG
from outrider_serving.engine.types import SamplingParams
from unit.sampling.exhaustive import (
    VOCABULARY,
    Branch,
    Proposing,
    RandomTrees,
    Setting,
    difference,
    law_of_output,
    law_of_target,
    nothing,
)
from unit.sampling.reference import Text, random_target

EXACT = 1e-9

VALUES: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "cold": {"temperature": 0.6},
    "hot": {"temperature": 1.7},
    "top_k": {"top_k": 2},
    "top_p": {"top_p": 0.7},
    "min_p": {"min_p": 0.3},
    "presence": {"presence_penalty": 1.5},
    "absence": {"presence_penalty": -1.5},
    "frequency": {"frequency_penalty": 2.0},
    "infrequency": {"frequency_penalty": -2.0},
    "repetition": {"repetition_penalty": 1.8},
    "novelty": {"repetition_penalty": 0.5},
    "bias": {"logit_bias": ((1, 2.5), (3, -100.0))},
    "allowed": {"allowed_token_ids": (0, 1, 3)},
    "banned": {"banned_token_ids": (2,)},
    "min_tokens": {"min_tokens": 1},
    "stop": {"stop_token_ids": (3,)},
    "ignore_eos": {"ignore_eos": True},
    "grammar": {"grammar": "parity"},
}
"""A value for each parameter that the law depends on."""

REFUSED = {"grammar": {"allowed", "banned", "min_tokens", "ignore_eos"}}
"""What the API does not accept together, since no token might be left."""

PAIRS = [
    pair
    for pair in itertools.combinations(VALUES, 2)
    if not VALUES[pair[0]].keys() & VALUES[pair[1]].keys() and pair[0] not in REFUSED.get(pair[1], ())
]
SHAPES: dict[str, dict[str, Any]] = {
    "chain": {"nodes": 3, "siblings": 1},
    "tree": {"nodes": 3, "siblings": 3},
    "chosen": {"nodes": 6, "siblings": 3, "drawn": 0.0},
    "mixed": {"nodes": 4, "siblings": 2, "drawn": 0.5},
}


def setting_of(*names: str, length: int = 2, seed: int = 1, noise: int | None = None) -> Setting:
    values: dict[str, Any] = {}
    for name in names:
        values |= VALUES[name]
    params = SamplingParams(max_tokens=length, seed=noise, **values)
    return Setting(params, params.grammar is not None, length, random_target(seed, VOCABULARY))


def assert_exact(setting: Setting, proposing: Proposing) -> None:
    law = law_of_output(setting, proposing)
    assert sum(law.values()) == pytest.approx(1, abs=1e-12)
    assert difference(law, law_of_target(setting)) < EXACT


def test_every_parameter_of_the_law_is_among_the_values() -> None:
    elsewhere = {"max_tokens", "seed", "choice", "logprobs", "prompt_logprobs"}
    tried = {field for values in VALUES.values() for field in values}
    assert tried | elsewhere == set(SamplingParams.__dataclass_fields__)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", VALUES)
def test_each_parameter_keeps_its_law(name: str, shape: str) -> None:
    for seed in range(12 if LONG else 3):
        assert_exact(setting_of(name, seed=seed, length=3), RandomTrees(seed, **SHAPES[shape]))


@pytest.mark.parametrize("name", VALUES)
def test_plain_decoding_has_the_law_of_the_reference(name: str) -> None:
    assert_exact(setting_of(name, length=3), nothing)


@pytest.mark.parametrize("pair", PAIRS if LONG else PAIRS[::4], ids="+".join)
def test_each_pair_of_parameters_keeps_its_law(pair: tuple[str, str]) -> None:
    for seed, shape in enumerate(SHAPES.values()):
        setting = setting_of(*pair, length=3 if LONG else 2, seed=seed)
        assert_exact(setting, RandomTrees(seed, **shape))


@pytest.mark.parametrize("seed", range(40 if LONG else 4))
def test_other_targets_trees_and_longer_outputs(seed: int) -> None:
    rng = np.random.default_rng(seed)
    shape = RandomTrees(seed, nodes=4, siblings=int(rng.integers(1, 5)), drawn=rng.choice([0.3, 1.0]))
    names = PAIRS[rng.integers(len(PAIRS))]
    assert_exact(setting_of(*names, length=3, seed=seed), shape)


def output_of(setting: Setting, proposing: Proposing) -> Text:
    """The one output of a request whose proposals are chosen, if nothing is random."""
    law = law_of_output(setting, proposing)
    assert list(law.values()) == [1.0]
    return next(iter(law))


@pytest.mark.parametrize("pair", PAIRS if LONG else PAIRS[::4], ids="+".join)
def test_coupled_output_is_the_same_whatever_is_proposed(pair: tuple[str, str]) -> None:
    for noise in range(10):
        setting = setting_of(*pair, length=4, seed=noise, noise=noise)
        plain = output_of(setting, nothing)
        for proposer in range(4):
            assert output_of(setting, RandomTrees(proposer, nodes=8, drawn=0.0)) == plain
        drawn = law_of_output(setting, RandomTrees(noise, nodes=2))
        assert drawn == {plain: pytest.approx(1.0)}


def test_branches_have_their_weights() -> None:
    """The harness itself: two draws, all outcomes but the impossible one, each with its probability."""
    seen: dict[tuple[int, bool], float] = {}
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branch = Branch(todo.pop())
        outcome = branch.categorical(torch.tensor([1.0, 0.0, 3.0])), branch.bernoulli(0.4)
        seen[outcome] = branch.weight
        todo += branch.alternatives
    assert seen == pytest.approx({(0, True): 0.1, (0, False): 0.15, (2, True): 0.3, (2, False): 0.45})
