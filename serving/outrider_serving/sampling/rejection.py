"""Rejection sampling of one token with any number of candidates for it."""

from __future__ import annotations

from collections.abc import Sequence

from outrider_serving.sampling.distribution import Distribution, residual
from outrider_serving.sampling.randomness import Randomness

Candidate = tuple[int, Distribution | None]
"""A proposed token, and the distribution it was drawn from: None where it was chosen."""


def sample(
    p: Distribution, candidates: Sequence[Candidate], randomness: Randomness
) -> tuple[int, int | None]:
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
            own q.
        randomness: independent of what the candidates were drawn from.

    Returns:
        The token, and the index of the candidate that was accepted; None where none was.
    """
    r = p
    for index, (x, q) in enumerate(candidates):
        proposed = 1.0 if q is None else q.prob(x)
        if randomness.bernoulli(min(1.0, r.prob(x) / proposed)):
            return x, index
        r = residual(r, q, x)
    return r.token(randomness.categorical(r.probs)), None
