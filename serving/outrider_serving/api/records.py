"""The record of a request that has ended, and whether it met its objective.

What counts: a request becomes an arrival once its body was accepted, so 400, 401, 404 and 413 are nobody's
miss. Refused (429, 503), failed and timed-out requests are arrivals that missed; a client's own cancel is
counted apart and judged neither way. Whether a request met its objective is a joint property of that
request: it is decided here, by `met`, never derived from histograms.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from itertools import zip_longest

from outrider_serving.engine.types import Labels
from outrider_serving.settings import Objective

COMPLETIONS = "completions"
CHAT = "chat_completions"
"""The endpoint labels."""


@dataclass(frozen=True, slots=True)
class Usage:
    """What an answer cost, so far or in all; `+` adds what its choices cost on their own.

    Attributes:
        prompt_tokens: of the prompt, counted once however many choices share it.
        completion_tokens: committed tokens, an end of sequence included.
        verification_steps: steps that committed any.
        proposed_tokens: tokens that these steps verified, over all branches.
        accepted_tokens: proposed tokens that were kept.
        cached_tokens: prompt tokens whose keys and values were there before any choice had read them.
        proposed_by_position: how many proposals reached depth 1, 2, ...
        accepted_by_position: how many were accepted to depth 1, 2, ...; not longer than the former.
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    verification_steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0
    cached_tokens: int = 0
    proposed_by_position: tuple[int, ...] = ()
    accepted_by_position: tuple[int, ...] = ()

    def __add__(self, other: Usage) -> Usage:
        return Usage(
            prompt_tokens=max(self.prompt_tokens, other.prompt_tokens),
            completion_tokens=self.completion_tokens + other.completion_tokens,
            verification_steps=self.verification_steps + other.verification_steps,
            proposed_tokens=self.proposed_tokens + other.proposed_tokens,
            accepted_tokens=self.accepted_tokens + other.accepted_tokens,
            cached_tokens=min(self.cached_tokens, other.cached_tokens),
            proposed_by_position=_added(self.proposed_by_position, other.proposed_by_position),
            accepted_by_position=_added(self.accepted_by_position, other.accepted_by_position),
        )

    @property
    def accepted_length(self) -> float:
        """Mean number of proposed tokens that a step kept; 0 without a step."""
        return self.accepted_tokens / self.verification_steps if self.verification_steps else 0.0


def _added(left: tuple[int, ...], right: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(map(sum, zip_longest(left, right, fillvalue=0)))


class Outcome(StrEnum):
    """How a request ended."""

    COMPLETED = "completed"
    FAILED = "failed"
    TIMED_OUT = "timed_out"
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
    of the engine's commits, and there is no gap between writes. With n choices the writes are those of any,
    and `tpot` is by total tokens / n, the tokens that the reader of one choice got. `usage` is that of all
    choices. `error_type` is the error code of a request that failed, was refused or timed out.
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
