"""One token by rejection: its law over every branch, at the edges of rounding and of supports."""

from __future__ import annotations

from collections import defaultdict

import pytest
import torch

from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.rejection import Candidate, sample
from unit.sampling.exhaustive import Branch, alone


def on(probs: dict[int, float]) -> Distribution:
    return Distribution(torch.tensor(list(probs)), torch.tensor(list(probs.values()), dtype=torch.float64))


def law_given(p: Distribution, candidates: list[Candidate]) -> dict[tuple[int, int | None], float]:
    """The law of (token, accepted candidate) where the candidates are these."""
    law: dict[tuple[int, int | None], float] = defaultdict(float)
    todo: list[tuple[int, ...]] = [()]
    while todo:
        branch = Branch(todo.pop())
        law[alone(sample(p, candidates, branch))] += branch.weight
        todo += branch.alternatives
    return dict(law)


P = on({3: 0.5, 8: 0.3, 1: 0.2})


def test_without_candidates_the_token_is_drawn_from_p() -> None:
    assert law_given(P, []) == pytest.approx({(3, None): 0.5, (8, None): 0.3, (1, None): 0.2})


def test_chosen_candidates_are_accepted_as_often_as_p_has_them() -> None:
    found = law_given(P, [(8, None), (5, None), (3, None)])
    assert found == pytest.approx({(8, 0): 0.3, (3, 2): 0.5, (1, None): 0.2})


def test_a_drawn_candidate_is_accepted_with_the_ratio_and_a_refusal_draws_from_what_is_left() -> None:
    q = on({3: 0.8, 1: 0.2})
    assert law_given(P, [(3, q)]) == pytest.approx({(3, 0): 0.625, (8, None): 0.375})
    assert law_given(P, [(1, q)]) == {(1, 0): 1.0}


def test_a_proposer_that_knows_p_is_always_accepted() -> None:
    for token in (3, 8, 1):
        assert law_given(P, [(token, P)]) == {(token, 0): 1.0}


def test_a_forbidden_candidate_is_refused_with_the_usual_residual() -> None:
    q = on({4: 0.5, 3: 0.5})
    assert law_given(P, [(4, q)]) == pytest.approx({(8, None): 0.6, (1, None): 0.4})


@pytest.mark.parametrize("error", [1e-16, 1e-7])
def test_a_refusal_by_rounding_alone_still_gives_a_token_of_p(error: float) -> None:
    """Here q is p but for rounding, so that nothing or next to nothing is left."""
    q = Distribution(P.ids, P.probs * (1 + error))
    found = law_given(P, [(3, q)])
    assert {token for token, _ in found} <= {3, 8, 1}
    assert sum(found.values()) == pytest.approx(1)
    assert found[3, 0] == pytest.approx(1, abs=2 * error)
