"""A proposal that cannot be verified is found, whatever is wrong with it."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.fault import proposal_fault
from outrider_serving.sampling.proposal import ROOT, Proposal
from unit.sampling.exhaustive import alone


def whole(*probs: float) -> Distribution:
    return Distribution(None, torch.tensor(probs, dtype=torch.float64))


def on(ids: list[Any], *probs: float) -> Distribution:
    support = torch.tensor(ids) if ids else torch.zeros(0, dtype=torch.int64)
    return Distribution(support, torch.tensor(probs, dtype=torch.float64))


@pytest.mark.parametrize(
    ("proposal", "fault"),
    [
        (Proposal((1, 2), (ROOT,)), "2 tokens, 1 parents, 0 distributions"),
        (Proposal.chain((1, 2), (None,)), "2 tokens, 2 parents, 1 distributions"),
        (Proposal((1, 2), (1, ROOT)), "a node comes before its parent"),
        (Proposal((1,), (-2,)), "a node comes before its parent"),
        (Proposal.chain((1, 3)), "a token that is no whole number from 0 to 2"),
        (Proposal.chain((-1,)), "a token that is no whole number from 0 to 2"),
        (Proposal((1, 2, 1), (ROOT, ROOT, ROOT)), "two siblings of the same token"),
        (Proposal.chain((1,), (whole(0.5, 0.5),)), "a distribution of the wrong size"),
        (Proposal.chain((1,), (whole(0.5, 0.0, 0.5),)), "a token that its distribution cannot have drawn"),
        (Proposal.chain((1,), (whole(0.5, float("nan"), 0.5),)), "a distribution with the sum nan"),
        (Proposal.chain((1,), (whole(0.5, 0.4, 0.0),)), "a distribution with the sum 0.9"),
        (
            Proposal.chain((1,), (whole(0.5, 1.0, -0.5),)),
            "a distribution with the sum 1 and the least",
        ),
        (
            Proposal.chain((1,), (Distribution(None, torch.ones(3)),)),
            "a q that is no Distribution of float64",
        ),
        (Proposal.chain((1,), (on([[1]], 1.0),)), "a support that is not int64 [support]"),
        (Proposal.chain((1,), (on([1.0], 1.0),)), "a support that is not int64 [support]"),
        (Proposal.chain((1,), (on([]),)), "a distribution of the wrong size"),
        (Proposal.chain((1,), (on([1, 2], 1.0),)), "a distribution of the wrong size"),
        (Proposal.chain((1,), (on([1, 2, 1], 0.5, 0.3, 0.2),)), "a support that is not distinct"),
        (Proposal.chain((1,), (on([1, 3], 0.5, 0.5),)), "a support that is not distinct and within"),
        (Proposal.chain((1,), (on([1, -1], 0.5, 0.5),)), "a support that is not distinct and within"),
        (Proposal.chain((1,), (on([0, 2], 0.5, 0.5),)), "a token that its distribution cannot have drawn"),
        (
            Proposal.chain((1, 0), (on([1], 1.0), whole(0.0, 1.0, 0.0))),
            "a token that its distribution cannot",
        ),
        (Proposal.chain((1, 0), (on([2, 1], 0.5, 0.5), on([0], 1.0))), None),
        (Proposal(), None),
        (Proposal((1, 2, 1), (ROOT, ROOT, 0)), None),
        (Proposal.chain((1, 0), (None, whole(0.5, 0.0, 0.5))), None),
    ],
)
def test_an_impossible_proposal_is_found(proposal: Proposal, fault: str | None) -> None:
    found = alone(proposal_fault(proposal, 3))
    assert found is None if fault is None else found is not None and found.startswith(fault)
