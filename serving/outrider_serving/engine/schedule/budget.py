"""Shares the tokens of one target pass among the requests that take part in it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from outrider_serving.engine.schedule.sequence import Sequence

PREFILL_SHARE = 0.5
"""Least share of a pass, beyond one token for each row that decodes, that goes to texts being read."""


@dataclass(slots=True)
class Share:
    """What a running sequence gets of a pass: `tokens` of its pending ones, slots for proposed `nodes`."""

    sequence: Sequence
    tokens: int = 0
    nodes: int = 0

    @property
    def verifies(self) -> bool:
        """The pass runs all pending tokens."""
        return self.tokens == self.sequence.pending


def share_out(
    budget: int,
    running: Iterable[Sequence],
    wants: Callable[[Sequence], int],
    take_slots: Callable[[Sequence, int], int],
) -> list[Share]:
    """Share a pass out.

    First one token for each row that decodes; then, to the texts being read, the first ones first, at least
    PREFILL_SHARE of the rest; then proposals, evenly; and what these leave to the texts again. So neither
    kind of row waits for the other. A text that is read to its end only with this last part has no proposal.

    Args:
        budget: tokens in the pass, at least one for each row.
        running: the rows, in the order in which their texts are read.
        wants: most proposed nodes that a row which verifies could use.
        take_slots: gives a row slots for at most so many nodes; returns for how many.

    Returns:
        One share for each row, in their order; some may have no tokens.
    """
    shares = [Share(sequence, tokens=int(sequence.pending == 1)) for sequence in running]
    reading = [share for share in shares if not share.verifies]
    left = budget - sum(share.tokens for share in shares)
    left -= _read(reading, math.ceil(left * PREFILL_SHARE))
    verifying = [share for share in shares if share.verifies]
    granted = evenly(left, [wants(share.sequence) for share in verifying])
    for share, nodes in zip(verifying, granted, strict=True):
        share.nodes = take_slots(share.sequence, nodes)
        left -= share.nodes
    _read(reading, left)
    return shares


def evenly(budget: int, wants: list[int]) -> list[int]:
    """Shares of a budget: nobody gets more than wanted, and what one does not want goes to the others.

    Args:
        budget: what there is, at least 0.
        wants: the most that each can use, at least 0.

    Returns:
        One share for each, in their order. Those that want more than they get have the same, up to 1.
    """
    granted = [0] * len(wants)
    for rank, index in enumerate(sorted(range(len(wants)), key=wants.__getitem__)):
        granted[index] = min(wants[index], budget // (len(wants) - rank))
        budget -= granted[index]
    return granted


def _read(reading: Iterable[Share], budget: int) -> int:
    """Give rows pending tokens, the first ones first; returns how many."""
    left = budget
    for share in reading:
        tokens = min(share.sequence.runnable - share.tokens, left)
        share.tokens += tokens
        left -= tokens
    return budget - left
