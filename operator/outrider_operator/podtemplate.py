"""The pod that serves a model: fits the `restricted` Pod Security Standard, writes only to own volumes."""

from __future__ import annotations

import math
from typing import Any, Final

from outrider_operator import names
from outrider_operator.config import OperatorConfig
from outrider_operator.enginespec import Engine
from outrider_operator.podspec import EnvVar, KeyReference, LocalReference, Toleration, Volume, amount
from outrider_operator.sharedcache import cache_arguments, cache_mounts, cache_volumes
from outrider_operator.spec import Model, SpeculativeModelSpec
from outrider_serving.settings import ADMIN_PORT

Object = dict[str, Any]

HTTP_PORT: Final = 8000
"""Where pods listen; the Service's port is the user's to choose."""

DRAIN_DELAY_SECONDS: Final = 5
"""How long a stopping pod still accepts, because Services stop sending to it only after a moment."""

GRACE_PERIOD_SECONDS: Final = 60
"""When a stopping pod ends at the latest, counted from SIGTERM: what still runs by then is cut off."""

TERMINATION_SECONDS: Final = GRACE_PERIOD_SECONDS + 10
"""When the kubelet kills: after the pod should have ended by itself."""

STARTUP_PERIOD_SECONDS: Final = 2
"""How soon it is noticed that a model is loaded."""

USER: Final = 65532
"""The unprivileged user of the image."""

SHARED_MEMORY: Final = "1Gi"


def pod_template(
    namespace: str, model: str, spec: SpeculativeModelSpec, config: OperatorConfig, image: str
) -> Object:
    """The pod's spec."""
    engine = spec.engine
    pod: Object = {
        "serviceAccountName": model,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": TERMINATION_SECONDS,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": USER,
            "runAsGroup": USER,
            "fsGroup": USER,
            "fsGroupChangePolicy": "OnRootMismatch",
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        # What is empty is so on purpose: nobody else may add to it.
        "initContainers": [],
        "containers": [_container(namespace, model, spec, config, image)],
        "volumes": _volumes(model, spec),
        "imagePullSecrets": [{"name": secret.name} for secret in engine.image_pull_secrets or []],
        "nodeSelector": dict(engine.node_selector or {}),
        "tolerations": [_toleration(toleration) for toleration in engine.tolerations or []],
    }
    if engine.runtime_class_name:
        pod["runtimeClassName"] = engine.runtime_class_name
    return pod


def _container(
    namespace: str, model: str, spec: SpeculativeModelSpec, config: OperatorConfig, image: str
) -> Object:
    return {
        "name": names.CONTAINER,
        "image": image,
        "imagePullPolicy": str(spec.engine.image_pull_policy or config.image_pull_policy),
        "args": arguments(namespace, model, spec),
        "env": _environment(spec),
        "ports": [
            {"name": names.HTTP_PORT_NAME, "containerPort": HTTP_PORT, "protocol": "TCP"},
            {"name": names.ADMIN_PORT_NAME, "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        # /readyz answers once the model serves, so a load that hangs is restarted when its time is over; the
        # other probes begin after that, so no slow load is taken for a dead process.
        "startupProbe": _probe(
            "/readyz",
            periodSeconds=STARTUP_PERIOD_SECONDS,
            failureThreshold=math.ceil(spec.start_seconds / STARTUP_PERIOD_SECONDS),
        ),
        "livenessProbe": _probe("/healthz", periodSeconds=10, failureThreshold=6),
        "readinessProbe": _probe("/readyz", periodSeconds=2, failureThreshold=2),
        "securityContext": {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        },
        "terminationMessagePolicy": "FallbackToLogsOnError",
        "volumeMounts": _mounts(spec),
        "resources": spec.engine.resources.model_dump(by_alias=True, exclude_none=True),
    }


def arguments(namespace: str, model: str, spec: SpeculativeModelSpec) -> list[str]:
    """The command line after the image's entrypoint."""
    result = [
        "serve",
        model_argument(spec.model),
        "--host=0.0.0.0",
        f"--port={HTTP_PORT}",
        f"--admin-port={ADMIN_PORT}",
        f"--settings={names.SETTINGS_DIRECTORY}/{names.SETTINGS_FILE}",
        f"--served-name={spec.model.served_name or model}",
        f"--dtype={spec.model.dtype}",
        f"--drain-delay={DRAIN_DELAY_SECONDS}",
        f"--grace-period={GRACE_PERIOD_SECONDS}",
    ]
    if spec.model.revision is not None:
        result.append(f"--revision={spec.model.revision}")
    if spec.model.context_length is not None:
        result.append(f"--context-length={spec.model.context_length}")
    if spec.api.keys_secret_ref is not None:
        result.append(f"--api-keys={names.KEYS_DIRECTORY}")
    return result + _engine_arguments(spec.engine) + cache_arguments(spec.shared_cache, namespace, model)


def _engine_arguments(engine: Engine) -> list[str]:
    """How much the engine does at once. Only what is set is said: the rest is the engine's own to choose."""
    memory = engine.proposer_memory
    given = {
        "max-running": engine.max_running,
        "max-waiting": engine.max_waiting,
        "step-tokens": engine.step_tokens,
        "memory-share": engine.memory_share,
        "proposer-memory": None if memory is None else math.ceil(amount(memory)),
    }
    return [f"--{flag}={value}" for flag, value in given.items() if value is not None]


def model_argument(model: Model) -> str:
    """MODEL as the serving command takes it: `hub:OWNER/NAME`, a directory, or `package:NAME`."""
    source = model.source
    if source.hub is not None:
        return f"hub:{source.hub.id}"
    return source.path or f"package:{source.package}"


def _probe(path: str, **timing: int) -> Object:
    # At the admin port: clients that take every connection of the API's port must not get the pod killed.
    return {"httpGet": {"path": path, "port": names.ADMIN_PORT_NAME}, "timeoutSeconds": 5, **timing}


def _environment(spec: SpeculativeModelSpec) -> list[Object]:
    """The operator's variables, each replaced by the user's if that has the same name, then the others."""
    own: dict[str, Object] = {
        "HOME": {"value": names.CACHE_DIRECTORY},
        "USER": {"value": "outrider"},
        "XDG_CACHE_HOME": {"value": names.CACHE_DIRECTORY},
        "HF_HOME": {"value": f"{names.CACHE_DIRECTORY}/huggingface"},
    }
    hub = spec.model.source.hub
    if hub is not None and hub.token_secret_ref is not None:
        reference = hub.token_secret_ref
        own["HF_TOKEN"] = {"valueFrom": {"secretKeyRef": {"name": reference.name, "key": reference.key}}}
    if spec.model.chat_template is not None:
        own["OUTRIDER_CHAT_TEMPLATE"] = {"value": spec.model.chat_template.replace("$", "$$")}
    users = {variable.name: _variable(variable) for variable in spec.engine.env or []}
    return [{"name": name, **value} for name, value in (own | users).items()]


def _variable(variable: EnvVar) -> Object:
    if variable.value_from is None:
        return {"value": variable.value} if variable.value else {}
    source = variable.value_from
    if source.secret_key_ref is not None:
        return {"valueFrom": {"secretKeyRef": _key(source.secret_key_ref)}}
    return (
        {"valueFrom": {"configMapKeyRef": _key(source.config_map_key_ref)}}
        if source.config_map_key_ref
        else {}
    )


def _key(reference: KeyReference) -> Object:
    return {"name": reference.name, "key": reference.key} | ({"optional": True} if reference.optional else {})


def _toleration(toleration: Toleration) -> Object:
    return toleration.model_dump(mode="json", by_alias=True, exclude_none=True)


def _volumes(model: str, spec: SpeculativeModelSpec) -> list[Object]:
    volumes: list[Object] = [
        {"name": "settings", "configMap": {"name": model}},
        {"name": "tmp", "emptyDir": {}},
        {"name": "cache", "emptyDir": {}},
        {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": SHARED_MEMORY}},
    ]
    if spec.api.keys_secret_ref is not None:
        volumes.append(_keys_volume(spec.api.keys_secret_ref))
    volumes += cache_volumes(spec.shared_cache)
    return volumes + [_claim(volume) for volume in spec.engine.volumes or []]


def _keys_volume(reference: LocalReference) -> Object:
    return {"name": "keys", "secret": {"secretName": reference.name, "defaultMode": 0o440}}


def _claim(volume: Volume) -> Object:
    claim = volume.persistent_volume_claim.claim_name
    return {"name": _volume_name(volume), "persistentVolumeClaim": {"claimName": claim}}


def _mounts(spec: SpeculativeModelSpec) -> list[Object]:
    mounts: list[Object] = [
        # A directory, never a subPath: the kubelet updates only whole directories.
        {"name": "settings", "mountPath": names.SETTINGS_DIRECTORY, "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},
        {"name": "cache", "mountPath": names.CACHE_DIRECTORY},
        {"name": "shm", "mountPath": "/dev/shm"},
    ]
    if spec.api.keys_secret_ref is not None:
        mounts.append({"name": "keys", "mountPath": names.KEYS_DIRECTORY, "readOnly": True})
    mounts += cache_mounts(spec.shared_cache)
    for volume in spec.engine.volumes or []:
        mount: Object = {"name": _volume_name(volume), "mountPath": volume.mount_path}
        mounts.append(mount | ({"readOnly": True} if volume.read_only else {}))
    return mounts


def _volume_name(volume: Volume) -> str:
    """Apart from the names of the operator's own volumes."""
    return f"weights-{volume.name}"
