"""What a SpeculativeModel becomes: pure functions from its spec to Kubernetes objects."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Final

from outrider_operator import names
from outrider_operator.config import OperatorConfig
from outrider_operator.hashes import arm_hash, pod_hash
from outrider_operator.podtemplate import pod_template
from outrider_operator.spec import SpeculativeModelSpec
from outrider_serving.settings import STABLE, Arm, PodSettings

Object = dict[str, Any]

PROGRESS_DEADLINE_SECONDS: Final = 1800
"""A large model is fetched and loaded within this, or its Deployment says that it does not progress."""


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
            "app.kubernetes.io/name": names.SINGULAR,
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
    )


def children(
    owner: Owner, spec: SpeculativeModelSpec, config: OperatorConfig, generation: int
) -> tuple[Object, ...]:
    """Every child, in the order in which pods need them."""
    return (
        service_account(owner),
        config_map(owner, settings_of(spec, generation)),
        service(owner, spec),
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
            "progressDeadlineSeconds": PROGRESS_DEADLINE_SECONDS,
            "selector": {"matchLabels": {names.MODEL_LABEL: owner.name, names.POD_HASH_LABEL: hashed}},
            "strategy": {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}},
            "template": {
                "metadata": {"labels": pod_labels},
                "spec": pod_template(owner.name, spec, config, image),
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
