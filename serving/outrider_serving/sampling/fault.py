"""What makes a proposal impossible to verify, whoever made it."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.reading import Reading

_MASS_SLACK = 1e-6
"""How far from 1 the sum of a proposer's q may be: more is no rounding, even of weights in float32."""


def proposal_fault(proposal: Proposal, vocab_size: int) -> Reading[str | None]:
    """What makes a proposal impossible to verify; None where nothing does. It looks at numbers once at most.

    The step goes on without such a proposal. That can bias nothing where the proposer keeps its contract,
    because then there never is one.
    """
    tokens, nodes = proposal.tokens, len(proposal)
    if len(proposal.parents) != nodes or len(proposal.q) not in (0, nodes):
        return f"{nodes} tokens, {len(proposal.parents)} parents, {len(proposal.q)} distributions"
    if not all(ROOT <= parent < node for node, parent in enumerate(proposal.parents)):
        return "a node comes before its parent"
    if not all(type(token) is int and 0 <= token < vocab_size for token in tokens):
        return f"a token that is no whole number from 0 to {vocab_size - 1}"
    if len(set(zip(proposal.parents, tokens, strict=True))) != nodes:
        return "two siblings of the same token"
    drawn = [(token, q) for token, q in zip(tokens, proposal.q, strict=False) if q is not None]
    for _, q in drawn:
        if fault := _form_fault(q, vocab_size):
            return fault
    seen = yield [number for token, q in drawn for number in _to_look_at(q, token)]
    found = iter([float(number) for number in seen])
    for _, q in drawn:
        if q.ids is not None:
            least_id, last_id, repeated = next(found), next(found), next(found)
            if least_id < 0 or last_id >= vocab_size or repeated:
                return "a support that is not distinct and within the vocabulary"
        least, mass, prob = next(found), next(found), next(found)
        if not (least >= 0 and abs(mass - 1) < _MASS_SLACK):
            return f"a distribution with the sum {mass:g} and the least probability {least:g}"
        if not prob > 0:
            return "a token that its distribution cannot have drawn"
    return None


def _form_fault(q: object, vocab_size: int) -> str | None:
    """What makes a proposer's q no distribution, whatever its numbers are; None where nothing does."""
    if not isinstance(q, Distribution) or q.probs.dtype is not torch.float64 or q.probs.dim() != 1:
        return "a q that is no Distribution of float64 [support]"
    if q.ids is not None and (q.ids.dtype is not torch.int64 or q.ids.dim() != 1):
        return "a support that is not int64 [support]"
    if not 0 < len(q.probs) == (vocab_size if q.ids is None else len(q.ids)):
        return "a distribution of the wrong size"
    return None


def _to_look_at(q: Distribution, token: int) -> Iterator[Tensor]:
    """One number each: of the support the least, the last and how many are repeated; least, sum, q(token)."""
    if q.ids is not None:
        ids = q.ids.sort().values
        yield from (ids[:1], ids[-1:], (ids[1:] == ids[:-1]).sum(0, keepdim=True))
    yield from (q.probs.amin(0, keepdim=True), q.probs.sum(0, keepdim=True), q.at(token))
