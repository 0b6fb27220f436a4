"""A GPU decides as the CPU does: the same noise, the same tokens, from the same float64 logits."""

from __future__ import annotations

import warnings
from typing import Any

import pytest
import torch

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling.law import TokenLaw, best, distributions
from outrider_serving.sampling.logprobs import token_logprobs
from outrider_serving.sampling.noise import NoiseKey, exponentials
from outrider_serving.sampling.verification import verify
from unit.sampling.exhaustive import Parity
from unit.sampling.test_verification import random_rows
from unit.sampling.test_waiting import CASES, KINDS, rows_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PARAMETERS: list[dict[str, Any]] = [
    {},
    {"temperature": 0.7, "top_p": 0.9},
    {"top_k": 3, "repetition_penalty": 1.3},
    {"min_p": 0.2, "presence_penalty": 1.0, "frequency_penalty": -0.5},
    {"logit_bias": ((1, 2.0),), "banned_token_ids": (2,), "min_tokens": 9},
    {"allowed_token_ids": (0, 1, 3)},
    {"temperature": 0.0},
]


def test_noise_is_the_same_to_within_an_ulp_of_the_logarithm() -> None:
    keys, ids = [NoiseKey(seed, 0, 5) for seed in range(4)], torch.arange(262_144)
    ours, theirs = exponentials(keys, ids), exponentials(keys, ids.cuda()).cpu()
    assert float(((ours - theirs) / ours).abs().max()) <= 2.0**-51


def test_distributions_are_the_same() -> None:
    generator = torch.Generator().manual_seed(1)
    constrained = TokenLaw(SamplingParams(9), (1,), vocab_size=4, ends=frozenset({0}), constraint=Parity())
    for size in (4, 50_257):
        laws = [
            TokenLaw(SamplingParams(9, **values), (1, 2), vocab_size=size, ends=frozenset({0}))
            for values in PARAMETERS
        ]
        at = [(law, (3, 1)) for law in ([*laws, constrained] if size == 4 else laws)]
        logits = torch.randn(len(at), size, generator=generator).double() * 3
        assert best(logits, at) == best(logits.cuda(), at)
        for ours, theirs in zip(distributions(logits, at), distributions(logits.cuda(), at), strict=True):
            assert (ours.ids is None) == (theirs.ids is None)
            assert ours.ids is None or ours.ids.tolist() == theirs.ids.tolist()
            assert torch.allclose(ours.probs, theirs.probs.cpu(), rtol=1e-12, atol=1e-15)


def test_verdicts_are_the_same() -> None:
    for seed in range(30):
        rows, logits = random_rows(seed)
        again, _ = random_rows(seed)
        assert verify(rows, logits) == verify(again, logits.cuda())


def test_many_rows_are_waited_for_as_often_as_few() -> None:
    for name, values, _ in CASES:
        waits = []
        for count in (KINDS, 5 * KINDS):
            rows, logits = rows_of(count, name, values, lambda tensor: tensor.cuda())
            with warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always")
                torch.cuda.set_sync_debug_mode("warn")
                try:
                    verify(rows, logits)
                finally:
                    torch.cuda.set_sync_debug_mode("default")
            waits.append(sum("synchronizing CUDA operation" in str(each.message) for each in caught))
        assert 0 < waits[0] == waits[1]


def test_logprobs_are_the_same() -> None:
    logits = torch.randn(4, 50_257, generator=torch.Generator().manual_seed(1))
    ours = token_logprobs(logits, [1, 2, 3, 4], [0, 1, 5, 20])
    theirs = token_logprobs(logits.cuda(), [1, 2, 3, 4], [0, 1, 5, 20])
    for one, other in zip(ours, theirs, strict=True):
        assert one.logprob == pytest.approx(other.logprob, abs=1e-12)
        assert [token for token, _ in one.top] == [token for token, _ in other.top]
