"""Coupled sampling: the token at an output position as a fixed function of its distribution."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from outrider_serving.sampling import compiled
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.noise import NoiseKey, exponentials


def coupled_token(p: Distribution, key: NoiseKey) -> int:
    """The token whose exponential clock of rate p(t) rings first at the position that the key names.

    That is argmin over t of E_t / p(t), with E_t exponential variates that depend on the key and t only. It
    is Gumbel-max in another guise (-log E_t is Gumbel noise), and has law p: of independent clocks with rates
    p(t), clock t rings first with probability p(t). A proposer that chooses its tokens so, with its own p and
    the key of the position, is accepted more often the nearer its p is to the target's.
    """
    return coupled_tokens([p], [key])[0]


def coupled_tokens(ps: Sequence[Distribution], keys: Sequence[NoiseKey]) -> list[int]:
    """`coupled_token` for many positions.

    Args:
        ps: those on a stated support are on one device, and so are those on the whole vocabulary, which have
            equal lengths.
        keys: one for each.
    """
    whole = [n for n, p in enumerate(ps) if p.ids is None]
    cut = [(n, p.ids) for n, p in enumerate(ps) if p.ids is not None]
    tokens: dict[int, int] = {}
    if whole:
        chosen = _of_the_whole([ps[n].probs for n in whole], [keys[n] for n in whole])
        tokens.update(zip(whole, chosen, strict=True))
    if cut:
        ids = pad_sequence([support for _, support in cut], batch_first=True)
        probs = pad_sequence([ps[n].probs for n, _ in cut], batch_first=True)  # a padded clock never rings
        first = (exponentials([keys[n] for n, _ in cut], ids) / probs).argmin(-1, keepdim=True)
        tokens.update(zip([n for n, _ in cut], ids.gather(1, first)[:, 0].tolist(), strict=True))
    return [tokens[n] for n in range(len(ps))]


def _of_the_whole(rows: Sequence[Tensor], keys: Sequence[NoiseKey]) -> list[int]:
    """The token of each row of probabilities, [vocabulary]."""
    if (kernels := compiled.kernels(rows[0])) is not None:
        return compiled.coupled_tokens(kernels, rows, keys)
    probs = torch.stack(list(rows))
    clocks = exponentials(keys, torch.arange(probs.shape[-1], device=probs.device))
    tokens: list[int] = clocks.div_(probs).argmin(-1).tolist()
    return tokens
