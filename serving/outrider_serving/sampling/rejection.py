"""Rejection sampling of one token with any number of candidates for it."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from outrider_serving.sampling.distribution import Distribution, residual
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.reading import Reading
from outrider_serving.sampling.transfer import put

Candidate = tuple[int, Distribution | None]
"""A proposed token, and the distribution it was drawn from: None where it was chosen."""

_ONE = torch.ones(1, dtype=torch.float64)
"""The probability with which a chosen token was proposed."""


def sample(
    p: Distribution, candidates: Sequence[Candidate], randomness: Randomness
) -> Reading[tuple[int, int | None]]:
    """A token of law p that is one of the candidates as often as they allow.

    With r = p at first: accept candidate x, drawn from q, with probability min(1, r(x) / q(x)); where it is
    refused, go on with r <- max(0, r - q), normalised. After the last candidate draw from r.

    **The token has law p.** Claim: whatever came before, when i candidates are left to try and r is the
    residual, the token has law r. With none left it is drawn from r. Otherwise let x, drawn from q, be the
    next. The probability of refusal is Z = 1 - sum over t of min(q(t), r(t)), which is also the mass of
    max(0, r - q). By induction a refusal is followed by a token of law r' = max(0, r - q) / Z, for every
    refused x, and whatever the later candidates are. Hence

        P(token = y) = q(y) min(1, r(y) / q(y)) + Z r'(y) = min(q(y), r(y)) + max(0, r(y) - q(y)) = r(y).

    It takes that x has law q given all that came before it, the refused siblings included: siblings drawn
    without replacement have q, then q without the first, and so on. It takes no more: a token without
    probability in p may be drawn (it is refused, with the usual residual), later siblings may depend on x in
    any way, and a chosen token is one drawn from a one-hot q.

    Sources: Leviathan, Kalman, Matias 2023 (arXiv 2211.17192) and Chen et al. 2023 (arXiv 2302.01318) for one
    candidate; SpecInfer (Miao et al. 2023, arXiv 2305.09781) and Yang et al. 2024 (arXiv 2401.06706) for
    several; Jeon et al. 2024 (arXiv 2402.14160) for those drawn without replacement.

    Args:
        p: the target's distribution.
        candidates: distinct tokens in the order in which they are tried, each of positive probability in its
            own q, which may lie on another device than p.
        randomness: independent of what the candidates were drawn from.

    Returns:
        The token, and the index of the candidate that was accepted; None where none was. It looks at numbers
        once for each candidate that is tried, and once for the last draw.
    """
    r = p
    for index, (x, q) in enumerate(candidates):
        r_x, q_x, *on_r = yield _decisive(r, x, q)
        if randomness.bernoulli(min(1.0, float(r_x) / float(q_x))):
            return x, index
        if q is not None:
            q = Distribution(r.ids, on_r[0]) if on_r else q.to(r.probs.device)
        r = residual(r, q, x)
    (token,) = yield [r.tokens(randomness.draw(r.probs))]
    return int(token), None


def _decisive(r: Distribution, x: int, q: Distribution | None) -> list[Tensor]:
    """r(x) and q(x); where r is on the CPU and q is not, what of it a refusal takes off r as well."""
    if q is None:
        return [r.at(x), _ONE]
    if r.probs.is_cpu and not q.probs.is_cpu:
        support = torch.arange(len(r.probs)) if r.ids is None else r.ids
        return [r.at(x), q.at(x), q.on(put(support, q.probs.device))]
    return [r.at(x), q.at(x)]
