"""The law of the next token, written once more in the most naive way, and targets to try it on."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence

import numpy as np
import torch

from outrider_serving.engine.types import SamplingParams

Text = tuple[int, ...]
Target = Callable[[Text], torch.Tensor]
"""Logits of the next token, given the output so far."""


def edited_logits(
    logits: Sequence[float],
    params: SamplingParams,
    prompt: Sequence[int],
    output: Sequence[int],
    ends: frozenset[int],
    mask: Sequence[bool] | None = None,
) -> list[float]:
    """Logits after penalties, bias and masks, one token after the other."""
    edited = []
    bias = dict(params.logit_bias)
    for token, z in enumerate(logits):
        if token in prompt or token in output:
            z = z / params.repetition_penalty if z > 0 else z * params.repetition_penalty
        count = list(output).count(token)
        z -= count * params.frequency_penalty
        z -= params.presence_penalty if count else 0
        z += bias.get(token, 0)
        ruled_out = (
            (params.allowed_token_ids is not None and token not in params.allowed_token_ids)
            or token in params.banned_token_ids
            or (token in ends and len(output) < params.min_tokens)
            or (mask is not None and not mask[token])
        )
        edited.append(-math.inf if ruled_out else z)
    return edited


def law_of(edited: Sequence[float], params: SamplingParams) -> dict[int, float]:
    """Softmax, then a full sort and the cuts: the probability of each token that has any."""
    order = sorted(range(len(edited)), key=lambda token: (-edited[token], token))
    if params.temperature == 0:
        return {order[0]: 1.0}
    z = np.array([edited[token] for token in order])
    p = np.exp((z - z[0]) / params.temperature)
    p /= p.sum()
    if params.top_k:
        p = p[: params.top_k] / p[: params.top_k].sum()
    if params.top_p < 1:
        size, mass = 0, 0.0
        while size < len(p) and mass < params.top_p:
            mass += p[size]
            size += 1
        p = p[:size]
    p = p[p >= params.min_p * p[0]]
    p = p / p.sum()
    return {token: float(prob) for token, prob in zip(order, p, strict=False) if prob > 0}


def random_target(seed: int, vocabulary: int, *, certain: float = 0.2) -> Target:
    """Fixed random logits for each text; for a share of the texts one token is certain."""
    known: dict[Text, torch.Tensor] = {}

    def target(text: Text) -> torch.Tensor:
        if text not in known:
            rng = np.random.default_rng([seed, *text])
            logits = rng.normal(scale=1.5, size=vocabulary)
            if rng.random() < certain:
                logits[rng.integers(vocabulary)] += 1e4
            known[text] = torch.tensor(logits)
        return known[text]

    return target
