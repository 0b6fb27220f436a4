"""What the tests of the pure parts look at and what follows from it: a line to ask for each."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime
from typing import Any

from outrider_operator.children import Owner, children, serving_image
from outrider_operator.config import OperatorConfig
from outrider_operator.hashes import pod_hash
from outrider_operator.observation import Observation, PodReport
from outrider_operator.plan import Plan, decide, intent
from outrider_operator.spec import SpeculativeModelSpec
from outrider_operator.status import next_look, next_status
from outrider_serving.settings import ModelState, PodState

Object = dict[str, Any]

CONFIG = OperatorConfig(serving_image="example/serving:1")
NOW = datetime(2030, 1, 2, 3, 4, 5, tzinfo=UTC)
OWNER = Owner(name="m", namespace="ns", uid="uid-1")

MINIMAL: Object = {"model": {"source": {"package": "weights"}}}

FULL: Object = {
    "model": {
        "source": {"hub": {"id": "org/name", "tokenSecretRef": {"name": "hub", "key": "t"}}},
        "revision": "v1.2",
        "dtype": "bfloat16",
        "contextLength": 2048,
        "servedName": "org/name:tuned",
        "chatTemplate": "{{ messages }} costs $(HOME) $5",
    },
    "engine": {
        "image": "example/own:2",
        "imagePullPolicy": "Always",
        "imagePullSecrets": [{"name": "pull"}],
        "resources": {"limits": {"nvidia.com/gpu": 1, "memory": "8Gi"}, "requests": {"cpu": "500m"}},
        "nodeSelector": {"gpu": "yes"},
        "tolerations": [{"key": "gpu", "operator": "Exists", "effect": "NoSchedule"}],
        "runtimeClassName": "nvidia",
        "env": [
            {"name": "HF_HOME", "value": "/models/cache"},
            {"name": "EMPTY"},
            {"name": "FROM_SECRET", "valueFrom": {"secretKeyRef": {"name": "s", "key": "k"}}},
            {
                "name": "FROM_MAP",
                "valueFrom": {"configMapKeyRef": {"name": "c", "key": "k", "optional": True}},
            },
        ],
        "volumes": [
            {
                "name": "a",
                "mountPath": "/models",
                "readOnly": False,
                "persistentVolumeClaim": {"claimName": "p"},
            },
            {"name": "b", "mountPath": "/more", "persistentVolumeClaim": {"claimName": "q"}},
        ],
    },
    "replicas": 3,
    "replacement": "inPlace",
    "proposer": {"method": "ngram", "minDepth": 2, "maxDepth": 5, "ngram": {"minMatch": 2, "maxMatch": 3}},
    "workloads": [
        {"name": "chat", "objective": {"ttftMilliseconds": 500, "tpotMilliseconds": 40}},
        {"name": "batch"},
    ],
    "objective": {"ttftMilliseconds": 900, "tpotMilliseconds": 60, "maxGapMilliseconds": 800},
    "api": {"port": 80, "keysSecretRef": {"name": "tenants"}},
}

SIZES: Object = {
    "maxRunning": 48,
    "maxWaiting": 500,
    "stepTokens": 1024,
    "memoryShare": 0.85,
    "proposerMemory": "1.5Gi",
}
"""Fields of spec.engine that say how much it does at once."""

TUNED: Object = MINIMAL | {
    "engine": SIZES,
    "requests": {"timeoutSeconds": 90, "speculationOverride": False},
}

SHARED: Object = MINIMAL | {
    "proposer": {"method": "suffix"},
    "sharedCache": {
        "url": "rediss-sentinel://redis-0.redis:26379,redis-1.redis:26379/house/2",
        "authSecretRef": {"name": "redis"},
        "caSecretRef": {"name": "redis-tls", "key": "root.pem"},
        "tenantMode": "header",
        "trustedGateways": ["10.1.0.0/16", "fd00::/64"],
        "keyPrefix": "teams:",
        "retention": {"seconds": 86400, "size": "1.5Mi"},
        "warmSeconds": 20,
    },
}

REDIS: Object = MINIMAL | {"sharedCache": {"url": "redis://redis:6379", "tenantMode": "single"}}
"""No more than is needed to share."""


def changed(spec: Object, path: str, value: object) -> Object:
    """A copy of a spec with one field set, by its dotted path."""
    result = copy.deepcopy(spec)
    node = result
    *parents, last = path.split(".")
    for key in parents:
        node = node.setdefault(key, {})
    node[last] = value
    return result


def resource(spec: Object | None = None, *, generation: int = 1, status: Object | None = None) -> Object:
    """A SpeculativeModel as the API server returns it."""
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {
            "name": "m",
            "namespace": "ns",
            "uid": "uid-1",
            "generation": generation,
            "resourceVersion": "1",
        },
        "spec": MINIMAL if spec is None else spec,
        "status": status or {},
    }


def hash_of(spec: Object | None = None) -> str:
    """The pod hash of a spec."""
    parsed = SpeculativeModelSpec.model_validate(spec or MINIMAL)
    return pod_hash(parsed, serving_image(parsed, CONFIG))


def live_children(
    spec: Object | None = None, *, generation: int = 1, available: int | None = None
) -> dict[tuple[str, str], Object]:
    """The children as they are once applied; available is the Deployment's count of serving pods."""
    parsed = SpeculativeModelSpec.model_validate(spec or MINIMAL)
    found = {}
    for child in children(OWNER, parsed, CONFIG, generation):
        live = copy.deepcopy(child)
        live["metadata"] |= {"uid": f"uid-of-{child['kind']}", "resourceVersion": "7", "generation": 1}
        if child["kind"] == "Deployment":
            count = parsed.replicas if available is None else available
            live["status"] = {
                "observedGeneration": 1,
                "replicas": parsed.replicas,
                "updatedReplicas": parsed.replicas,
                "readyReplicas": count,
                "availableReplicas": count,
            }
        found[child["kind"], child["metadata"]["name"]] = live
    return found


def plan(seen: Observation, config: OperatorConfig = CONFIG) -> Plan:
    """What is decided on what was seen."""
    return decide(intent(seen.resource, config), seen)


def pod(name: str = "p1", *, spec: Object | None = None, ready: bool = True, **status: Any) -> Object:
    """A pod of a spec's pod hash."""
    return {
        "metadata": {"name": name, "uid": f"uid-{name}", "labels": {"outrider.dev/pod-hash": hash_of(spec)}},
        "status": {
            "phase": "Running",
            "podIP": "10.0.0.1",
            "conditions": [
                {"type": "PodScheduled", "status": "True"},
                {"type": "Ready", "status": "True" if ready else "False"},
            ],
            **status,
        },
    }


def crashed(*, state: Object, restarts: int = 0, last: Object | None = None) -> list[Object]:
    """Container statuses of a pod in trouble."""
    return [
        {
            "name": "engine",
            "image": "example/serving:1",
            "restartCount": restarts,
            "state": state,
            "lastState": last or {},
        }
    ]


def report(generation: int = 1, **more: Any) -> PodReport:
    """What a healthy pod says."""
    model = ModelState(name="m", revision="sha256:1", dtype="float32", context_length=2048)
    return PodReport(
        state=PodState(ready=True, generation=generation, in_force="stable", **({"model": model} | more))
    )


def serving(
    spec: Object | None = None, *, status: Object | None = None, generation: int = 1, reports: int = 1
) -> Observation:
    """A SpeculativeModel all of whose pods serve."""
    parsed = SpeculativeModelSpec.model_validate(spec or MINIMAL)
    pods = tuple(pod(f"p{number}", spec=spec) for number in range(parsed.replicas))
    return Observation(
        resource=resource(spec, generation=generation, status=status),
        now=NOW,
        children=live_children(spec),
        pods=pods,
        reports={one["metadata"]["name"]: report(reports) for one in pods},
    )


def status_of(seen: Observation, errors: tuple[str, ...] = ()) -> Object:
    """The status that is written of what was seen."""
    return next_status(seen, plan(seen), errors)


def condition(status: Object, kind: str) -> Object:
    """The condition of a type, which is there."""
    (found,) = [c for c in status["conditions"] if c["type"] == kind]
    return dict(found)


def is_settled(status: Object) -> bool:
    """Whether it is looked at again as late as can be, though it has only just changed."""
    return next_look(status, NOW, CONFIG) == CONFIG.resync_seconds


def summary(status: Object, kind: str = "Ready") -> tuple[str, str]:
    """Status and reason of a condition."""
    found = condition(status, kind)
    return found["status"], found["reason"]


def with_status(seen: Observation, status: Object) -> Observation:
    """The same sight after this status was written."""
    return replace(seen, resource=seen.resource | {"status": status})


def older(spec: Object, *, available: int) -> dict[tuple[str, str], Object]:
    """The Deployment of another spec."""
    return {k: child for k, child in live_children(spec, available=available).items() if k[0] == "Deployment"}
