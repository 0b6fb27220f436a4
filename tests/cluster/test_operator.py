"""The operator at work on a real cluster, under the rights that its chart gives it.

Most checks need no running model: a SpeculativeModel of no replicas has all its children, and one whose pods
fit no node has pods. One resource, `shared`, serves a tiny model from a volume by the real engine; the real
model is for the end-to-end tests, since every pod of it takes half a minute of both cores.
"""

from __future__ import annotations

import json
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from itertools import groupby

import pytest

from cluster.operated import NAMESPACE, NOWHERE, PACKAGE, SMALL, Object, Operated, eventually, model
from cluster.tinymodel import tiny_model
from cluster_fixture import LocalCluster
from conftest import LONG
from outrider_local import release

TEMPLATE = "{{ messages }} für \U0001f99c"


@pytest.fixture(scope="module")
def operated(cluster: LocalCluster) -> Iterator[Operated]:
    """The chart installed, and a namespace that admits only pods of the restricted standard."""
    release.install(cluster.settings, cluster, cluster.images)
    labels = {
        "pod-security.kubernetes.io/enforce": "restricted",
        "pod-security.kubernetes.io/warn": "restricted",
    }
    namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    cluster.kubectl("apply", "-f", "-", stdin=json.dumps(namespace))
    yield Operated(cluster)
    # A namespace with pods is looked at again only after half of their grace period.
    cluster.kubectl("delete", "specm", "--all", f"--namespace={NAMESPACE}")
    cluster.kubectl("delete", "namespace", NAMESPACE, "--wait=false")


@pytest.fixture(scope="module")
def idle(operated: Operated) -> str:
    """A SpeculativeModel with all children and no pods."""
    operated.apply(model("idle", model={**PACKAGE, "chatTemplate": TEMPLATE}, replicas=0))
    operated.await_reason("idle", "ScaledToZero")
    return "idle"


@pytest.fixture(scope="module")
def shared(operated: Operated) -> str:
    """A SpeculativeModel that serves a tiny model from a volume."""
    operated.apply(tiny_model(operated, "shared"))
    operated.await_ready("shared")
    return "shared"


class TestChildren:
    def test_each_belongs_to_the_resource_and_says_so(self, operated: Operated, idle: str) -> None:
        children = operated.children(idle)
        uid = operated.get("specm", idle)["metadata"]["uid"]
        assert sorted(key.partition("/")[0] for key in children) == [
            "ConfigMap",
            "Deployment",
            "NetworkPolicy",
            "PodDisruptionBudget",
            "Service",
            "ServiceAccount",
        ]
        for child in children.values():
            (owner,) = child["metadata"]["ownerReferences"]
            assert (owner["uid"], owner["controller"]) == (uid, True)
            assert child["metadata"]["labels"]["app.kubernetes.io/managed-by"] == "outrider-operator"

    def test_text_of_any_script_reaches_them(self, operated: Operated, idle: str) -> None:
        (container,) = operated.deployment(idle)["spec"]["template"]["spec"]["containers"]
        assert {"name": "OUTRIDER_CHAT_TEMPLATE", "value": TEMPLATE} in container["env"]

    def test_the_resource_carries_no_finalizer_or_annotation_of_ours(
        self, operated: Operated, idle: str
    ) -> None:
        metadata = operated.get("specm", idle)["metadata"]
        assert "finalizers" not in metadata
        assert set(metadata["annotations"]) == {"kubectl.kubernetes.io/last-applied-configuration"}
        managers = {entry["manager"] for entry in metadata.get("managedFields", ())}
        assert not [manager for manager in managers if "kopf" in manager]

    @pytest.mark.parametrize(
        "kind",
        ["Service", "ConfigMap", "ServiceAccount", "Deployment", "NetworkPolicy", "PodDisruptionBudget"],
    )
    def test_one_that_is_deleted_comes_back(self, operated: Operated, idle: str, kind: str) -> None:
        before = {key: child for key, child in operated.children(idle).items() if key.startswith(kind + "/")}
        ((key, child),) = before.items()
        operated.kubectl("delete", key)

        def back() -> bool:
            found = operated.children(idle).get(key)
            return found is not None and found["metadata"]["uid"] != child["metadata"]["uid"]

        eventually(back, 35)

    @pytest.mark.parametrize(
        ("kind", "patch"),
        [
            ("service", {"spec": {"selector": {"outrider.dev/model": "else"}}}),
            ("service", {"spec": {"ports": [{"name": "more", "port": 9, "targetPort": 9}]}}),
            ("configmap", {"data": {"settings.json": "{}"}}),
            ("serviceaccount", {"automountServiceAccountToken": True}),
            ("networkpolicy", {"spec": {"ingress": [{}]}}),
            ("poddisruptionbudget", {"spec": {"maxUnavailable": 0}}),
            (
                "deployment",
                {"spec": {"replicas": 1, "template": {"spec": {"nodeSelector": {"no": "where"}}}}},
            ),
            (
                "deployment",
                {"spec": {"template": {"spec": {"containers": [{"name": "foreign", "image": "x"}]}}}},
            ),
            (
                "deployment",
                {
                    "spec": {
                        "template": {
                            "spec": {
                                "containers": [{"name": "engine", "env": [{"name": "FOREIGN", "value": "x"}]}]
                            }
                        }
                    }
                },
            ),
            (
                "deployment",
                {"spec": {"template": {"spec": {"volumes": [{"name": "foreign", "emptyDir": {}}]}}}},
            ),
        ],
        ids=lambda value: value if isinstance(value, str) else None,
    )
    def test_one_that_is_changed_is_brought_back(
        self, operated: Operated, idle: str, kind: str, patch: Object
    ) -> None:
        def content(found: Object) -> Object:
            spec = {key: found.get(key) for key in ("spec", "data", "automountServiceAccountToken")}
            text = json.dumps(spec).replace('\\"generation\\": ', "")
            return {"text": text.translate({ord(digit): None for digit in "0123456789"})}

        name = operated.deployment(idle)["metadata"]["name"] if kind == "deployment" else idle
        before = operated.get(kind, name)
        operated.kubectl("patch", kind, name, "--type=strategic", f"--patch={json.dumps(patch)}")
        eventually(lambda: content(operated.get(kind, name)) == content(before), 35)

    def test_an_object_that_is_not_ours_is_left_alone(self, operated: Operated) -> None:
        theirs = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "taken"},
            "spec": {"ports": [{"port": 1}], "selector": {"app": "theirs"}},
        }
        operated.apply(theirs)
        before = operated.get("service", "taken")
        operated.apply(model("taken", replicas=0))
        found = operated.await_reason("taken", "NameConflict")
        assert "Service taken exists and does not belong to this SpeculativeModel" in found["message"]
        assert operated.condition("taken", "NameConflict")["status"] == "True"
        waiting = operated.get("specm", "taken")
        time.sleep(6)  # two passes at the quick interval
        assert operated.get("service", "taken") == before
        assert operated.get("specm", "taken") == waiting
        assert not operated.children("taken")
        operated.kubectl("delete", "service", "taken")
        operated.await_reason("taken", "ScaledToZero")
        assert operated.condition("taken", "NameConflict") == {}
        assert len(operated.children("taken")) == 6
        operated.kubectl("delete", "specm", "taken")


class TestScale:
    def test_kubectl_scale_lasts_and_the_scale_subresource_tells_pods(self, operated: Operated) -> None:
        operated.apply(model("parked", engine=NOWHERE))
        found = operated.await_reason("parked", "Unschedulable")
        assert "node affinity/selector" in found["message"]
        operated.kubectl("scale", "specm/parked", "--replicas=2")
        eventually(lambda: len(operated.pods("parked")) == 2, 30)
        scale = json.loads(operated.kubectl("get", "specm/parked", "--subresource=scale", "-ojson"))
        assert scale["spec"]["replicas"] == 2
        assert scale["status"]["selector"] == "outrider.dev/model=parked"
        eventually(lambda: operated.get("specm", "parked")["status"]["replicas"] == 2, 10)
        time.sleep(6)
        assert operated.deployment("parked")["spec"]["replicas"] == 2
        operated.kubectl("scale", "specm/parked", "--replicas=0")
        operated.await_reason("parked", "ScaledToZero")
        operated.kubectl("delete", "specm", "parked")

    def test_to_zero_ready_goes_straight(self, operated: Operated) -> None:
        operated.apply(tiny_model(operated, "lull", "weights-of-lull"))
        operated.await_ready("lull")
        path = 'jsonpath={.status.conditions[?(@.type=="Ready")].reason}{"\\n"}'
        watch = subprocess.Popen(
            [
                operated.cluster.programs.path("kubectl"),
                *("get", "specm", "lull", f"--namespace={operated.namespace}", "--watch", f"--output={path}"),
            ],
            env=operated.cluster.environment,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert watch.stdout
        try:
            assert watch.stdout.readline().strip() == "Serving"
            operated.kubectl("scale", "specm/lull", "--replicas=0")
            operated.await_reason("lull", "ScaledToZero", kind="Progressing")
            operated.await_reason("lull", "ScaledToZero", kind="Available")
        finally:
            watch.terminate()
            told, _ = watch.communicate(timeout=10)
        reasons = [reason for reason, _ in groupby(told.split())]
        assert reasons in (["Serving", "ScaledToZero"], ["ScaledToZero"])
        told_once = [e["reason"] for e in operated.events("lull") if e["reason"] in ("Ready", "NotReady")]
        assert sorted(told_once) == ["NotReady", "Ready"]
        operated.kubectl("delete", "specm", "lull")


TROUBLED = {
    "unknown": {"model": {"source": {"package": "no_such_package"}}},
    "no-image": {"engine": {"image": "localhost/nowhere:1", "imagePullPolicy": "Never", "resources": SMALL}},
    "no-token": {"model": {"source": {"hub": {"id": "org/name", "tokenSecretRef": {"name": "absent"}}}}},
    "no-keys": {"api": {"keysSecretRef": {"name": "absent-keys"}}},
    "no-claim": {
        "model": {"source": {"path": "/models/x"}},
        "engine": {
            "volumes": [
                {"name": "w", "mountPath": "/models", "persistentVolumeClaim": {"claimName": "absent-claim"}}
            ]
        },
    },
}


@pytest.fixture(scope="module")
def troubled(operated: Operated) -> Iterator[Operated]:
    """Several SpeculativeModels that cannot serve, all at once."""
    operated.apply(
        *(model(name, **{"engine": {"resources": SMALL}, **spec}) for name, spec in TROUBLED.items())
    )
    yield operated
    operated.kubectl("delete", "specm", *TROUBLED, "--ignore-not-found", "--timeout=30s")


class TestTrouble:
    @pytest.mark.parametrize(
        ("name", "reason", "message"),
        [
            ("no-image", "ErrImageNeverPull", "localhost/nowhere:1"),
            ("no-token", "CreateContainerConfigError", 'secret "absent" not found'),
            ("no-keys", "PodNotStarting", 'secret "absent-keys" not found'),
            ("no-claim", "Unschedulable", 'persistentvolumeclaim "absent-claim" not found'),
            ("unknown", "CrashLoopBackOff", "the model is named by spec.model.source.package"),
        ],
    )
    def test_ready_carries_the_cause(self, troubled: Operated, name: str, reason: str, message: str) -> None:
        found = troubled.await_reason(name, reason, 120)
        assert found["status"] == "False"
        assert message in found["message"]
        assert troubled.condition(name, "Available")["status"] == "False"

    def test_it_heals_when_what_was_missing_is_there(self, troubled: Operated) -> None:
        keys = {
            "apiVersion": "v1",
            "kind": "Secret",
            "metadata": {"name": "absent-keys"},
            "stringData": {"a": "k1"},
        }
        assert "spec.api.keysSecretRef" in troubled.condition("no-keys")["message"]
        troubled.apply(keys)
        troubled.await_reason("no-keys", "PodsStarting", 150)  # the kubelet tries again when it sees fit
        troubled.kubectl("delete", "specm", "no-keys", "--wait=false")  # not to load a real model here

    def test_a_quota_on_pods(self, operated: Operated) -> None:
        with quota(operated, {"requests.cpu": "1"}):
            operated.apply(model("too-big", engine={"resources": {"requests": {"cpu": "2"}}}))
            found = operated.await_reason("too-big", "FailedCreate")
            assert "exceeded quota: tight" in found["message"]
        operated.kubectl("delete", "specm", "too-big", "--wait=false")

    def test_a_quota_on_children(self, operated: Operated) -> None:
        with quota(operated, {"count/services": "0"}):
            operated.apply(model("no-service", replicas=0))
            found = operated.await_reason("no-service", "ApplyFailed")
            assert "Service no-service" in found["message"]
            assert "exceeded quota: tight" in found["message"]
            assert len(operated.children("no-service")) == 5  # what could be made was made
        operated.await_reason("no-service", "ScaledToZero")
        operated.kubectl("delete", "specm", "no-service")


@contextmanager
def quota(operated: Operated, hard: Object) -> Iterator[None]:
    """A quota that holds for a while."""
    name = {"name": "tight"}
    operated.apply({"apiVersion": "v1", "kind": "ResourceQuota", "metadata": name, "spec": {"hard": hard}})
    eventually(lambda: operated.get("resourcequota", "tight").get("status", {}).get("hard"), 20)
    try:
        yield
    finally:
        operated.kubectl("delete", "resourcequota", "tight")


class TestServing:
    def test_it_is_ready_and_says_what_it_serves(self, operated: Operated, shared: str) -> None:
        status = operated.get("specm", shared)["status"]
        assert status["model"]["name"] == "tiny"
        assert status["model"]["revision"].startswith("sha256:")
        assert status["model"]["dtype"] == "float32"
        assert status["model"]["contextLength"] == 256
        assert status["settings"]["reportedGeneration"] == status["settings"]["generation"]
        conditions = {c["type"]: c["status"] for c in status["conditions"]}
        assert conditions == {"Ready": "True", "Available": "True", "Progressing": "False"}
        header, row = operated.kubectl("get", "specm", shared).splitlines()
        assert header.split() == [
            *("NAME", "READY", "REASON", "PROPOSER", "ACCEPTED", "ATTAINMENT", "ROLLOUT", "AGE")
        ]
        assert row.split()[:4] == [shared, "True", "Serving", "ngram"]

    def test_a_pods_readiness_is_told_within_seconds(self, operated: Operated, shared: str) -> None:
        (pod,) = operated.pods(shared)
        (ready,) = (c for c in pod["status"]["conditions"] if c["type"] == "Ready")
        told = datetime.fromisoformat(operated.condition(shared)["lastTransitionTime"])
        took = (told - datetime.fromisoformat(ready["lastTransitionTime"])).total_seconds()
        assert 0 <= took <= 5

    def test_nothing_moves_while_nothing_happens(self, operated: Operated, shared: str) -> None:
        def versions() -> dict[str, str]:
            watched = [
                operated.get("specm", shared),
                *operated.children(shared).values(),
                *operated.pods(shared),
            ]
            return {f"{o['kind']}/{o['metadata']['name']}": o["metadata"]["resourceVersion"] for o in watched}

        before, told = versions(), len(operated.events(shared))
        time.sleep(180 if LONG else 40)  # longer than the resync interval
        assert versions() == before
        assert len(operated.events(shared)) == told

    def test_a_proposer_reaches_the_running_pod(self, operated: Operated, shared: str) -> None:
        (before,) = operated.pods(shared)
        generation = operated.get("specm", shared)["status"]["settings"]["generation"]
        patch = {"spec": {"proposer": {"method": "none"}}}  # the settings of ngram wait for it
        operated.kubectl("patch", "specm", shared, "--type=merge", f"--patch={json.dumps(patch)}")

        def reported() -> bool:
            status = operated.get("specm", shared)["status"]
            return bool(status["settings"].get("reportedGeneration") == generation + 1)

        eventually(reported, 120, lambda: operated.kubectl("describe", "specm", shared))
        resource = operated.await_ready(shared, 10)
        assert resource["spec"]["proposer"]["ngram"]["maxMatch"] == 3
        assert resource["status"]["proposer"] == "none"
        assert resource["status"]["observedGeneration"] == resource["metadata"]["generation"]
        (after,) = operated.pods(shared)
        assert after["metadata"]["uid"] == before["metadata"]["uid"]
        assert after["status"]["containerStatuses"][0]["restartCount"] == 0
        pod = f"/api/v1/namespaces/{NAMESPACE}/pods/{after['metadata']['name']}:9464/proxy/admin/state"
        state = json.loads(operated.cluster.kubectl("get", "--raw", pod))
        assert state["generation"] == generation + 1

    def test_another_engine_stands_beside_the_old_one_until_it_serves(
        self, operated: Operated, shared: str
    ) -> None:
        (old,) = operated.pods(shared)
        patch = {"spec": {"model": {"servedName": "tiny-again"}}}
        operated.kubectl("patch", "specm", shared, "--type=merge", f"--patch={json.dumps(patch)}")
        both = eventually(lambda: found if len(found := operated.pods(shared)) == 2 else None, 30)
        deployments = {pod["metadata"]["labels"]["outrider.dev/pod-hash"] for pod in both}
        assert len(deployments) == 2
        assert operated.condition(shared, "Available")["status"] == "True"
        assert operated.condition(shared)["reason"] in ("PodsStarting", "Reconciling")
        resource = operated.await_ready(shared)
        assert resource["status"]["model"]["name"] == "tiny-again"
        assert resource["status"]["proposer"] == "none"
        assert operated.deployment(shared)["status"]["availableReplicas"] == 1
        assert old["metadata"]["uid"] not in {
            pod["metadata"]["uid"]
            for pod in operated.pods(shared)
            if "deletionTimestamp" not in pod["metadata"]
        }


class TestLater:
    def test_a_crash_loop_is_told_once(self, troubled: Operated) -> None:
        troubled.await_reason("unknown", "CrashLoopBackOff", 120)

        def restarted() -> bool:
            (pod,) = troubled.pods("unknown")
            return bool(pod["status"]["containerStatuses"][0]["restartCount"] >= 2)

        eventually(restarted, 90)
        assert troubled.condition("unknown")["reason"] == "CrashLoopBackOff"
        warnings = [event["reason"] for event in troubled.events("unknown") if event["type"] == "Warning"]
        assert warnings.count("CrashLoopBackOff") == 1
        assert len(warnings) <= 2  # the first exit, and the loop

    def test_what_happens_again_is_counted_on_the_event_that_is_there(
        self, operated: Operated, idle: str
    ) -> None:
        def told() -> Object:
            (event,) = (
                e for e in operated.events(idle) if e["message"].startswith(f"created Service {idle}:")
            )
            return event

        told_at = datetime.fromisoformat(told()["lastTimestamp"])
        time.sleep(max(0.0, 61 - (datetime.now(UTC) - told_at).total_seconds()))  # seldom is once a minute
        operated.kubectl("delete", "service", idle)
        eventually(lambda: told()["count"] == 2, 20)
        assert datetime.fromisoformat(told()["lastTimestamp"]) > told_at

    def test_the_operator_logged_no_error(self, operated: Operated) -> None:
        log = [json.loads(line) for line in operated.operator_log().splitlines() if line.startswith("{")]
        assert log
        assert [entry for entry in log if entry.get("severity") in ("error", "critical")] == []
        assert "/healthz" not in str(log)
        assert f"system:serviceaccount:{release.NAMESPACE}" not in str(log)  # it lacked no right


class TestDeletion:
    def test_all_goes_with_the_resource(self, operated: Operated, idle: str) -> None:
        assert operated.children(idle)
        operated.kubectl("delete", "specm", idle, "--timeout=5s")
        eventually(lambda: not operated.children(idle), 30)

    def test_foreground_deletion_is_not_fought(self, operated: Operated) -> None:
        operated.apply(model("short", replicas=0))
        operated.await_reason("short", "ScaledToZero")
        made = uids(operated, "short")
        operated.kubectl("delete", "specm", "short", "--cascade=foreground", "--timeout=30s")

        def gone() -> bool:
            left = uids(operated, "short")
            assert left <= made  # none is made anew
            return not left

        eventually(gone, 30)
        time.sleep(2)
        assert gone()

    def test_it_needs_no_operator(self, operated: Operated, shared: str) -> None:
        assert operated.pods(shared)
        operated.scale_operator(0)
        try:
            operated.kubectl("delete", "specm", shared, "--timeout=5s")
            eventually(lambda: not operated.children(shared) and not operated.pods(shared), 90)
        finally:
            operated.scale_operator(1)

    def test_a_resource_of_the_same_name_starts_anew(self, operated: Operated) -> None:
        operated.apply(model("again", replicas=0))
        operated.await_reason("again", "ScaledToZero")
        first = operated.children("again")
        operated.kubectl("delete", "specm", "again", "--timeout=5s")
        operated.apply(model("again", replicas=0))
        operated.await_reason("again", "ScaledToZero")
        eventually(lambda: len(operated.children("again")) == 6, 30)
        uids = {child["metadata"]["uid"] for child in first.values()}
        assert not uids & {child["metadata"]["uid"] for child in operated.children("again").values()}


def uids(operated: Operated, name: str) -> set[str]:
    """Of the children that there are now."""
    return {child["metadata"]["uid"] for child in operated.children(name).values()}
