"""Cuts keep what a full sort keeps; a residual is max(0, r - q) on any supports."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from numpy.typing import NDArray

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling import distribution
from outrider_serving.sampling.distribution import Cut, Distribution, cut, residual
from unit.sampling.reference import law_of


def cut_one(logits: torch.Tensor, wanted: Cut) -> Distribution:
    return cut(torch.softmax(logits.double(), -1)[None], [wanted])[0]


def as_dict(p: Distribution) -> dict[int, float]:
    return {p.token(index): prob for index, prob in enumerate(p.probs.tolist()) if prob > 0}


def naive(logits: torch.Tensor, wanted: Cut) -> dict[int, float]:
    params = SamplingParams(1, top_k=wanted.top_k, top_p=wanted.top_p, min_p=wanted.min_p)
    return law_of(logits.double().tolist(), params)


cuts = st.builds(
    Cut,
    top_k=st.sampled_from([0, 0, 1, 2, 40, 63, 64, 65, 300]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.999)),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0)),
)


@given(
    seed=st.integers(0, 2**31),
    size=st.sampled_from([1, 2, 5, 63, 64, 65, 300, 700, 5000]),
    wanted=cuts,
    spread=st.sampled_from([0.01, 0.1, 1.0, 10.0]),
)
def test_what_is_kept_is_that_of_a_full_sort(seed: int, size: int, wanted: Cut, spread: float) -> None:
    logits = torch.randn(size, generator=torch.Generator().manual_seed(seed)) * spread
    found, expected = as_dict(cut_one(logits, wanted)), naive(logits, wanted)
    assert list(found) == list(expected)
    assert list(found.values()) == pytest.approx(list(expected.values()), rel=1e-9)


@given(
    logits=st.lists(st.sampled_from([0.0, 1.0, 2.0, -30.0]), min_size=1, max_size=400),
    top_k=st.integers(1, 400),
)
def test_among_equally_probable_tokens_the_lower_id_comes_first(logits: list[float], top_k: int) -> None:
    found = as_dict(cut_one(torch.tensor(logits), Cut(top_k=top_k)))
    assert list(found) == sorted(range(len(logits)), key=lambda token: (-logits[token], token))[:top_k]


def test_a_nucleus_of_equally_probable_tokens_in_a_large_vocabulary() -> None:
    found = cut_one(torch.zeros(262_144), Cut(top_p=0.25))
    assert found.ids is not None
    assert found.ids.tolist() == list(range(65_536))


@pytest.mark.parametrize("wanted", [Cut(top_p=300.5 / 700), Cut(top_k=301)])
def test_more_equally_probable_tokens_than_are_looked_at_first(wanted: Cut) -> None:
    logits = torch.full((5000,), -40.0)
    equal = torch.arange(4999, 0, -7)[:700]
    logits[equal] = 5.0
    found = cut_one(logits, wanted)
    assert found.ids is not None
    assert found.ids.tolist() == sorted(equal.tolist())[:301]


def test_a_nucleus_is_a_share_of_what_top_k_left() -> None:
    logits = torch.log(torch.tensor([0.4, 0.3, 0.2, 0.1]))
    assert list(as_dict(cut_one(logits, Cut(top_k=2, top_p=0.57)))) == [0]
    assert list(as_dict(cut_one(logits, Cut(top_p=0.57)))) == [0, 1]


def test_min_p_alone_keeps_the_tail_that_a_sum_of_1_would_lose() -> None:
    logits = torch.cat((torch.zeros(100), torch.full((1,), -36.0)))
    assert len(as_dict(cut_one(logits, Cut(min_p=1e-20)))) == 101


def test_tokens_without_probability_are_not_kept() -> None:
    logits = torch.full((200,), -float("inf"))
    logits[[7, 150]] = torch.tensor([0.0, 1.0])
    for wanted in (Cut(top_k=40), Cut(top_p=0.9999), Cut(min_p=1e-9), Cut(top_k=200)):
        found = cut_one(logits, wanted)
        assert found.ids is not None
        assert found.ids.tolist() == [150, 7]


def test_a_tiny_top_p_leaves_the_most_probable_token() -> None:
    assert as_dict(cut_one(torch.tensor([0.0, 2.0, 1.0]), Cut(top_p=1e-9))) == {1: 1.0}


def test_rows_are_cut_each_in_its_own_way() -> None:
    probs = torch.softmax(torch.randn(4, 3000, generator=torch.Generator().manual_seed(1)).double(), -1)
    wanted = [Cut(top_p=0.95), None, Cut(top_k=3), Cut(min_p=0.5)]
    probs, wanted = probs.repeat(2, 1), [*wanted, *(Cut(top_k=k, top_p=0.9) for k in (64, 2000, 2999, 300))]
    together = cut(probs, wanted)
    assert together[1].ids is None
    assert torch.equal(together[1].probs, probs[1])
    for row in (0, *range(2, 8)):
        assert as_dict(together[row]) == as_dict(cut(probs[row : row + 1], [wanted[row]])[0])


def test_a_large_top_k_is_paid_for_by_its_own_row(monkeypatch: pytest.MonkeyPatch) -> None:
    """On the number of candidates: it is what a row costs."""
    looked_at = dict[int, int]()
    kept = distribution._kept

    def counted(top: NDArray[np.float64], ids: NDArray[np.int64], wanted: Cut, *, complete: bool) -> Any:
        looked_at[wanted.top_k] = max(len(top), looked_at.get(wanted.top_k, 0))
        return kept(top, ids, wanted, complete=complete)

    monkeypatch.setattr(distribution, "_kept", counted)
    probs = torch.softmax(torch.randn(3, 50_000, generator=torch.Generator().manual_seed(1)).double(), -1)
    found = cut(probs, [Cut(top_k=40), Cut(top_k=49_999), Cut(top_k=50)])
    assert [len(row.probs) for row in found] == [40, 49_999, 50]
    assert looked_at == {40: 64, 49_999: 50_000, 50: 64}


def test_prob_of_tokens_inside_and_outside_the_support() -> None:
    found = cut_one(torch.log(torch.tensor([0.1, 0.5, 0.4])), Cut(top_p=0.8))
    assert [found.prob(token) for token in range(3)] == pytest.approx([0.0, 5 / 9, 4 / 9])
    assert [found.index(token) for token in range(3)] == [None, 0, 1]


def on_a_support(rng: np.random.Generator, vocabulary: int, whole: bool) -> Distribution:
    """Random probabilities; on the whole vocabulary or on some ids in random order, some of weight 0."""
    ids = rng.permutation(vocabulary)[: rng.integers(1, vocabulary + 1)]
    weights = rng.dirichlet(np.ones(len(ids)))
    if not whole:
        return Distribution(torch.from_numpy(ids), torch.from_numpy(weights))
    dense = torch.zeros(vocabulary, dtype=torch.float64)
    return Distribution(None, dense.scatter(0, torch.from_numpy(ids), torch.from_numpy(weights)))


@given(seed=st.integers(0, 10**6), r_whole=st.booleans(), q_whole=st.booleans())
def test_a_residual_is_what_is_left_of_r(seed: int, r_whole: bool, q_whole: bool) -> None:
    rng = np.random.default_rng(seed)
    r, q = on_a_support(rng, 12, r_whole), on_a_support(rng, 12, q_whole)
    left = [max(0.0, r.prob(token) - q.prob(token)) for token in range(12)]
    found = residual(r, q, 0)
    assert found.ids is r.ids
    if sum(left) > 0:
        assert [found.prob(t) for t in range(12)] == pytest.approx([x / sum(left) for x in left], abs=1e-12)
    else:
        assert found is r


@pytest.mark.parametrize("whole", [True, False])
def test_a_residual_of_a_chosen_token_is_all_but_that_token(whole: bool) -> None:
    ids = None if whole else torch.tensor([5, 1, 9])
    r = Distribution(ids, torch.tensor([0.5, 0.25, 0.25], dtype=torch.float64))
    assert residual(r, None, r.token(0)).probs.tolist() == [0, 0.5, 0.5]
    if not whole:
        assert residual(r, None, 4).probs.tolist() == r.probs.tolist()


def test_a_residual_without_mass_is_r_itself() -> None:
    r = Distribution(None, torch.tensor([0.0, 1.0], dtype=torch.float64))
    assert residual(r, None, 1) is r
    assert residual(r, r, 1) is r
