"""However many rows there are, the CPU waits for the device as often as for one of them; `afar` counts.

What comes out is compared with what comes out on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from outrider_serving.engine.types import SamplingParams
from outrider_serving.sampling.distribution import Distribution, residual
from outrider_serving.sampling.fault import proposal_fault
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.logprobs import token_logprobs
from outrider_serving.sampling.proposal import ROOT, Proposal
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.sampling.reading import together
from outrider_serving.sampling.verification import Verdict, VerifyRow, verify
from unit.sampling.afar import Device

VOCABULARY = 200
KINDS = 5
"""Rows of so many kinds: more rows are the same ones again, so that they walk as far and try as much."""

LEVELS, SIBLINGS = 3, 2
NODES = LEVELS * SIBLINGS

Place = Callable[[Tensor], Tensor]
"""Puts a tensor where it is to lie."""


class AllBut:
    """A constraint: one token may not follow."""

    def mask(self, path: Any) -> Tensor:
        return torch.arange(VOCABULARY) != 9 + len(path)

    def advance(self, tokens: Any) -> None:
        raise NotImplementedError


def chosen(kind: int, place: Place) -> Proposal:
    """Below the last sibling of each level there are others."""
    tokens = np.random.default_rng(kind).permutation(20)[:NODES].tolist()
    return Proposal(
        tuple(tokens), tuple(ROOT if n < SIBLINGS else n - n % SIBLINGS - 1 for n in range(NODES))
    )


def drawn(kind: int, place: Place, *, support: int | None = None) -> Proposal:
    """The same tree, of drawn tokens; their q are on the whole vocabulary or on a support."""
    rng, tree = np.random.default_rng([1, kind]), chosen(kind, place)
    laws = list[Distribution]()
    for token in tree.tokens:
        others = [t for t in rng.permutation(40).tolist() if t != token][: (support or 40) - 1]
        ids = torch.tensor([token, *others])
        weights = torch.from_numpy(rng.dirichlet(np.ones(len(ids))))
        if support is None:
            weights, ids = torch.zeros(VOCABULARY, dtype=torch.float64).scatter(0, ids, weights), None
        laws.append(Distribution(None if ids is None else place(ids), place(weights)))
    return Proposal(tree.tokens, tree.parents, tuple(laws))


def on_the_cpu(kind: int, place: Place, *, support: int | None) -> Proposal:
    """Drawn by a proposer that keeps its q on the CPU."""
    return drawn(kind, lambda tensor: tensor, support=support)


PROPOSALS: dict[str, Callable[[int, Place], Proposal]] = {
    "nothing": lambda kind, place: Proposal(),
    "chosen": chosen,
    "drawn": drawn,
    "drawn on a support": partial(drawn, support=20),
    "drawn on the CPU": partial(on_the_cpu, support=None),
    "drawn on the CPU on a support": partial(on_the_cpu, support=20),
}

EDITS: dict[str, Any] = {
    "presence_penalty": 0.5,
    "repetition_penalty": 1.2,
    "logit_bias": ((1, 2.0), (3, -1.0)),
    "allowed_token_ids": tuple(range(60)),
    "banned_token_ids": (5,),
    "min_tokens": 2,
}

CASES: list[tuple[str, dict[str, Any], int]] = [
    # What is proposed, what the request says, and the most that is waited for at each level.
    ("chosen", {"temperature": 0.0}, 1),
    ("chosen", {"temperature": 0.0, **EDITS}, 1),
    ("chosen", {"temperature": 0.0, "grammar": "all but one", **EDITS}, 1),
    ("chosen", {"seed": 1}, 2),
    ("drawn", {"seed": 1, **EDITS}, 2),
    ("chosen", {"seed": 1, "top_k": 20}, 2),
    ("chosen", {"seed": 1, "top_p": 0.99}, 3),  # more candidates than are looked at first
    *((name, {}, 1 + SIBLINGS + 1) for name in PROPOSALS),
    *((name, {"grammar": "all but one", **EDITS}, 1 + SIBLINGS + 1) for name in PROPOSALS),
    *((name, {"top_p": 0.9, "top_k": 30}, 2 + (SIBLINGS if "drawn" in name else 0)) for name in PROPOSALS),
]


def rows_of(count: int, name: str, values: dict[str, Any], place: Place) -> tuple[list[VerifyRow], Tensor]:
    """Rows to verify, and logits that make proposed tokens likely, each kind less than the one before."""
    rows, logits = list[VerifyRow](), list[Tensor]()
    for n in range(count):
        kind = n % KINDS
        law = TokenLaw(
            SamplingParams(99, **values),
            (1, 2),
            vocab_size=VOCABULARY,
            ends=frozenset({7}),
            constraint=AllBut() if "grammar" in values else None,
        )
        draws = GeneratorRandomness(np.random.default_rng(kind))
        root = len(logits) * (NODES + 1)
        rows.append(VerifyRow(law, PROPOSALS[name](kind, place), root, law.noise, draws))
        generator = torch.Generator().manual_seed(kind)
        theirs = torch.randn(NODES + 1, VOCABULARY, generator=generator)
        for node in range(-1, NODES):
            below = chosen(kind, place).children.get(node, ())
            theirs[node + 1, [chosen(kind, place).tokens[child] for child in below]] += 7.0 - 3.0 * kind
        logits.append(theirs)
    return rows, place(torch.cat(logits))


def waited(
    count: int, name: str, values: dict[str, Any], patch: pytest.MonkeyPatch
) -> tuple[list[Verdict | Exception], list[str]]:
    """The verdicts, and what was waited for."""
    device = Device(patch)
    rows, logits = rows_of(count, name, values, device.put)
    with device:
        verdicts = verify(rows, logits)
    return verdicts, device.waits


def told(count: int, top: int, tied: int, place: Place) -> tuple[Tensor, list[int], list[int]]:
    """What logprobs are asked of, with so many equal logits."""
    logits = torch.randn(count, VOCABULARY, generator=torch.Generator().manual_seed(1))
    logits[:, 30 : 30 + tied] = 9.0
    return place(logits), [3] * count, [top] * count


@pytest.mark.parametrize(("name", "values", "most"), CASES)
def test_verification_waits_as_often_for_many_rows_as_for_few(
    name: str, values: dict[str, Any], most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    few, waits = waited(KINDS, name, values, monkeypatch)
    many, waits_of_many = waited(5 * KINDS, name, values, monkeypatch)
    assert waits_of_many == waits
    assert many == few * 5
    assert few == verify(*rows_of(KINDS, name, values, lambda tensor: tensor))
    accepted = {verdict.accepted for verdict in few if isinstance(verdict, Verdict)}
    assert 0 in accepted
    assert (max(accepted) > 0) == (name != "nothing")
    assert 0 < len(waits) <= most * (max(accepted) + 1)


def test_rows_that_nothing_edits_are_waited_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    verdicts, waits = waited(8, "chosen", {"temperature": 0.0}, monkeypatch)
    assert max(verdict.accepted for verdict in verdicts if isinstance(verdict, Verdict)) > 0
    assert len(waits) == 1


@pytest.mark.parametrize("support", [None, 20])
@pytest.mark.parametrize("empty", [False, True])
def test_a_residual_is_that_of_the_cpu_without_a_wait(
    support: int | None, empty: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    device = Device(monkeypatch)
    for kind in range(KINDS):
        r, q = drawn(kind, lambda tensor: tensor, support=support).q[:2]
        assert r is not None
        for taken in (r if empty else q, None):
            there = Distribution(r.ids if r.ids is None else device.put(r.ids), device.put(r.probs))
            with device:
                left = residual(there, None if taken is None else taken.to(there.probs.device), 3)
            assert device.waits == []
            with device:
                assert left.probs.tolist() == residual(r, taken, 3).probs.tolist()
            device.waits.clear()


@pytest.mark.parametrize("support", [None, 20])
def test_many_proposals_are_looked_at_at_once(support: int | None, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device(monkeypatch)
    proposals = [drawn(kind, device.put, support=support) for kind in range(8)]
    with device:
        assert together([proposal_fault(proposal, VOCABULARY) for proposal in proposals]) == [None] * 8
    assert len(device.waits) == 1


@pytest.mark.parametrize(("top", "tied", "most"), [(0, 0, 1), (5, 0, 1), (5, 8, 1), (5, 100, 2)])
def test_logprobs_wait_as_often_for_many_positions_as_for_few(
    top: int, tied: int, most: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    for count in (2, 16):
        device = Device(monkeypatch)
        asked = told(count, top, tied, device.put)
        with device:
            found = token_logprobs(*asked)
        assert len(device.waits) == most
        assert found == token_logprobs(*told(count, top, tied, lambda tensor: tensor))


def test_what_waits_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    """The harness itself."""
    with Device(monkeypatch) as device:
        here = torch.arange(3)
        there = device.put(here)
        ways: list[Callable[[], object]] = [
            lambda: float(there[1]),
            lambda: bool((there > 1).all()),
            lambda: there.tolist(),
            lambda: there.cpu(),
            lambda: there.nonzero(),
            lambda: there[there > 1],
            lambda: here.to(there.device),
            lambda: here.to(there.device, non_blocking=True),
        ]
        for n, way in enumerate(ways):
            way()
            assert len(device.waits) == n + 1
        assert here.pin_memory().to(there.device, non_blocking=True).add(there).sum().shape == ()
        with pytest.raises(AssertionError, match="two devices"):
            there + here
        with pytest.raises(AssertionError, match="from numbers of the CPU"):
            there[[0, 2]]
        assert len(device.waits) == len(ways)
