"""What the operator counts of itself, by OpenTelemetry, in the text that Prometheus reads."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterable
from itertools import product
from typing import Final

from opentelemetry.exporter.prometheus import PrometheusMetricReader
from opentelemetry.metrics import CallbackOptions, Observation
from opentelemetry.sdk.metrics import MeterProvider
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import CONTENT_TYPE_PLAIN_0_0_4, generate_latest

from outrider_operator.observation import Object

_STATUSES: Final = ("True", "False", "Unknown", "Idle")

CONTENT_TYPE: Final = CONTENT_TYPE_PLAIN_0_0_4

_SECONDS: Final = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0)


class Instruments:
    """Every instrument of the operator; the labels are bounded by kinds, verbs and HTTP codes."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        reader = PrometheusMetricReader(disable_target_info=True, registry=self._registry)
        self._provider = MeterProvider([reader], shutdown_on_exit=False)
        meter = self._provider.get_meter("outrider_operator")
        self._meter = meter
        self._passes = meter.create_histogram(
            "outrider.operator.reconcile.duration",
            unit="s",
            description="Seconds of one pass over one SpeculativeModel, by whether it failed.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._waits = meter.create_histogram(
            "outrider.operator.queue.wait",
            unit="s",
            description="Seconds from the news about a SpeculativeModel to the pass over it.",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._calls = meter.create_histogram(
            "outrider.operator.api.duration",
            unit="s",
            description="Seconds of a request to the API server, by verb, kind and HTTP code (0: no answer).",
            explicit_bucket_boundaries_advisory=_SECONDS,
        )
        self._missed = meter.create_counter(
            "outrider.operator.watch.missed",
            description="SpeculativeModels about which the regular list told what no watch had told.",
        )

    def passed(self, waited: float, took: float, failed: bool) -> None:
        """A pass over a SpeculativeModel has ended."""
        self._waits.record(waited)
        self._passes.record(took, {"failed": str(failed).lower()})

    def called(self, verb: str, kind: str, status: int, seconds: float) -> None:
        """A request to the API server has ended."""
        self._calls.record(seconds, {"verb": verb, "kind": kind, "code": str(status)})

    def missed(self, count: int) -> None:
        """The regular list has told of so many SpeculativeModels what no watch had told."""
        self._missed.add(count)

    def watch_lease(self, holds: Callable[[], bool]) -> None:
        """Show, whenever it is asked for, whether the Lease is held then."""

        def leading(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(int(holds()))]

        self._meter.create_observable_gauge(
            "outrider.operator.leader", [leading], description="1 while this process holds the Lease."
        )

    def watch_work(self, *, depth: Callable[[], int], models: Callable[[], Iterable[Object]]) -> None:
        """Show, whenever it is asked for, how many keys wait then, and which SpeculativeModels there are."""

        def waiting(_: CallbackOptions) -> Iterable[Observation]:
            return [Observation(depth())]

        def states(_: CallbackOptions) -> Iterable[Observation]:
            counted = Counter(dict.fromkeys(product(_STATUSES, repeat=2), 0))
            counted.update(_state(model) for model in models())
            return [
                Observation(count, {"ready": ready, "available": available})
                for (ready, available), count in counted.items()
            ]

        self._meter.create_observable_gauge(
            "outrider.operator.queue.depth", [waiting], description="SpeculativeModels that wait for a pass."
        )
        self._meter.create_observable_gauge(
            "outrider.operator.models",
            [states],
            description="SpeculativeModels by their conditions Ready and Available; Idle for no replicas.",
        )

    def exposition(self) -> bytes:
        """All of it, as Prometheus reads it."""
        return generate_latest(self._registry)


def _state(model: Object) -> tuple[str, str]:
    conditions = {c["type"]: c for c in (model.get("status") or {}).get("conditions", ())}
    ready, available = (_status(conditions.get(kind, {})) for kind in ("Ready", "Available"))
    return ready, available


def _status(condition: Object) -> str:
    if condition.get("reason") == "ScaledToZero":
        return "Idle"
    status = condition.get("status")
    return status if status in _STATUSES else "Unknown"
