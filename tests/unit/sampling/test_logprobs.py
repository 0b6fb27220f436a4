"""Logprobs are those of the target itself, with the likeliest tokens in order."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy.special import log_softmax

from outrider_serving.sampling import logprobs
from outrider_serving.sampling.logprobs import token_logprobs


@given(
    seed=st.integers(0, 10**6),
    size=st.sampled_from([1, 2, 7, 1000]),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
    wanted=st.lists(st.integers(0, 20), min_size=1, max_size=5),
)
def test_logprobs_are_those_of_a_full_sort(
    seed: int, size: int, dtype: torch.dtype, wanted: list[int]
) -> None:
    rng = np.random.default_rng(seed)
    logits = torch.from_numpy(rng.normal(scale=10, size=(len(wanted), size))).to(dtype)
    tokens, top = rng.integers(size, size=len(wanted)).tolist(), [min(k, size) for k in wanted]
    found = token_logprobs(logits, tokens, top)
    for row, entry in enumerate(found):
        z = logits[row].double().numpy()
        expected = log_softmax(z)
        order = sorted(range(size), key=lambda token: (-z[token], token))[: top[row]]
        assert entry.logprob == pytest.approx(expected[tokens[row]], abs=1e-12)
        assert [token for token, _ in entry.top] == order
        assert [logprob for _, logprob in entry.top] == pytest.approx(expected[order].tolist(), abs=1e-12)


def test_a_token_among_the_likeliest_has_the_same_logprob_as_its_own() -> None:
    logits = torch.randn(1, 500, generator=torch.Generator().manual_seed(2))
    token = int(logits.argmax())
    entry = token_logprobs(logits, [token], [3])[0]
    assert entry.top[0] == (token, entry.logprob)


def test_among_equally_likely_tokens_the_lower_ids_are_told() -> None:
    logits = torch.zeros(2, 5000)
    logits[0, 4000] = 1.0
    found = token_logprobs(logits, [0, 0], [3, 2])
    assert [[token for token, _ in entry.top] for entry in found] == [[4000, 0, 1], [0, 1]]


def test_of_many_equally_likely_tokens_the_lowest_ids_are_told() -> None:
    logits = torch.randint(0, 4, (3, 5000), generator=torch.Generator().manual_seed(5)).double()
    logits[1, 777], logits[2, :30] = 9.0, torch.arange(30.0).double() / 10 + 4
    for top in (1, 25, 29, 30, 60):
        for row, entry in zip(logits.tolist(), token_logprobs(logits, [0] * 3, [top] * 3), strict=True):
            order = sorted(range(5000), key=lambda token, row=row: (-row[token], token))[:top]
            assert [token for token, _ in entry.top] == order


def test_next_to_impossible_tokens_have_a_finite_logprob() -> None:
    entry = token_logprobs(torch.tensor([[0.0, 2000.0, 1000.0]]), [0], [3])[0]
    assert entry.logprob == -2000.0
    assert entry.top == ((1, 0.0), (2, -1000.0), (0, -2000.0))


def test_float32_logits_of_a_large_vocabulary_are_summed_precisely() -> None:
    logits = torch.randn(2, 262_144, generator=torch.Generator().manual_seed(3)) * 5
    expected = log_softmax(logits.double().numpy(), axis=-1)[:, 17]
    found = token_logprobs(logits, [17, 17], [0, 0])
    assert [entry.logprob for entry in found] == pytest.approx(expected.tolist(), abs=1e-9)


def test_many_positions_are_looked_at_in_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(7, 50, generator=torch.Generator().manual_seed(4))
    tokens, top = [3, 1, 4, 1, 5, 9, 2], [0, 1, 2, 3, 4, 5, 6]
    at_once = token_logprobs(logits, tokens, top)
    monkeypatch.setattr(logprobs, "_ELEMENTS_AT_ONCE", 100)
    assert token_logprobs(logits, tokens, top) == at_once
    assert token_logprobs(logits[:0], [], []) == []
