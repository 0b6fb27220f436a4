"""What a SpeculativeModel becomes: pure functions from its spec to Kubernetes objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from outrider_operator import names
from outrider_operator.config import OperatorConfig
from outrider_operator.hashes import arm_hash, pod_hash
from outrider_operator.podtemplate import HTTP_PORT, pod_template
from outrider_operator.spec import Replacement, SpeculativeModelSpec
from outrider_serving.settings import ADMIN_PORT, STABLE, Arm, PodSettings

Object = dict[str, Any]

BEFORE_LOAD_SECONDS: Final = 600
"""For finding a node and pulling the image. A Deployment whose next pod is not available when these and the
time to load are over says that it does not progress."""


_ROLLING: Final = {
    Replacement.SURGE: {"maxSurge": 1, "maxUnavailable": 0},
    Replacement.IN_PLACE: {"maxSurge": 0, "maxUnavailable": 1},
}
"""How a Deployment replaces its own pods, where their template changes but not its hash."""


@dataclass(frozen=True, slots=True)
class Owner:
    """The SpeculativeModel that children belong to."""

    name: str
    namespace: str
    uid: str

    @classmethod
    def of(cls, resource: Object) -> Owner:
        """The owner that a SpeculativeModel as read from the API is."""
        metadata = resource["metadata"]
        return cls(name=metadata["name"], namespace=metadata["namespace"], uid=metadata["uid"])

    @property
    def reference(self) -> Object:
        """The owner reference: deleting the SpeculativeModel removes all that carries it."""
        return {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "name": self.name,
            "uid": self.uid,
            "controller": True,
        }

    @property
    def labels(self) -> dict[str, str]:
        """Labels of every child."""
        return {
            names.NAME_LABEL: names.SINGULAR,
            "app.kubernetes.io/instance": self.name,
            "app.kubernetes.io/component": "serving",
            "app.kubernetes.io/part-of": "outrider",
            "app.kubernetes.io/managed-by": names.FIELD_MANAGER,
            names.MODEL_LABEL: self.name,
        }


def serving_image(spec: SpeculativeModelSpec, config: OperatorConfig) -> str:
    """The image of the pods: the user's, or else the operator's."""
    return spec.engine.image or config.serving_image


def settings_of(spec: SpeculativeModelSpec, generation: int) -> PodSettings:
    """The content of the settings file for a spec: one stable arm, which is in force."""
    return PodSettings(
        generation=generation,
        arms={STABLE: Arm(proposer=spec.proposer)},
        in_force=STABLE,
        workloads=spec.workloads or [],
        objective=spec.objective,
        requests=spec.requests,
    )


def children(
    owner: Owner, spec: SpeculativeModelSpec, config: OperatorConfig, generation: int
) -> tuple[Object, ...]:
    """Every child, in the order in which pods need them; generation is that of the settings."""
    policies = (network_policy(owner, config),) if config.network_policies else ()
    return (
        service_account(owner),
        config_map(owner, settings_of(spec, generation)),
        *policies,
        service(owner, spec),
        disruption_budget(owner),
        deployment(owner, spec, config),
    )


def service_account(owner: Owner) -> Object:
    """An identity without permissions, so that pods do not share the namespace's default one."""
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": _metadata(owner, owner.name),
        "automountServiceAccountToken": False,
    }


def config_map(owner: Owner, settings: PodSettings) -> Object:
    """The settings file of the pods."""
    text = settings.model_dump_json(by_alias=True, exclude_none=True, indent=2)
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": _metadata(owner, owner.name),
        "data": {names.SETTINGS_FILE: text + "\n"},
    }


def network_policy(owner: Owner, config: OperatorConfig) -> Object:
    """Who may reach the pods: everyone the API, only the operator and what scrapes metrics the admin port.

    A rule without peers lets everyone in, so the admin port's must always have one; the API's is written as
    empty, so that peers that someone adds to it are seen as a difference.
    """
    operator = {
        "namespaceSelector": {"matchLabels": {names.NAMESPACE_LABEL: config.pod_namespace}},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.OPERATOR_NAME}},
    }
    peers: list[Object] = [operator]
    if config.monitoring_namespaces:  # In, of no values, would be refused
        namespaces = {
            "key": names.NAMESPACE_LABEL,
            "operator": "In",
            "values": list(config.monitoring_namespaces),
        }
        peers.append({"namespaceSelector": {"matchExpressions": [namespaces]}})
    return {
        "apiVersion": "networking.k8s.io/v1",
        "kind": "NetworkPolicy",
        "metadata": _metadata(owner, owner.name),
        "spec": {
            "podSelector": {"matchLabels": {names.MODEL_LABEL: owner.name}},
            "policyTypes": ["Ingress"],
            "ingress": [
                {"from": [], "ports": [{"port": HTTP_PORT, "protocol": "TCP"}]},
                {"from": peers, "ports": [{"port": ADMIN_PORT, "protocol": "TCP"}]},
            ],
        },
    }


def service(owner: Owner, spec: SpeculativeModelSpec) -> Object:
    """The address of the model; it selects by model only, so every Deployment of it serves."""
    port = {
        "name": names.HTTP_PORT_NAME,
        "port": spec.api.port,
        "protocol": "TCP",
        "targetPort": names.HTTP_PORT_NAME,
    }
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": _metadata(owner, owner.name),
        "spec": {"type": "ClusterIP", "selector": {names.MODEL_LABEL: owner.name}, "ports": [port]},
    }


def disruption_budget(owner: Owner) -> Object:
    """How many pods a drain may take at once: one, of all that serve the model.

    Not "at least one must stay", which would let a single replica block the drain of its node for ever; and
    pods that are not healthy may always be evicted, else a crash loop would block it as well.
    """
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": _metadata(owner, owner.name),
        "spec": {
            "maxUnavailable": 1,
            "selector": {"matchLabels": {names.MODEL_LABEL: owner.name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def deployment(owner: Owner, spec: SpeculativeModelSpec, config: OperatorConfig) -> Object:
    """The pods of one pod hash; its arm hash and role label the object, never the pods."""
    image = serving_image(spec, config)
    hashed = pod_hash(spec, image)
    own = {names.ARM_HASH_LABEL: arm_hash(spec, image), names.ROLE_LABEL: STABLE}
    pod_labels = owner.labels | {names.POD_HASH_LABEL: hashed}
    metadata = _metadata(owner, names.deployment_name(owner.name, hashed))
    return {
        "apiVersion": "apps/v1",
        "kind": "Deployment",
        "metadata": metadata | {"labels": pod_labels | own},
        "spec": {
            "replicas": spec.replicas,
            "revisionHistoryLimit": 2,
            "progressDeadlineSeconds": spec.start_seconds + BEFORE_LOAD_SECONDS,
            "selector": {"matchLabels": {names.MODEL_LABEL: owner.name, names.POD_HASH_LABEL: hashed}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": _ROLLING[spec.replacement]},
            "template": {
                "metadata": {"labels": pod_labels},
                "spec": pod_template(owner.namespace, owner.name, spec, config, image),
            },
        },
    }


def _metadata(owner: Owner, name: str) -> Object:
    return {
        "name": name,
        "namespace": owner.namespace,
        "labels": owner.labels,
        "ownerReferences": [owner.reference],
    }
