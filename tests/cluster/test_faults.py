"""What goes wrong around the operator, what the resource then says, and that all is well again afterwards.

One operator of this machine works throughout, behind a proxy that injects faults; whenever it ends, the test
starts it again, as the kubelet would. `kubectl describe` of each fault is printed (`pytest -s`).
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import count

import pytest

from cluster.faultproxy import Call, FaultProxy
from cluster.operated import NOWHERE, Object, Operated, eventually, model
from cluster.operators import QUICK, HostOperator, Operators, operators
from cluster.tinymodel import tiny_model
from cluster_fixture import LocalCluster
from conftest import LONG
from outrider_local.addresses import NODE

NAMESPACE = "fault-tests"
AWAY_SECONDS = 60 if LONG else 7
"""Longer than the Lease, so that the operator has to end and start again."""

HOLD = "outrider.test/hold"
AUTOSCALED = "autoscaled"
#: Nothing resolves the reserved domain, which takes the container runtime half a minute to find out.
NO_IMAGE = "registry.invalid/serving:1" if LONG else "127.0.0.1:1/serving:1"
NUMBERS = count(1)


class Faulty(Operators):
    """A cluster with one operator, which is started again whenever it ends."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        super().__init__(cluster, namespace)
        self.through: FaultProxy = self.proxy()
        self.process: HostOperator = self.operator("faults", self.through, *QUICK, identity="faults-0")
        self.exits: list[int] = []

    def tend(self) -> None:
        """Start the operator if it has ended."""
        if not self.process.running:
            if self.process.started:
                self.exits.append(self.process.wait(0))
            self.process.start()

    def eventually(self, check: Callable[[], object], seconds: float, name: str = "") -> None:
        """Wait, and keep the operator running meanwhile."""

        def tended() -> bool:
            self.tend()
            return bool(check())

        def explain() -> str:
            told = self.kubectl("describe", "specm,pods", name) if name else ""
            return f"{told}\n{self.process.log[-3000:]}"

        eventually(tended, seconds, explain)

    def reason(self, name: str) -> str:
        return str(self.condition(name).get("reason"))

    def tell(self, fault: str, name: str, namespace: str = NAMESPACE) -> None:
        """Print what `kubectl describe` says."""
        told = self.cluster.kubectl("describe", "specm", name, f"--namespace={namespace}")
        print(f"\n=== {fault}\n{told}=== end")

    def patch(self, name: str, spec: Object) -> None:
        patch = json.dumps({"spec": spec})
        self.kubectl("patch", "specm", name, "--type=merge", f"--patch={patch}")

    def uids(self, name: str) -> dict[str, str]:
        """Uids of children and pods."""
        found = {**self.children(name), **{p["metadata"]["name"]: p for p in self.pods(name)}}
        return {key: child["metadata"]["uid"] for key, child in found.items()}

    def restarts(self, name: str) -> int:
        return sum(s["restartCount"] for p in self.pods(name) for s in p["status"]["containerStatuses"])

    def replicas(self, name: str) -> tuple[int, int]:
        """Those of the resource and those of its Deployment."""
        resource, deployment = self.get("specm", name), self.deployment(name)
        return resource["spec"]["replicas"], deployment["spec"]["replicas"]

    def calls_during(self, seconds: float) -> list[Call]:
        """What the operator asks for in that time, Leases and watches apart."""
        first = len(self.through.calls)
        time.sleep(seconds)
        return [call for call in self.through.calls[first:] if not call.is_lease and not call.is_watch]


@pytest.fixture(scope="module")
def faulty(cluster: LocalCluster) -> Iterator[Faulty]:
    with operators(cluster, NAMESPACE, Faulty) as made:
        made.tend()
        yield made


@pytest.fixture(scope="module")
def serving(faulty: Faulty) -> str:
    """A SpeculativeModel that really serves. One for the autoscaler goes along, which takes its time."""
    faulty.apply(tiny_model(faulty, "serving", "weights-of-faults"), *_autoscaled(2, 3))
    faulty.eventually(lambda: faulty.reason("serving") == "Serving", 120, "serving")
    return "serving"


def _autoscaled(least: int, most: int) -> tuple[Object, Object]:
    target = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeModel", "name": AUTOSCALED}
    scaler = {
        "apiVersion": "autoscaling/v2",
        "kind": "HorizontalPodAutoscaler",
        "metadata": {"name": AUTOSCALED},
        "spec": {"scaleTargetRef": target, "minReplicas": least, "maxReplicas": most},
    }
    return model(AUTOSCALED, engine=NOWHERE), scaler


@pytest.fixture
def idle(faulty: Faulty) -> Iterator[str]:
    """A settled SpeculativeModel with all children and no pods, of its own for each test."""
    name = f"idle-{next(NUMBERS)}"
    faulty.apply(model(name, replicas=0))
    faulty.eventually(lambda: faulty.reason(name) == "ScaledToZero", 30, name)
    yield name
    faulty.kubectl("delete", "specm", name, "--ignore-not-found", "--timeout=20s")


def test_nothing_hooks_into_the_api_server(cluster: LocalCluster, faulty: Faulty) -> None:
    for kind in ("mutatingwebhookconfigurations", "validatingwebhookconfigurations", "apiservices"):
        names = [found["metadata"]["name"] for found in cluster.get(kind).get("items", [])]
        assert not [name for name in names if "outrider" in name and name != "v1alpha1.outrider.dev"]
    conversion = cluster.get("crd", "speculativemodels.outrider.dev")["spec"].get("conversion", {})
    assert conversion.get("strategy", "None") == "None"


class TestApiServerAway:
    @pytest.mark.parametrize("fault", ["refuse", "hang"])
    def test_what_serves_is_left_alone_and_what_was_asked_meanwhile_is_done(
        self, faulty: Faulty, serving: str, idle: str, fault: str
    ) -> None:
        before, restarts = faulty.uids(serving), faulty.restarts(serving)
        small = {key: uid for key, uid in faulty.uids(idle).items() if "Deployment" not in key}
        exits = len(faulty.exits)
        began = time.monotonic()
        getattr(faulty.through, fault)()
        try:
            faulty.patch(idle, {"model": {"servedName": "asked-meanwhile"}, "proposer": {"method": "none"}})
            faulty.eventually(lambda: time.monotonic() - began > AWAY_SECONDS, AWAY_SECONDS + 5)
        finally:
            faulty.through.heal()

        def done() -> bool:
            status = faulty.get("specm", idle)["status"]
            return bool(status["observedGeneration"] == 2 and status["proposer"] == "none")

        healed = time.monotonic()
        faulty.eventually(done, 40, idle)
        took = time.monotonic() - healed
        print(f"\n{fault}: away for {healed - began:.0f} s, all done {took:.1f} s after it was back")
        assert faulty.exits[exits:], "it holds no Lease while the API server is away"
        assert set(faulty.exits[exits:]) == {1}
        faulty.eventually(lambda: faulty.reason(idle) == "ScaledToZero", 20, idle)
        assert {key: uid for key, uid in faulty.uids(idle).items() if "Deployment" not in key} == small
        faulty.eventually(lambda: faulty.reason(serving) == "Serving", 20, serving)
        assert (faulty.uids(serving), faulty.restarts(serving)) == (before, restarts)


class TestAutoscalerUp:
    """Metrics there are none: minReplicas and maxReplicas alone move it, and the operator lets them."""

    def test_it_moves_the_replicas(self, faulty: Faulty, serving: str) -> None:
        faulty.eventually(lambda: faulty.replicas(AUTOSCALED) == (2, 2), 40, AUTOSCALED)
        faulty.apply(_autoscaled(1, 1)[1])  # it looks every 15 s: what it does is seen later


class TestSilentWatch:
    @pytest.mark.parametrize("resource", ["speculativemodels", "deployments"])
    def test_a_change_is_noticed_at_the_next_resync(self, faulty: Faulty, idle: str, resource: str) -> None:
        time.sleep(1)  # what the resource caused so far has been heard
        faulty.through.silence(resource)
        try:
            began, dropped = time.monotonic(), faulty.through.dropped[resource]
            if resource == "speculativemodels":
                faulty.patch(idle, {"proposer": {"method": "none"}})
                faulty.eventually(
                    lambda: faulty.get("specm", idle)["status"]["observedGeneration"] == 2, 12, idle
                )
            else:
                before = faulty.deployment(idle)
                faulty.kubectl("delete", "deployment", before["metadata"]["name"])
                faulty.eventually(lambda: faulty.of_model("deployment", idle), 12, idle)
            assert faulty.through.dropped[resource] > dropped
            print(f"\n{resource}: noticed after {time.monotonic() - began:.1f} s")
        finally:
            faulty.through.heal()


class TestDeletion:
    def test_a_child_that_cannot_go_is_named_and_waited_for(self, faulty: Faulty, idle: str) -> None:
        def hold(finalizers: list[str]) -> None:
            patch = json.dumps({"metadata": {"finalizers": finalizers}})
            faulty.kubectl("patch", "service", idle, "--type=merge", f"--patch={patch}")

        hold([HOLD])
        faulty.kubectl("delete", "service", idle, "--wait=false")
        faulty.eventually(lambda: faulty.reason(idle) == "DeletionBlocked", 10, idle)
        message = faulty.condition(idle)["message"]
        assert f"Service {idle} is being deleted and waits for its finalizers: {HOLD}" in message
        faulty.tell("a child whose finalizer hangs", idle)
        time.sleep(1)
        during = [c for c in faulty.calls_during(5) if idle in c.path or idle.encode() in c.body]
        assert [call for call in during if call.is_write] == []
        assert len(during) <= 10, "a look at each progress interval"
        hold([])
        faulty.eventually(lambda: faulty.reason(idle) == "ScaledToZero", 20, idle)
        assert "deletionTimestamp" not in faulty.get("service", idle)["metadata"]

    def test_it_needs_no_operator(self, faulty: Faulty, idle: str) -> None:
        faulty.process.end()
        try:
            faulty.kubectl("delete", "specm", idle, "--timeout=5s")
            eventually(lambda: not faulty.children(idle), 30)
        finally:
            faulty.process.start()

    def test_a_namespace_that_is_terminating(self, faulty: Faulty) -> None:
        """First with the namespace's controller stopped, so that all in it stays; then held by an object."""
        ending = Operated(faulty.cluster, "faults-ending")
        faulty.cluster.kubectl("create", "namespace", ending.namespace)
        held = {
            "apiVersion": "v1",
            "kind": "ConfigMap",
            "metadata": {"name": "held", "finalizers": [HOLD]},
        }
        ending.apply(model("last", replicas=0), held)
        faulty.eventually(lambda: ending.condition("last").get("reason") == "ScaledToZero", 20)
        try:
            with stopped_controllers(faulty.cluster):
                faulty.cluster.kubectl("delete", "namespace", ending.namespace, "--wait=false")
                ending.kubectl("delete", "service", "last")
                faulty.eventually(
                    lambda: ending.condition("last").get("reason") == "NamespaceTerminating", 10
                )
                faulty.tell("a namespace that is terminating", "last", ending.namespace)
                time.sleep(1)
                during = [c for c in faulty.calls_during(4) if c.namespace == ending.namespace]
                assert len([c for c in during if c.is_write]) <= 3, during
                assert len(ending.events("last")) <= 3
            eventually(lambda: not ending.get("specm", "last"), 30)
            during = [c for c in faulty.calls_during(2) if c.namespace == ending.namespace]
            assert during == []
        finally:
            ending.kubectl(
                "patch", "configmap", "held", "--type=merge", '--patch={"metadata":{"finalizers":[]}}'
            )
        eventually(lambda: not faulty.cluster.get("namespace", ending.namespace), 30)


@contextmanager
def stopped_controllers(cluster: LocalCluster) -> Iterator[None]:
    """The node's kube-controller-manager, stopped for a while."""
    pid = cluster.inside("pgrep", "-f", "kube-controller-manage[r] ").split()[0]
    cluster.inside("kill", "-STOP", pid)
    try:
        yield
    finally:
        cluster.inside("kill", "-CONT", pid)


class TestPods:
    def test_an_image_that_cannot_be_pulled(self, faulty: Faulty, serving: str) -> None:
        before = faulty.deployment(serving)["metadata"]["name"]
        faulty.patch(serving, {"engine": {"image": NO_IMAGE}})
        faulty.eventually(lambda: faulty.reason(serving) in ("ErrImagePull", "ImagePullBackOff"), 60, serving)
        found = faulty.condition(serving)
        assert NO_IMAGE in found["message"]
        assert faulty.condition(serving, "Available")["status"] == "True"
        faulty.tell("an image that cannot be pulled", serving)
        faulty.patch(serving, {"engine": {"image": None}})
        faulty.eventually(lambda: faulty.reason(serving) == "Serving", 60, serving)
        assert faulty.deployment(serving)["metadata"]["name"] == before

    def test_a_quota(self, faulty: Faulty) -> None:
        hard = {"spec": {"hard": {"requests.cpu": "1"}}}
        faulty.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": {"name": "tight"}, **hard})
        try:
            eventually(lambda: faulty.get("resourcequota", "tight").get("status", {}).get("hard"), 20)
            faulty.apply(model("too-big", engine={"resources": {"requests": {"cpu": "2"}}}))
            faulty.eventually(lambda: faulty.reason("too-big") == "FailedCreate", 30, "too-big")
            assert "exceeded quota: tight" in faulty.condition("too-big")["message"]
            faulty.tell("a quota that is exceeded", "too-big")
        finally:
            faulty.kubectl("delete", "resourcequota/tight", "specm/too-big", "--wait=false")

    def test_a_node_that_is_drained(self, faulty: Faulty, serving: str) -> None:
        (pod,) = (p for p in faulty.pods(serving) if "deletionTimestamp" not in p["metadata"])
        try:
            faulty.cluster.kubectl(
                *("drain", NODE, f"--pod-selector=outrider.dev/model={serving}", "--delete-emptydir-data"),
                *("--timeout=60s", "--ignore-daemonsets"),
            )
            faulty.eventually(lambda: faulty.reason(serving) == "Unschedulable", 20, serving)
            assert "unschedulable" in faulty.condition(serving)["message"]
            assert faulty.condition(serving, "Available")["status"] == "False"
            faulty.tell("a node that was drained, and there is no other", serving)
        finally:
            faulty.cluster.kubectl("uncordon", NODE)
        faulty.eventually(lambda: faulty.reason(serving) == "Serving", 120, serving)
        (after,) = [p for p in faulty.pods(serving) if "deletionTimestamp" not in p["metadata"]]
        assert after["metadata"]["uid"] != pod["metadata"]["uid"]
        faulty.tell("all is well", serving)


class TestAutoscalerDown:
    def test_it_moved_them_back_and_is_not_fought(self, faulty: Faulty, serving: str) -> None:
        faulty.eventually(lambda: faulty.replicas(AUTOSCALED) == (1, 1), 40, AUTOSCALED)
        faulty.tell("an autoscaler at work", AUTOSCALED)
        time.sleep(4)  # longer than the resync interval
        assert faulty.replicas(AUTOSCALED) == (1, 1)
