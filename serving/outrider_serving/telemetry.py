"""What the instruments of the table count, and how it is told.

Two kinds of frozen records are the only source of nearly all figures: `RequestRecord`, made by the API when a
request has ended, and `StepRecord`, made by the engine when a step has ended. The gauges are read when asked
for, and the restarts of the engine's process are counted by the one who restarts it.
"""

from __future__ import annotations

from collections import Counter as Tally
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Counter, Histogram, Meter, Observation
from opentelemetry.sdk.metrics import Counter as SdkCounter
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from outrider_serving.api.records import COMPLETIONS, RequestRecord
from outrider_serving.engine.process.child import Reason
from outrider_serving.engine.records import RowRecord, StepRecord
from outrider_serving.generations import GenerationCounters
from outrider_serving.instruments import TABLE, Instrument, Kind

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
PROVIDER = "outrider"

Reading = float | Mapping[str, float] | None
"""What is read: a number, one for each value of the one label, or nothing that could be told."""

Readers = Mapping[str, Callable[[], Reading]]
"""How to read each gauge and each read counter of the table, by name."""

_SERIES_LIMIT = 20_000
"""Most series of one counter; beyond it the SDK folds new ones into an overflow series."""


class Telemetry:
    """The instruments of one process, and their exposition. Safe to use from any thread."""

    def __init__(self, *, address: str, port: int, readers: Readers) -> None:
        """`address` and `port` are where the API listens."""
        self._server = {"server.address": address, "server.port": port}
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(
            disable_target_info=True,
            scope_info_enabled=False,
            registry=self._registry,
            cardinality_limits={SdkCounter: _SERIES_LIMIT},
        )
        self._provider = MeterProvider([reader], shutdown_on_exit=False)
        meter = self._provider.get_meter("outrider")
        self._counters: dict[str, Counter] = {}
        self._histograms: dict[str, Histogram] = {}
        self._generations = GenerationCounters(line for line in TABLE if line.kind is Kind.GENERATION_COUNTER)
        self._registry.register(self._generations)
        for line in TABLE:
            if line.kind is Kind.COUNTER:
                self._counters[line.name] = meter.create_counter(line.name, line.unit, line.description)
            elif line.kind is Kind.HISTOGRAM:
                self._histograms[line.name] = meter.create_histogram(
                    line.name, line.unit, line.description, explicit_bucket_boundaries_advisory=line.buckets
                )
            elif line.kind in (Kind.GAUGE, Kind.READ_COUNTER):
                _observe(meter, line, readers[line.name])

    def exposition(self) -> bytes:
        """All figures in Prometheus' text format (CONTENT_TYPE)."""
        return generate_latest(self._registry)

    def close(self) -> None:
        """Release the instruments."""
        self._provider.shutdown()

    def record_request(self, record: RequestRecord) -> None:
        """Count a request that has ended."""
        labels = record.labels
        judged = {
            "workload": labels.workload,
            "endpoint": labels.endpoint,
            "sampling_class": labels.sampling_class.value,
            "arm": labels.arm,
            "objective": record.verdict.value,
        }
        self._generations.add(
            labels.generation, "outrider.requests", 1, judged | {"outcome": record.outcome.value}
        )
        self._generations.add(
            labels.generation, "outrider.request.tokens", record.usage.completion_tokens, judged
        )
        self._counters["outrider.prompt.tokens"].add(
            record.usage.prompt_tokens, {name: judged[name] for name in ("workload", "endpoint", "arm")}
        )
        self._record_conventions(record)

    def record_step(self, step: StepRecord) -> None:
        """Count a step of the engine; its seconds belong to the arm in force."""
        arm = {"arm": step.arm}
        self._counters["outrider.steps"].add(1, arm)
        if step.proposer_failures:
            self._counters["outrider.proposer.failures"].add(step.proposer_failures, arm)
        if step.preemptions:
            self._counters["outrider.preemptions"].add(step.preemptions, arm)
        self._count_reused(step.rows)
        self._share_seconds(step, arm)
        self._count_tokens(step.rows, arm)
        self._count_found(step.rows, arm)
        self._by_position("outrider.position.proposed", step.proposed_by_position, arm)
        self._by_position("outrider.position.accepted", step.accepted_by_position, arm)

    def record_restart(self, reason: Reason) -> None:
        """Count an engine's process that has ended and is to be replaced."""
        self._counters["outrider.engine.restarts"].add(1, {"reason": reason.value})

    def _count_reused(self, rows: Iterable[RowRecord]) -> None:
        for row in rows:
            if row.reused:
                of = {"workload": row.labels.workload, "endpoint": row.labels.endpoint, "arm": row.labels.arm}
                self._counters["outrider.prompt.tokens.reused"].add(row.reused, of)

    def _share_seconds(self, step: StepRecord, arm: Mapping[str, str]) -> None:
        phases = {
            "proposal": step.proposal_seconds,
            "target": step.target_seconds,
            "verification": step.verification_seconds,
            "rest": step.rest_seconds,
        }
        rows = Tally(row.labels.workload for row in step.rows)
        for workload, count in rows.items():
            for phase, seconds in phases.items():
                shared = {"phase": phase, "workload": workload, **arm}
                self._counters["outrider.step.time"].add(seconds * count / len(step.rows), shared)

    def _count_tokens(self, rows: Iterable[RowRecord], arm: Mapping[str, str]) -> None:
        """Summed over the rows of a kind first: this runs on the event loop, for every step."""
        kinds: dict[tuple[str, str], list[RowRecord]] = {}
        for row in rows:
            if row.committed:
                kinds.setdefault((row.labels.workload, row.labels.sampling_class.value), []).append(row)
        for (workload, sampling_class), group in kinds.items():
            kind = {"workload": workload, "sampling_class": sampling_class, **arm}
            self._counters["outrider.verification.steps"].add(len(group), kind)
            self._counters["outrider.tokens.committed"].add(sum(row.committed for row in group), kind)
            self._counters["outrider.tokens.proposed"].add(sum(row.proposed for row in group), kind)
            self._counters["outrider.tokens.accepted"].add(sum(row.accepted for row in group), kind)

    def _count_found(self, rows: Iterable[RowRecord], arm: Mapping[str, str]) -> None:
        """By where proposals were found: their number to that of verification steps is the hit rate."""
        found: dict[tuple[str, str], list[RowRecord]] = {}
        for row in rows:
            if row.source:
                found.setdefault((row.labels.workload, row.source), []).append(row)
        for (workload, scope), group in found.items():
            of = {"workload": workload, "scope": scope, **arm}
            self._counters["outrider.suffix.proposals"].add(len(group), of)
            self._counters["outrider.suffix.accepted"].add(sum(row.accepted for row in group), of)

    def _by_position(self, name: str, counts: Sequence[int], arm: Mapping[str, str]) -> None:
        for position, count in enumerate(counts, start=1):
            self._counters[name].add(count, {"position": position, **arm})

    def _record_conventions(self, record: RequestRecord) -> None:
        labels = record.labels
        attributes: dict[str, Any] = {
            "gen_ai.operation.name": "text_completion" if labels.endpoint == COMPLETIONS else "chat",
            "gen_ai.provider.name": PROVIDER,
            "gen_ai.request.model": record.model,
            "gen_ai.response.model": record.model,
            "workload": labels.workload,
            "arm": labels.arm,
        } | self._server
        error = {"error.type": record.error_type} if record.error_type else {}
        self._histograms["gen_ai.server.request.duration"].record(record.duration, attributes | error)
        if record.ttft is not None:
            self._histograms["gen_ai.server.time_to_first_token"].record(record.ttft, attributes)
        if record.tpot is not None:
            self._histograms["gen_ai.server.time_per_output_token"].record(record.tpot, attributes)


def _observe(meter: Meter, line: Instrument, read: Callable[[], Reading]) -> None:
    def callback(_options: CallbackOptions) -> Iterable[Observation]:
        found = read()
        if found is None:
            return []
        if isinstance(found, Mapping):
            (label,) = line.labels
            return [Observation(value, {label: name}) for name, value in found.items()]
        return [Observation(found)]

    if line.kind is Kind.GAUGE:
        meter.create_observable_gauge(line.name, [callback], line.unit, line.description)
    else:
        meter.create_observable_counter(line.name, [callback], line.unit, line.description)
