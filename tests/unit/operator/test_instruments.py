"""What the operator counts of itself, read as Prometheus reads it."""

from __future__ import annotations

from typing import Any

import httpx
from prometheus_client.parser import text_string_to_metric_families

from outrider_operator import health
from outrider_operator.instruments import Instruments


def samples(text: str) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    return {
        (sample.name, tuple(sorted((k, v) for k, v in sample.labels.items() if not k.startswith("otel_")))): (
            sample.value
        )
        for family in text_string_to_metric_families(text)
        for sample in family.samples
        if "le" not in sample.labels
    }


def specm(ready: str, available: str, reason: str = "Some") -> dict[str, Any]:
    return {
        "status": {
            "conditions": [
                {"type": "Ready", "status": ready, "reason": reason},
                {"type": "Available", "status": available, "reason": reason},
            ]
        }
    }


MODELS = [
    {},
    specm("True", "True"),
    specm("True", "True"),
    specm("False", "True"),
    specm("False", "False", "ScaledToZero"),
]


async def test_the_port_tells_that_it_lives_and_what_it_did() -> None:
    instruments = Instruments()
    instruments.watch_lease(lambda: True)
    instruments.watch_work(depth=lambda: 3, models=lambda: MODELS)
    instruments.passed(0.5, 0.25, failed=True)
    instruments.called("patch", "Service", 200, 0.125)
    instruments.called("get", "Lease", 0, 2.0)
    instruments.missed(4)
    async with health.serve("127.0.0.1", 0, instruments) as port, httpx.AsyncClient() as client:
        assert (await client.get(f"http://127.0.0.1:{port}/healthz")).text == "ok\n"
        answer = await client.get(f"http://127.0.0.1:{port}/metrics")
    assert answer.headers["content-type"].startswith("text/plain")
    found = samples(answer.text)
    call = (("code", "200"), ("kind", "Service"), ("verb", "patch"))
    assert found["outrider_operator_api_duration_seconds_sum", call] == 0.125
    assert (
        found[
            "outrider_operator_api_duration_seconds_count",
            (("code", "0"), ("kind", "Lease"), ("verb", "get")),
        ]
        == 1
    )
    assert found["outrider_operator_reconcile_duration_seconds_sum", (("failed", "true"),)] == 0.25
    assert found["outrider_operator_queue_wait_seconds_sum", ()] == 0.5
    assert found["outrider_operator_watch_missed_total", ()] == 4
    assert found["outrider_operator_leader", ()] == 1
    assert found["outrider_operator_queue_depth", ()] == 3
    models = {
        tuple(value for _, value in labels): count
        for (name, labels), count in found.items()
        if name == "outrider_operator_models" and count
    }
    assert models == {  # available, ready
        ("Unknown", "Unknown"): 1,
        ("True", "True"): 2,
        ("True", "False"): 1,
        ("Idle", "Idle"): 1,
    }
    assert found["outrider_operator_models", (("available", "False"), ("ready", "False"))] == 0
