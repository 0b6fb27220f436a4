"""What was seen of one SpeculativeModel and its children, at one moment: the input of every decision."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from typing import Any, Final

from outrider_operator import names
from outrider_serving.settings import PodState

Object = dict[str, Any]

TEMPLATE_HASH_LABEL: Final = "pod-template-hash"
"""On a pod of a Deployment: what its ReplicaSet's name ends with."""

_OVERDUE: Final = timedelta(seconds=60)


@dataclass(frozen=True, slots=True)
class PodReport:
    """What a pod answered on its admin port, or why it did not answer."""

    state: PodState | None = None
    error: str | None = None


@dataclass(frozen=True, slots=True)
class Observation:
    """The world as far as one SpeculativeModel is concerned."""

    resource: Object
    """The SpeculativeModel, as the API has it."""

    now: datetime

    children: Mapping[tuple[str, str], Object] = field(default_factory=dict)
    """Objects by kind and name: all of a child's name, and Deployments with our label."""

    pods: tuple[Object, ...] = ()
    """Pods of those Deployments that are ours, in the order of their names."""

    reports: Mapping[str, PodReport] = field(default_factory=dict)
    """By pod name."""

    warnings: Mapping[str, str] = field(default_factory=dict)
    """The newest warning event of a pod that does not start, by pod name."""

    namesakes: tuple[str, ...] = ()
    """Other SpeculativeModels of the namespace whose model is served under the same name."""

    @property
    def uid(self) -> str:
        """UID of the SpeculativeModel."""
        return str(self.resource["metadata"]["uid"])

    @property
    def generation(self) -> int:
        """Generation of the spec."""
        return int(self.resource["metadata"].get("generation", 0))

    @property
    def status(self) -> Object:
        """The status written last, or an empty one."""
        return dict(self.resource.get("status") or {})

    def deployments(self) -> Iterator[Object]:
        """Deployments that belong to the SpeculativeModel."""
        for (kind, _), child in self.children.items():
            if kind == "Deployment" and self.owns(child):
                yield child

    def owns(self, child: Object) -> bool:
        """Whether an object belongs to this very SpeculativeModel, not to an earlier one of its name."""
        return any(
            reference.get("controller") and reference.get("uid") == self.uid
            for reference in child["metadata"].get("ownerReferences", ())
        )

    def pods_of(self, pod_hash: str) -> tuple[Object, ...]:
        """Pods of one pod hash that are not on their way out."""
        return tuple(pod for pod in self.pods if hash_of_pod(pod) == pod_hash and not is_deleting(pod))


def hash_of_pod(pod: Object) -> str:
    """The pod hash that a pod carries, or nothing."""
    return str(pod["metadata"].get("labels", {}).get(names.POD_HASH_LABEL, ""))


def is_ready(pod: Object) -> bool:
    """Whether the pod's Ready condition holds and it is not on its way out."""
    conditions = pod.get("status", {}).get("conditions", ())
    return not is_deleting(pod) and any(
        condition["type"] == "Ready" and condition["status"] == "True" for condition in conditions
    )


def has_ended(pod: Object) -> bool:
    """Whether the pod ran to its end or was evicted: it stays until it is collected, and never runs again."""
    return pod.get("status", {}).get("phase") in ("Failed", "Succeeded")


def is_deleting(found: Object) -> bool:
    """Whether an object was told to go: it does when its finalizers are done and its grace period is over."""
    return "deletionTimestamp" in found["metadata"]


def is_overdue(pod: Object, now: datetime) -> bool:
    """Whether a pod should have ended well before now: its node is gone, and what it held with it."""
    due = pod["metadata"].get("deletionTimestamp")  # of a pod, the end of its grace period
    return due is not None and datetime.fromisoformat(due) + _OVERDUE < now


def is_pod_of(pod: Object, deployments: Collection[str]) -> bool:
    """Whether a ReplicaSet of one of these Deployments controls the pod; labels alone anyone may carry."""
    metadata = pod["metadata"]
    template_hash = metadata.get("labels", {}).get(TEMPLATE_HASH_LABEL)
    return any(
        reference.get("controller")
        and reference.get("kind") == "ReplicaSet"
        and reference.get("name") in {f"{deployment}-{template_hash}" for deployment in deployments}
        for reference in metadata.get("ownerReferences", ())
    )


def available_replicas(deployment: Object) -> int:
    """Pods of a Deployment that serve."""
    return int(deployment.get("status", {}).get("availableReplicas", 0))


def existing_replicas(deployment: Object) -> int:
    """Pods of a Deployment that are there; those on their way out no longer count."""
    return int(deployment.get("status", {}).get("replicas", 0))


def wanted_replicas(deployment: Object) -> int:
    """Pods that a Deployment is told to run."""
    return int(deployment["spec"].get("replicas", 1))


def is_complete(deployment: Object) -> bool:
    """Whether all that a Deployment is told to run is available and of its newest template."""
    status = deployment.get("status", {})
    wanted = wanted_replicas(deployment)
    return bool(
        status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and status.get("updatedReplicas", 0) >= wanted
        and status.get("replicas", 0) == status.get("updatedReplicas", 0)
        and available_replicas(deployment) >= wanted
    )


def has_taken_over(deployment: Object, replicas: int) -> bool:
    """Whether a Deployment is complete, and told to run all that is wanted: in place it grows bit by bit."""
    return is_complete(deployment) and wanted_replicas(deployment) >= replicas
