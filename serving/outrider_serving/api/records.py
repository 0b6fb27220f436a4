"""The record of a request that has ended, and whether it met its objective.

What counts: a request becomes an arrival once its body was accepted, so 400, 401, 404 and 413 are nobody's
miss. Refused (429, 503), failed and timed-out requests are arrivals that missed; a client's own cancel is
counted apart and judged neither way. Whether a request met its objective is a joint property of that
request: it is decided here, by `met`, never derived from histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum

from outrider_serving.engine.types import Labels, Usage
from outrider_serving.settings import Objective

COMPLETIONS = "completions"
CHAT = "chat_completions"
"""The endpoint labels."""


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    REFUSED = "refused"
    CANCELLED = "cancelled"


class Verdict(StrEnum):
    """Whether a request met its objective; NONE where there is no objective, or the client cancelled."""

    MET = "met"
    MISSED = "missed"
    NONE = "none"


def met(
    objective: Objective, ttft: float | None, tpot: float | None, max_gap: float | None, outcome: Outcome
) -> bool:
    """Whether a request kept all limits of its objective at once; times are in seconds.

    Only a completed request can. A figure that it does not have (no second token, no second write) is within
    its limit; a limit is met by being exactly reached.
    """
    if outcome is not Outcome.COMPLETED or ttft is None:
        return False
    limits = (
        (ttft, objective.ttft_milliseconds),
        (tpot, objective.tpot_milliseconds),
        (max_gap, objective.max_gap_milliseconds),
    )
    return all(seconds is None or limit is None or seconds * 1000 <= limit for seconds, limit in limits)


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request that has ended. Times are in seconds; None where there was no token, or no second one.

    In a stream, `ttft`, `tpot` and `max_gap` are of the writes to the client; otherwise `ttft` and `tpot` are
    of the engine's commits, and there is no gap between writes. `error_type` is the error code of a request
    that failed or was refused.
    """

    id: str
    model: str
    tenant: str
    labels: Labels
    stream: bool
    outcome: Outcome
    duration: float
    usage: Usage
    objective: Objective | None = None
    ttft: float | None = None
    tpot: float | None = None
    max_gap: float | None = None
    error_type: str | None = None

    @property
    def verdict(self) -> Verdict:
        """What this request counts as towards attainment."""
        if self.objective is None or self.outcome is Outcome.CANCELLED:
            return Verdict.NONE
        kept = met(self.objective, self.ttft, self.tpot, self.max_gap, self.outcome)
        return Verdict.MET if kept else Verdict.MISSED
