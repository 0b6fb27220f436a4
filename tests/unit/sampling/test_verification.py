"""What a verification step commits, row by row; that the law of it is exact is shown in test_exactness."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling import verification
from outrider_serving.sampling.coupling import coupled_token
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.law import NoTokenLeftError, TokenLaw
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.sampling.verification import Verdict, VerifyRow, verify
from unit.sampling.exhaustive import PROMPT, VOCABULARY, RandomTrees

EOS = 9


def row(proposal: Proposal, first: int = 0, vocabulary: int = 10, draws: int = 0, **values: Any) -> VerifyRow:
    law = TokenLaw(SamplingParams(99, **values), PROMPT, vocab_size=vocabulary, ends=frozenset({EOS}))
    return VerifyRow(law, proposal, first, law.noise, GeneratorRandomness(np.random.default_rng(draws)))


def greedy(proposal: Proposal, best: Sequence[int], **values: Any) -> Verdict | Exception:
    """Verify greedily where the target's best tokens are these, after the text and after each node."""
    return verify([row(proposal, temperature=0.0, **values)], torch.eye(10)[list(best)])[0]


class TestGreedy:
    # The tree, by node: 0 and 1 follow the text; 2 and 3 follow 1; 4 follows 0.
    tree = Proposal((4, 5, 6, 7, 8), (ROOT, ROOT, 1, 1, 0))

    def test_a_chain_is_kept_while_it_is_what_the_target_takes(self) -> None:
        assert greedy(Proposal.chain((4, 2, 3)), (4, 2, 0, 1)) == Verdict((0, 1), (4, 2, 0))
        assert greedy(Proposal.chain((4, 2, 0)), (4, 2, 0, 1)) == Verdict((0, 1, 2), (4, 2, 0, 1))
        assert greedy(Proposal.chain((1,)), (4, 2)) == Verdict((), (4,))
        assert greedy(Proposal(), (4,)) == Verdict((), (4,))

    def test_a_tree_is_walked_down_the_branch_that_the_target_takes(self) -> None:
        assert greedy(self.tree, (5, 0, 7, 0, 3, 0)) == Verdict((1, 3), (5, 7, 3))
        assert greedy(self.tree, (4, 8, 0, 0, 0, 2)) == Verdict((0, 4), (4, 8, 2))
        assert greedy(self.tree, (5, 0, 1, 0, 0, 0)) == Verdict((1,), (5, 1))
        assert greedy(self.tree, (8, 0, 0, 0, 0, 0)) == Verdict((), (8,))

    def test_nothing_follows_a_token_that_ends_the_request(self) -> None:
        ended = greedy(Proposal.chain((4, EOS, 3)), (4, EOS, 3, 1))
        assert ended == Verdict((0, 1), (4, EOS))
        assert greedy(Proposal.chain((4, 3)), (4, EOS, 1)) == Verdict((0,), (4, EOS))

    def test_an_ending_token_is_not_accepted_before_min_tokens(self) -> None:
        proposal = Proposal.chain((4, EOS, 3))
        best = torch.eye(10)[[4, EOS, EOS, EOS]] + torch.eye(10)[[4, 2, 2, 2]] / 2
        assert verify([row(proposal, temperature=0.0, min_tokens=2)], best) == [Verdict((0,), (4, 2))]
        assert verify([row(proposal, temperature=0.0, min_tokens=1)], best) == [Verdict((0, 1), (4, EOS))]

    def test_a_frequency_penalty_ends_an_accepted_run_where_it_would_end_without_proposals(self) -> None:
        logits = torch.zeros(7, 10)
        logits[:, 3] = 5.0
        run = row(Proposal.chain((3,) * 6), temperature=0.0, frequency_penalty=2.0)
        assert verify([run], logits) == [Verdict((0, 1, 2), (3, 3, 3, 0))]

    def test_a_negative_frequency_penalty_keeps_a_run_going(self) -> None:
        logits = torch.zeros(7, 10)
        logits[0, 3], logits[:, 4] = 3.0, 2.5
        run = row(Proposal.chain((3,) * 6), temperature=0.0, frequency_penalty=-2.0)
        assert verify([run], logits) == [Verdict((0,), (3, 4))]
        logits[1:, 4] = 1.5
        assert verify([run], logits) == [Verdict((0, 1, 2, 3, 4, 5), (3,) * 7)]

    def test_a_bias_against_the_proposers_favourite_refuses_it(self) -> None:
        assert greedy(Proposal.chain((4, 4)), (4, 4, 4), logit_bias=((4, -100.0),)) == Verdict((), (0,))

    def test_rows_that_nothing_edits_cost_one_argmax(self, monkeypatch: pytest.MonkeyPatch) -> None:
        calls: list[tuple[int, ...]] = []
        argmax = torch.Tensor.argmax

        def counted(logits: torch.Tensor, *args: Any) -> torch.Tensor:
            calls.append(tuple(logits.shape))
            return argmax(logits, *args)

        def none(*_: Any) -> Any:
            raise AssertionError("plain greedy rows need no law")

        monkeypatch.setattr(torch.Tensor, "argmax", counted)
        monkeypatch.setattr(verification, "best", none)
        monkeypatch.setattr(verification, "distributions", none)
        rows = [row(Proposal.chain((4, 2)), first, temperature=0.0) for first in (0, 4, 9)]
        assert len(verify(rows, torch.eye(10)[[4, 2, 0] * 4])) == 3
        assert calls == [(9, 10)]


def random_rows(seed: int) -> tuple[list[VerifyRow], torch.Tensor]:
    """Rows of every way to verify, with trees, somewhere among the logits."""
    rng = np.random.default_rng(seed)
    rows, first = [], 0
    kinds: list[dict[str, Any]] = [
        {"temperature": 0.0},
        {"temperature": 0.0, "presence_penalty": 1.0},
        {"seed": 3},
        {"seed": 4, "top_p": 0.8},
        {},
        {"top_k": 2, "frequency_penalty": 0.5},
        {"logit_bias": ((1, 2.0),), "banned_token_ids": (2,)},
    ]
    for n in rng.integers(len(kinds), size=8).tolist():
        draws = GeneratorRandomness(np.random.default_rng([seed, first]))
        drawn = 1.0 if rng.random() < 0.5 else 0.0
        proposal = RandomTrees(seed, nodes=5, drawn=drawn)((n,), draws)
        first += int(rng.integers(2))
        rows.append(row(proposal, first, VOCABULARY, draws=first, **kinds[n]))
        first += 1 + len(proposal)
    return rows, torch.from_numpy(rng.normal(size=(first + 1, VOCABULARY)))


@given(seed=st.integers(0, 10**6))
def test_rows_of_a_batch_do_not_influence_each_other(seed: int) -> None:
    rows, logits = random_rows(seed)
    together = verify(rows, logits)
    alone, _ = random_rows(seed)
    assert together == [verify([each], logits)[0] for each in alone]


def test_a_large_batch_is_verified_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = [verify(*random_rows(seed)) for seed in range(20)]
    monkeypatch.setattr(verification, "_ELEMENTS_AT_ONCE", 3 * VOCABULARY)
    assert [verify(*random_rows(seed)) for seed in range(20)] == whole


def test_a_row_that_fails_fails_alone() -> None:
    broken = Distribution(torch.tensor([7]), torch.ones(1, dtype=torch.float64))
    rows = [
        row(Proposal.chain((4,)), 0, seed=1),
        row(Proposal.chain((4,)), 0, allowed_token_ids=(EOS,), min_tokens=1, seed=1),
        row(Proposal.chain((4,)), 0, allowed_token_ids=(EOS,), min_tokens=1, temperature=0.0),
        row(Proposal.chain((4,), (broken,)), 0),
        row(Proposal.chain((4,)), 0, allowed_token_ids=(4, EOS), min_tokens=1, temperature=0.0),
        row(Proposal.chain((4,)), 0),
    ]
    verdicts = verify(rows, torch.zeros(2, 10))
    kinds = [Verdict, NoTokenLeftError, NoTokenLeftError, ZeroDivisionError, Verdict, Verdict]
    assert [type(verdict) for verdict in verdicts] == kinds
    fresh = row(Proposal.chain((4,)), 0, seed=1)
    assert verdicts[0] == verify([fresh], torch.zeros(2, 10))[0]


@pytest.mark.parametrize("seed", [5, None])
@pytest.mark.parametrize("neighbours", [0, 1])
def test_broken_logits_fail_only_a_row_that_comes_to_them(seed: int | None, neighbours: int) -> None:
    logits = torch.full((3, 10), -50.0)
    logits[0, 4] = 50.0
    logits[2] = torch.nan
    others = [row(Proposal(), seed=seed, temperature=1.0) for _ in range(neighbours)]
    for after, verdict in ((7, Verdict((0,), (4, 7))), (2, NoTokenLeftError)):
        logits[1] = torch.eye(10)[after] * 100
        found, *_ = verify([row(Proposal.chain((4, 2)), seed=seed, temperature=1.0), *others], logits)
        assert found == verdict or type(found) is verdict


@pytest.mark.parametrize("seed", [5, None])
def test_a_run_of_accepted_tokens_takes_few_looks(monkeypatch: pytest.MonkeyPatch, seed: int | None) -> None:
    asked: list[int] = []
    real = verification.distributions

    def counting(logits: torch.Tensor, at: Any) -> list[Distribution]:
        asked.append(len(logits))
        return real(logits, at)

    monkeypatch.setattr(verification, "distributions", counting)
    monkeypatch.setattr(torch, "get_num_threads", lambda: 4)
    run = Proposal.chain((3,) * 16)
    logits = torch.zeros(17, 10)
    logits[:, 3] = 500.0
    whole = Verdict(tuple(range(16)), (3,) * 17)
    assert verify([row(run, seed=seed, temperature=1.0)], logits) == [whole]
    assert asked == [4, 4, 4, 4, 1]
    asked.clear()
    expecting = replace(row(run, seed=seed, temperature=1.0), expected=16)
    assert verify([expecting], logits) == [whole]
    assert asked == [17]
    asked.clear()
    logits[0] = torch.eye(10)[2] * 500
    assert verify([row(run, seed=seed, temperature=1.0)], logits) == [Verdict((), (2,))]
    assert asked == [4], "what threads have time for"
    asked.clear()
    many = [row(run, seed=seed, temperature=1.0) for _ in range(4)]
    assert verify(many, logits) == [Verdict((), (2,))] * 4
    assert asked == [4], "which is one of each row"
    asked.clear()  # the law depends on the tokens before
    edited = row(run, seed=seed, temperature=1.0, frequency_penalty=0.01)
    assert verify([edited], torch.eye(10)[[3] * 17] * 500) == [whole]
    assert asked == [1] * 17


def test_nothing_to_verify_is_no_error() -> None:
    assert verify([], torch.zeros(3, 10)) == []


def test_coupled_keeps_a_sampled_proposal_that_took_the_same_noise() -> None:
    logits = torch.zeros(4, 50)
    asked = row(Proposal(), vocabulary=50, seed=3)
    assert asked.noise is not None
    noise = [asked.noise._replace(position=n) for n in range(4)]
    truth = [coupled_token(asked.law.distribution(logits[0]), key) for key in noise]
    assert len(set(truth)) > 1
    kept = row(Proposal.chain(truth[:3]), vocabulary=50, seed=3)
    assert verify([kept], logits) == [Verdict((0, 1, 2), tuple(truth))]
    wrong = Proposal.chain((truth[0], (truth[1] + 1) % 50, truth[2]))
    assert verify([row(wrong, vocabulary=50, seed=3)], logits) == [Verdict((0,), tuple(truth[:2]))]
