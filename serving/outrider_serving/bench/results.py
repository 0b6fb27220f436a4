"""What a run gave, and the figures that follow from it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from outrider_serving.bench.breakdown import Breakdown
from outrider_serving.bench.coverage import Written

QUANTILES = (0.5, 0.9, 0.99)
"""Of the pauses between tokens."""


class BenchError(Exception):
    """A comparison cannot be made, or a side did not do what it was asked to; the message says why."""


@dataclass(frozen=True, slots=True)
class Stream:
    """What one request gave.

    Attributes:
        output: its token ids, or its text where only that is known.
        tokens: how many.
        arrivals: seconds since the run's start at which some of them came: once for each step that brought
            any, or for each chunk of a response. Never empty, in order.
        proposed, accepted: proposed tokens that were verified, and those kept; None where it is not known.
        began: seconds since the run's start at which it was sent.
        prompt: token ids; None where they are not known.
    """

    output: tuple[int, ...] | str
    tokens: int
    arrivals: tuple[float, ...]
    proposed: int | None = None
    accepted: int | None = None
    began: float = 0.0
    prompt: tuple[int, ...] | None = None


@dataclass(frozen=True, slots=True)
class Run:
    """All requests of a workload, once.

    Attributes:
        streams: what each request gave, in the order of the workload's prompts; never empty.
        breakdown: where the time of its steps went; None where the side does not tell.
    """

    streams: tuple[Stream, ...]
    breakdown: Breakdown | None = None

    @property
    def written(self) -> tuple[Written, ...] | None:
        """Prompts and outputs; None where some are not known as token ids."""
        found = [
            Written(stream.prompt, stream.output)
            for stream in self.streams
            if stream.prompt is not None and not isinstance(stream.output, str)
        ]
        return tuple(found) if len(found) == len(self.streams) else None

    @property
    def seconds(self) -> float:
        """From the start to the last token."""
        return max(stream.arrivals[-1] for stream in self.streams)

    @property
    def tokens(self) -> int:
        """Of all streams."""
        return sum(stream.tokens for stream in self.streams)

    @property
    def speed(self) -> float:
        """Tokens per second, the reading of the prompts included."""
        return self.tokens / self.seconds


@dataclass(frozen=True, slots=True)
class Summary:
    """One side's figures over all its runs of a workload.

    Attributes:
        speed: tokens per second: all tokens by all seconds.
        first_token: median seconds from a request to its first token.
        pauses: `QUANTILES` of the seconds between two arrivals of a stream.
        tokens_per_step: of a stream: all tokens by all arrivals.
        acceptance: accepted by proposed; None where it is not known, or nothing was proposed.
        breakdown: of all runs; None where the side does not tell.
    """

    speed: float
    first_token: float
    pauses: tuple[float, ...]
    tokens_per_step: float
    acceptance: float | None
    breakdown: Breakdown | None


def summarise(runs: Sequence[Run]) -> Summary:
    """The figures of at least one run."""
    streams = [stream for run in runs for stream in run.streams]
    tokens = sum(stream.tokens for stream in streams)
    pauses = [after - before for stream in streams for before, after in pairwise(stream.arrivals)]
    parts = [run.breakdown for run in runs if run.breakdown is not None]
    return Summary(
        speed=tokens / sum(run.seconds for run in runs),
        first_token=quantile([stream.arrivals[0] - stream.began for stream in streams], 0.5),
        pauses=tuple(quantile(pauses, q) if pauses else 0.0 for q in QUANTILES),
        tokens_per_step=tokens / sum(len(stream.arrivals) for stream in streams),
        acceptance=_acceptance(streams),
        breakdown=sum(parts, Breakdown()) if parts else None,
    )


def quantile(values: Iterable[float], share: float) -> float:
    """The least value that is not under `share` of them; share in (0, 1], at least one value."""
    ordered = sorted(values)
    return ordered[max(math.ceil(share * len(ordered)) - 1, 0)]


def _acceptance(streams: Sequence[Stream]) -> float | None:
    proposed = sum(stream.proposed or 0 for stream in streams)
    return sum(stream.accepted or 0 for stream in streams) / proposed if proposed else None


@dataclass(frozen=True, slots=True)
class Difference:
    """Where two outputs part.

    Attributes:
        stream: index of the request.
        index: of the first token that differs, or character where outputs are text.
    """

    stream: int
    index: int


def first_difference(a: Run, b: Run) -> Difference | None:
    """Where the outputs of two runs first differ; None where they are the same.

    Raises:
        ValueError: one side's outputs are tokens and the other's text, or they have not as many streams.
    """
    for number, (one, other) in enumerate(zip(a.streams, b.streams, strict=True)):
        if isinstance(one.output, str) != isinstance(other.output, str):
            raise ValueError("tokens cannot be compared with text")
        if one.output != other.output:
            shared = min(len(one.output), len(other.output))
            places = (n for n in range(shared) if one.output[n] != other.output[n])
            return Difference(number, next(places, shared))
    return None
