"""Every instrument, in one table."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum


class Kind(StrEnum):
    """Kind of an instrument."""

    COUNTER = "counter"
    GENERATION_COUNTER = "generation counter"
    """One with a label `generation`, of which only the newest have series; see `generations`."""

    HISTOGRAM = "histogram"
    GAUGE = "gauge"
    READ_COUNTER = "read counter"
    """One that somebody else counts; it is read when asked for, as a gauge is."""


@dataclass(frozen=True, slots=True)
class Instrument:
    """One line of the table."""

    name: str
    kind: Kind
    unit: str
    description: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] | None = None


_ARRIVAL = ("workload", "endpoint", "sampling_class", "arm", "generation")
_GEN_AI = (
    "gen_ai.operation.name",
    "gen_ai.provider.name",
    "gen_ai.request.model",
    "gen_ai.response.model",
    "server.address",
    "server.port",
    "workload",
    "arm",
)
_DOUBLING = tuple(0.01 * 2**power for power in range(14))
_TTFT_BUCKETS = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10.0)
_TPOT_BUCKETS = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)


def _shared(*lines: tuple[str, Kind, str, str], labels: tuple[str, ...] = ()) -> list[Instrument]:
    """What the shared log tells."""
    return [
        Instrument(f"outrider.shared.{name}", kind, unit, description, labels)
        for name, kind, unit, description in lines
    ]


TABLE: tuple[Instrument, ...] = (
    Instrument(
        "gen_ai.server.request.duration",
        Kind.HISTOGRAM,
        "s",
        "From receipt of a request to its end.",
        (*_GEN_AI, "error.type"),
        _DOUBLING,
    ),
    Instrument(
        "gen_ai.server.time_to_first_token",
        Kind.HISTOGRAM,
        "s",
        "From receipt of a request to its first token written (stream) or committed.",
        _GEN_AI,
        _TTFT_BUCKETS,
    ),
    Instrument(
        "gen_ai.server.time_per_output_token",
        Kind.HISTOGRAM,
        "s",
        "(Last token - first token) / (tokens - 1) of a request.",
        _GEN_AI,
        _TPOT_BUCKETS,
    ),
    Instrument(
        "outrider.requests",
        Kind.GENERATION_COUNTER,
        "{request}",
        "Ended requests by outcome and by objective (none: there is no objective, or cancelled).",
        (*_ARRIVAL, "outcome", "objective"),
    ),
    Instrument(
        "outrider.request.tokens",
        Kind.GENERATION_COUNTER,
        "{token}",
        "Tokens generated for ended requests, by whether these met their objective.",
        (*_ARRIVAL, "objective"),
    ),
    Instrument(
        "outrider.prompt.tokens",
        Kind.COUNTER,
        "{token}",
        "Prompt tokens of ended requests.",
        ("workload", "endpoint", "arm"),
    ),
    Instrument(
        "outrider.requests.running",
        Kind.GAUGE,
        "{request}",
        "Requests that take part in steps of the engine.",
    ),
    Instrument("outrider.requests.waiting", Kind.GAUGE, "{request}", "Requests that wait for the engine."),
    Instrument(
        "outrider.ready",
        Kind.GAUGE,
        "1",
        "1 once a token was generated, until the pod drains; 0 while its engine is restarted.",
    ),
    Instrument("outrider.settings.generation", Kind.GAUGE, "1", "Generation of the settings in force."),
    Instrument("outrider.pages.total", Kind.GAUGE, "{page}", "Pages of keys and values that there are."),
    Instrument("outrider.pages.held", Kind.GAUGE, "{page}", "Pages that requests use."),
    Instrument(
        "outrider.pages.cached",
        Kind.GAUGE,
        "{page}",
        "Pages that no request uses, kept for requests that begin with the same text.",
    ),
    Instrument(
        "outrider.target.compiled",
        Kind.GAUGE,
        "1",
        "1 where compiled code runs the target, 0 where transformers' own modules do.",
    ),
    Instrument(
        "outrider.target.graphs.captured",
        Kind.GAUGE,
        "{graph}",
        "CUDA graphs of target passes captured since the engine's process started, later ones for proposers "
        "that want hidden states included; 0 where no pass is replayed from one.",
    ),
    Instrument(
        "outrider.target.graphs.fallbacks",
        Kind.GAUGE,
        "{graph}",
        "Sizes of target passes that could not be captured in CUDA graphs, and so run slower without.",
    ),
    Instrument(
        "outrider.steps", Kind.COUNTER, "{step}", "Steps of the engine, by the arm in force.", ("arm",)
    ),
    Instrument(
        "outrider.step.time",
        Kind.COUNTER,
        "s",
        "Seconds the engine was busy, by phase of a step; shared among workloads by their rows.",
        ("phase", "workload", "arm"),
    ),
    Instrument(
        "outrider.verification.steps",
        Kind.COUNTER,
        "{step}",
        "Steps that committed tokens of a request, counted once for each request in the step.",
        ("workload", "sampling_class", "arm"),
    ),
    Instrument(
        "outrider.tokens.committed",
        Kind.COUNTER,
        "{token}",
        "Tokens committed: accepted ones, and the target's own.",
        ("workload", "sampling_class", "arm"),
    ),
    Instrument(
        "outrider.tokens.proposed",
        Kind.COUNTER,
        "{token}",
        "Proposed tokens that were verified.",
        ("workload", "sampling_class", "arm"),
    ),
    Instrument(
        "outrider.tokens.accepted",
        Kind.COUNTER,
        "{token}",
        "Proposed tokens that were kept.",
        ("workload", "sampling_class", "arm"),
    ),
    Instrument(
        "outrider.suffix.proposals",
        Kind.COUNTER,
        "{proposal}",
        "Proposals of the suffix proposer, one a request and step, by where they were found: in the text of "
        "the request, or in its tenant's history.",
        ("workload", "scope", "arm"),
    ),
    Instrument(
        "outrider.suffix.accepted",
        Kind.COUNTER,
        "{token}",
        "Tokens of these proposals that were kept.",
        ("workload", "scope", "arm"),
    ),
    Instrument(
        "outrider.suffix.compiled",
        Kind.GAUGE,
        "1",
        "1 where compiled code looks earlier text up, 0 where plain Python does, some 16 times as slowly.",
    ),
    Instrument(
        "outrider.history.tenants", Kind.GAUGE, "{tenant}", "Tenants whose finished outputs are remembered."
    ),
    Instrument(
        "outrider.history.tokens",
        Kind.GAUGE,
        "{token}",
        "Tokens that are remembered of them, or were and still take their place.",
    ),
    Instrument("outrider.history.size", Kind.GAUGE, "By", "Memory of their index."),
    Instrument(
        "outrider.history.evicted",
        Kind.GAUGE,
        "{token}",
        "Tokens that had to make room for others since the engine's process started.",
    ),
    *_shared(
        ("connected", Kind.GAUGE, "1", "1 while the Redis of the shared cache is connected, else 0."),
        (
            "fresh",
            Kind.GAUGE,
            "s",
            "Seconds since all that is followed was read to its end; nothing before that or without a Redis.",
        ),
        ("lag", Kind.GAUGE, "{entry}", "Entries of the followed streams that are known and not read."),
        ("tenants", Kind.GAUGE, "{tenant}", "Tenants whose streams are followed."),
        ("queue", Kind.GAUGE, "{token}", "Tokens of finished outputs that wait to be written."),
        ("published", Kind.READ_COUNTER, "{token}", "Tokens of finished outputs that were written."),
        (
            "received",
            Kind.READ_COUNTER,
            "{token}",
            "Tokens of others' outputs that were read and taken.",
        ),
        (
            "duplicates",
            Kind.READ_COUNTER,
            "{record}",
            "Records that were read again, or were this pod's own.",
        ),
        (
            "gaps",
            Kind.READ_COUNTER,
            "{record}",
            "Records that were trimmed, or lost in a failover, before they were read.",
        ),
        ("purges", Kind.READ_COUNTER, "{purge}", "Purges that were applied."),
        ("reconnects", Kind.READ_COUNTER, "{connection}", "Connections after the first."),
        ("refilled", Kind.READ_COUNTER, "{record}", "Records written again to a Redis that had lost them."),
    ),
    *_shared(
        ("dropped", Kind.READ_COUNTER, "{output}", "Finished outputs that were not written, by reason."),
        ("skipped", Kind.READ_COUNTER, "{record}", "Records that were not taken, by reason."),
        ("faults", Kind.READ_COUNTER, "{fault}", "Connections that failed and writes that were refused."),
        labels=("reason",),
    ),
    Instrument(
        "outrider.position.proposed",
        Kind.COUNTER,
        "{token}",
        "Proposed tokens by their position in the proposal, from 1.",
        ("position", "arm"),
    ),
    Instrument(
        "outrider.position.accepted",
        Kind.COUNTER,
        "{token}",
        "Accepted tokens by their position in the proposal, from 1.",
        ("position", "arm"),
    ),
    Instrument(
        "outrider.proposer.failures",
        Kind.COUNTER,
        "{failure}",
        "Exceptions of proposers; the requests went on without a proposal.",
        ("arm",),
    ),
    Instrument(
        "outrider.prompt.tokens.reused",
        Kind.COUNTER,
        "{token}",
        "Prompt tokens found in pages when a request began, or began anew after a preemption.",
        ("workload", "endpoint", "arm"),
    ),
    Instrument(
        "outrider.preemptions",
        Kind.COUNTER,
        "{preemption}",
        "Requests that lost their pages to earlier ones and had to begin anew.",
        ("arm",),
    ),
    Instrument(
        "outrider.engine.restarts",
        Kind.COUNTER,
        "{restart}",
        "Engine processes that ended and were replaced: died, stalled (and were killed) or failed.",
        ("reason",),
    ),
)
