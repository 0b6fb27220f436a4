"""The bench of tools/fleet: its figures are worked out of raw readings as they should be."""

from __future__ import annotations

import asyncio
import json
import math
from datetime import UTC, datetime
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tools.fleet import figures, phases, simulation, tables
from tools.fleet.operator_pod import CALLS, PASSES, WAITS, writes
from tools.fleet.watchers import Expectation, Heard

from outrider_operator.instruments import Instruments
from outrider_operator.observation import is_ready
from outrider_serving.settings import PodState

ACCOUNT = "outrider-system:outrider-operator"
BEGIN, END = datetime(2026, 1, 1, 12, 0, tzinfo=UTC), datetime(2026, 1, 1, 12, 1, tzinfo=UTC)


@given(st.lists(st.floats(0, 1e6), min_size=1), st.floats(0, 1))
def test_a_percentile_is_a_value_that_enough_do_not_exceed(values: list[float], share: float) -> None:
    found = figures.percentile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= share * len(values)
    if lower := [value for value in values if value < found]:
        assert len(lower) < share * len(values)


def test_percentiles_of_nothing_or_beyond_are_refused() -> None:
    with pytest.raises(ValueError, match="of 0 values"):
        figures.percentile([], 0.5)
    with pytest.raises(ValueError, match=r"1\.5"):
        figures.percentile([1.0], 1.5)


def test_spread() -> None:
    assert figures.spread([float(n) for n in range(1, 101)]) == {
        "count": 100,
        "p50": 50.0,
        "p99": 99.0,
        "max": 100.0,
    }


def test_the_operators_own_metrics_are_understood() -> None:
    """By the instruments themselves, so that a renamed metric cannot read as zero."""
    instruments = Instruments()
    before = figures.parse(instruments.exposition().decode())
    instruments.called("get", "Lease", 200, 0.003)
    instruments.called("put", "Lease", 200, 0.003)
    instruments.called("patch", "ConfigMap", 201, 0.02)
    instruments.passed(0.004, 0.07, False)
    instruments.passed(0.2, 3.0, True)
    grown = figures.difference(before, figures.parse(instruments.exposition().decode()))
    assert figures.sums(grown, f"{CALLS}_count", "verb", "kind") == {
        ("get", "Lease"): 1,
        ("put", "Lease"): 1,
        ("patch", "ConfigMap"): 1,
    }
    assert writes(grown) == 1
    assert figures.value(grown, f"{PASSES}_count") == 2
    assert figures.sums(grown, f"{PASSES}_count", "failed") == {("false",): 1, ("true",): 1}
    assert figures.bucket_of(grown, WAITS, 0.5) == 0.005
    assert figures.bucket_of(grown, WAITS, 0.99) == 0.25
    assert figures.bucket_of(grown, PASSES, 0.99) == 5.0


def test_differences_of_counters() -> None:
    def samples(**values: float) -> figures.Samples:
        return {(name, frozenset()): value for name, value in values.items()}

    before, after = samples(grown=2, same=3, restarted=9), samples(grown=5, same=3, restarted=4, new=1)
    assert figures.difference(before, after) == samples(grown=3, same=0, restarted=4, new=1)


def test_buckets_of_an_empty_and_of_an_overflowing_histogram() -> None:
    assert figures.bucket_of({}, "x", 0.5) is None
    beyond = figures.parse(
        '# TYPE x histogram\nx_bucket{le="1.0"} 1\nx_bucket{le="+Inf"} 4\nx_count 4\nx_sum 90\n'
    )
    assert figures.bucket_of(beyond, "x", 0.25) == 1.0
    assert figures.bucket_of(beyond, "x", 0.5) == math.inf


def line(audit_id: str, verb: str, resource: str = "", second: int = 30, **more: Any) -> str:
    entry = {
        "auditID": audit_id,
        "stage": "ResponseComplete",
        "verb": verb,
        "user": {"username": f"system:serviceaccount:{ACCOUNT}"},
        "userAgent": "OpenAPI-Generator/35.0.0/python",
        "requestReceivedTimestamp": f"2026-01-01T12:00:{second:02}.000001Z",
        "requestURI": "/version",
        "objectRef": dict(zip(("resource", "subresource"), resource.split("/"), strict=False)),
        **more,
    }
    return json.dumps(entry) + "\n"


def test_requests_of_the_audit_log() -> None:
    lines = [
        line("1", "watch", "pods", stage="ResponseStarted", userAgent="kopf/1.45"),
        line("1", "watch", "pods", userAgent="kopf/1.45", responseStatus={"code": 200}),
        line("2", "patch", "speculativemodels/status", responseStatus={"code": 409}),
        line("3", "get", responseStatus={"code": 200}),
        line("4", "update", "leases"),
        line("5", "patch", "services", user={"username": "system:serviceaccount:other:outrider-operator"}),
        line("6", "patch", "services", requestReceivedTimestamp="2026-01-01T12:01:00.000000Z"),
        line("7", "patch", "services").removesuffix("\n"),  # still being written
    ]
    found = figures.requests(lines, ACCOUNT, BEGIN, END)
    calls = figures.counts(found)
    assert calls == {
        "watch pods": 1,
        "patch speculativemodels/status": 1,
        "get (no resource)": 1,
        "update leases": 1,
    }
    assert [request.by_watcher for request in found] == [True, False, False, False]
    assert figures.by_verb(calls) == {"watch": 1, "patch": 1, "get": 1, "update": 1}
    assert figures.needless(calls) == {"patch speculativemodels/status": 1}
    assert figures.refusals(found) == {"409 patch speculativemodels/status": 1}


async def test_an_expectation_counts_from_each_ones_beginning() -> None:
    first, second = ("a", "x"), ("a", "y")
    expected = Expectation([first, second], lambda heard: bool(heard.found["good"]))

    def hear(key: tuple[str, str], good: bool) -> None:
        expected.hear(Heard("Service", key, {"good": good}, deleted=False))

    hear(first, True)  # before it began
    expected.begin(first)
    expected.begin(second)
    hear(first, False)
    assert expected.left == 2
    hear(first, True)
    hear(first, True)
    assert expected.left == 1
    with pytest.raises(TimeoutError, match="1 not met within 0 s, such as a/y"):
        await expected.wait(0.01)
    asyncio.get_running_loop().call_soon(hear, second, True)
    assert len(await expected.wait(10)) == 2


def test_simulated_pods_are_what_the_operator_takes_for_pods() -> None:
    pod = {
        "metadata": {"uid": "u", "namespace": "n", "name": "p"},
        "spec": {"containers": [{"name": "engine", "image": "i"}]},
    }
    for ready in (False, True):
        status = simulation.pod_status(pod, "10.99.0.1", ready, "2026-01-01T12:00:00Z")
        assert is_ready({**pod, "status": status}) is ready
    state = PodState.model_validate_json(json.dumps(simulation.pod_state("m", 3)))
    assert (state.ready, state.generation, state.model is not None) == (True, 3, True)


def specm(**status: Any) -> dict[str, Any]:
    ready = {"type": "Ready", "status": "True", "observedGeneration": 2}
    settings = {"generation": 4, "reportedGeneration": 4}
    return {"metadata": {"generation": 2}, "status": {"conditions": [ready], "settings": settings} | status}


def test_what_counts_as_in_force() -> None:
    assert phases.is_in_force(specm())
    assert not phases.is_in_force({"metadata": {"generation": 1}})
    assert not phases.is_in_force(specm(settings={"generation": 5, "reportedGeneration": 4}))
    assert not phases.is_in_force(specm(settings={}))
    for change in ({"status": "False"}, {"observedGeneration": 1}):
        ready = specm()["status"]["conditions"][0] | change
        assert not phases.is_in_force(specm(conditions=[ready]))


def run(**changes: Any) -> dict[str, Any]:
    phase = {
        "seconds": 30.0,
        "load": 2.25,
        "latency": {"Ready": {"count": 2, "p50": 0.25, "p99": 12.5, "max": 12.5}},
        "process": {"CPU seconds": 1.0, "resident MiB": 90.4, "most resident MiB": 95.0},
        "metrics": {
            "calls": {"get Lease 200": 3},
            "passes": 7,
            "failed passes": 0,
            "queue wait at most": {"p50": 0.005, "p99": math.inf},
            "pass at most": {"p50": None, "p99": None},
        },
        "calls": {"get leases": 3, "list pods": 2, "update leases": 5},
        "own calls": 8,
    } | changes
    return {"phases": {"idle": phase}}


def test_tables() -> None:
    found = tables.tables(run()).splitlines()
    assert "| idle | Ready | 2 | 0.250 | 12.5 | 12.5 |" in found
    assert "| idle | queue wait at most | 7 | 0.005 | over the last bucket |  |" in found
    assert "| idle | 30 | 3 | 2 | 0 | 0 | 0 | 5 | 0 | 10 | 20 | 8 | 3 |" in found
    assert "| update leases | 5 |" in found
    assert "| idle | 1.0 | 2.0 | 90 | 95 | 2.2 |" in found
    for row in filter(None, found):
        assert row.startswith("| ")
        assert row.endswith(" |")


def test_a_write_without_need_is_complained_of() -> None:
    assert tables.complaints(run(**{"needless writes": {}})) == []
    assert tables.complaints(run(**{"needless writes": {"patch services": 2}})) == [
        "idle: needless patch services: 2"
    ]
    metrics = run()["phases"]["idle"]["metrics"] | {"failed passes": 3}
    assert tables.complaints(run(metrics=metrics)) == ["idle: failed passes: 3"]
