"""Decides which proposed tokens are kept, so that the output has the law of the target alone.

Let p_i be the target's distribution (after temperature and top_p) at the i-th position of a step, given the
committed text and the proposed tokens x_1 ... x_(i-1) before it. One target pass gives p_1 ... p_(d+1) for a
proposal of d tokens. All three ways below keep a leading run of the proposal, add one token of the target's
own, and discard the rest; p_i is only ever used after x_1 ... x_(i-1) were kept, so it is the target's
distribution given exactly the text that is committed. It is then enough to show, for one position, that the
token committed there has law p_i given everything before it; by induction over positions the whole output has
the law of the target, whatever the proposer, the depth, or where steps begin.

**Greedy.** The token is argmax p_i; a proposal is kept while it equals that token. Nothing is random: the
output is that of plain greedy decoding. (Among equals argmax takes what torch.argmax takes, as plain greedy
decoding does.)

**Rejection** (Leviathan, Kalman, Matias 2023, arXiv 2211.17192), here for *chosen* proposals: x_i is a
function of the earlier text alone, so its distribution q is one-hot at x_i. The rule "accept x with
probability min(1, p(x) / q(x)), else draw from the normalised max(0, p - q)" becomes: accept x_i with
probability p_i(x_i), else draw from p_i without x_i, renormalised. Then P(token = x_i) = p_i(x_i), and for y
other than x_i

    P(token = y) = (1 - p_i(x_i)) * p_i(y) / (1 - p_i(x_i)) = p_i(y).

The draws of a position are fresh, hence independent of everything before. A proposal must not depend on
draws that have yet to be made: it cannot, as it exists before they are made.

**Coupled** (Daliri, Musco, Suresh 2024, arXiv 2408.07978). The token at output position i is

    argmin over t of E_t / p_i(t),    E_t exponential, a fixed function of (seed, choice, position, t),

which is Gumbel-max in another guise (-log E_t is Gumbel noise) and has law p_i: of independent exponential
clocks with rates p_i(t), clock t rings first with probability p_i(t). A proposal is kept while it equals that
token. So the output is a function of the request alone: turning speculation on or off, another proposer or
depth, changes no token. Clocks of different positions are independent, and the proposals do not enter. This
is exact given equal logits; a target pass over another number of tokens can differ in the last bits.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling.distribution import Distribution, distribution
from outrider_serving.sampling.noise import NoiseKey, exponentials
from outrider_serving.sampling.randomness import Randomness


@dataclass(frozen=True, slots=True)
class Verdict:
    """What a row commits in a step: `tokens` are `accepted` proposed ones, then the target's own."""

    accepted: int
    tokens: tuple[int, ...]


Law = Callable[[int], Distribution]
"""p_(i+1) for i = 0 ... d; each is asked for at most once, and only where it is needed."""


def verify(
    logits: Tensor,
    proposal: Sequence[int],
    params: SamplingParams,
    *,
    position: int,
    randomness: Randomness,
    choice: int = 0,
) -> Verdict:
    """Verify one row's proposal in the way that its parameters ask for.

    Args:
        logits: [d + 1, vocabulary] of one target pass: row i follows the i-th proposed token.
        proposal: x_1 ... x_d, each chosen from earlier text alone.
        params: temperature 0 is greedy; with a seed coupled, without one by rejection.
        position: index in the output of the first token to commit.
        randomness: the request's own source, used by rejection only.
        choice: index of the completion among those of one request.
    """
    if params.temperature == 0:
        return verify_greedy(logits, proposal)

    def p(i: int) -> Distribution:
        return distribution(logits[i], params.temperature, params.top_p)

    if params.seed is None:
        return verify_rejection(p, proposal, randomness)
    return verify_coupled(p, proposal, NoiseKey(params.seed, choice, position))


def verify_greedy(logits: Tensor, proposal: Sequence[int]) -> Verdict:
    """Keep x_1 ... x_n while they are argmaxes; then add the argmax after them.

    Logits are [d + 1, vocabulary].
    """
    best = logits.argmax(-1).tolist()
    n = 0
    while n < len(proposal) and proposal[n] == best[n]:
        n += 1
    return Verdict(n, tuple(best[: n + 1]))


def verify_rejection(p: Law, proposal: Sequence[int], randomness: Randomness) -> Verdict:
    """Accept each x with probability p(x); at the first refusal draw from p without x."""
    for n, x in enumerate(proposal):
        p_n = p(n)
        if not randomness.bernoulli(p_n.prob(x)):
            residual = p_n.probs.clone()
            if (index := p_n.index(x)) is not None:
                residual[index] = 0
            y = p_n.token(randomness.categorical(residual))
            return Verdict(n, (*proposal[:n], y))
    p_d = p(len(proposal))
    y = p_d.token(randomness.categorical(p_d.probs))
    return Verdict(len(proposal), (*proposal, y))


def verify_coupled(p: Law, proposal: Sequence[int], first: NoiseKey) -> Verdict:
    """Keep each x that is the coupled token of its position; end with the first coupled token that differs.

    `first` is the key of the position of x_1.
    """
    for n, x in enumerate((*proposal, None)):
        y = coupled_token(p(n), first._replace(position=first.position + n))
        if y != x:
            break
    return Verdict(n, (*proposal[:n], y))


def coupled_token(p: Distribution, key: NoiseKey) -> int:
    """The token whose exponential clock of rate p(t) rings first."""
    e = exponentials(key, len(p.probs), p.ids, p.probs.device)
    return p.token(int(torch.argmin(e / p.probs)))
