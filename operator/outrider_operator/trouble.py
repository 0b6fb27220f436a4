"""Why a pod does not serve, read off its status as a person would at 3 a.m., and what to do about it."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime
from typing import Final

from outrider_operator.names import CONTAINER
from outrider_operator.observation import Object, is_ready
from outrider_operator.podtemplate import TERMINATION_SECONDS, model_argument
from outrider_operator.spec import SpeculativeModelSpec

_PATIENT = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons to wait that are no trouble."""

_PULL = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""Reasons that take turns while an image cannot be pulled: told as the latter."""

MAX_TERMINATION_MESSAGE: Final = 600

NO_ROOM: Final = frozenset({"FailedCreate", "Unschedulable"})
"""Reasons of a pod that finds no room, or that may not be made: a quota."""

_SENDER = re.compile(r"[0-9a-fA-F.:\[\]]+:\d+->")
"""An address of a connection's own side, as Go writes it before that of the other."""

_MISSING = re.compile(
    r"""(?P<kind>secret|configmap|persistentvolumeclaim)\ "(?P<name>[^"]+)"\ (is\ being\ deleted|not\ found)
    |couldn't\ find\ key\ \S+\ in\ (?P<of>Secret|ConfigMap)\ [^/\s]+/(?P<holder>[-.a-z0-9]+)
    """,
    re.VERBOSE | re.IGNORECASE,
)
"""How scheduler and kubelet speak of an object that a pod needs and that is not there."""

_TOKEN: Final = "spec.model.source.hub.tokenSecretRef names the Secret with the token"

_ADVICE: Final = (
    (
        "node(s) were unschedulable",
        "a node that was cordoned or drained takes pods again after kubectl uncordon",
    ),
    ("untolerated taint", "spec.engine.tolerations says which taints are tolerated"),
    ("node affinity/selector", "spec.engine.nodeSelector says which nodes may be taken"),
    ("Insufficient ", "spec.engine.resources says how much is asked for"),
    ("exceeded quota", "kubectl describe resourcequota shows what uses it up"),
    (
        "(OOMKilled)",
        "it may use no more memory than spec.engine.resources.limits.memory, and the node, allow",
    ),
    (
        "give more memory, a larger share or a shorter context",
        "these are spec.engine.resources.limits.memory or another GPU, spec.engine.memoryShare and "
        "spec.model.contextLength; the reserve is spec.engine.proposerMemory",
    ),
    ("--step-tokens", "the flags are spec.engine.stepTokens and spec.engine.maxRunning"),
    ("exceeds that of model", "the context length is spec.model.contextLength"),
    ("give a context length", "it is given by spec.model.contextLength"),
    ("there is no revision", "it is named by spec.model.revision"),
    ("give a token that may read it", _TOKEN),
    ("there is no such repository", f"it is named by spec.model.source.hub.id, and {_TOKEN}"),
)
"""What a message holds, and what is worth knowing then."""


@dataclass(frozen=True, slots=True)
class Trouble:
    """A reason in one word, as Kubernetes names it, and a sentence."""

    reason: str
    message: str


def pod_trouble(pod: Object, warning: str | None, start_seconds: int) -> Trouble | None:
    """What keeps a pod from being ready, or None while it is ready or merely starting.

    A container that crashed is in trouble from then until it is ready, also while it runs once more: else
    the condition would swing with every restart. `start_seconds` is how long it may take until it serves.
    """
    if is_ready(pod):
        return None
    name, status = pod["metadata"]["name"], pod.get("status", {})
    for condition in status.get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return Trouble(
                condition.get("reason", "Unschedulable"), f"pod {name}: {condition.get('message', '')}"
            )
    if status.get("phase") == "Failed":
        return Trouble(status.get("reason", "PodFailed"), f"pod {name}: {status.get('message', 'failed')}")
    for container in status.get("containerStatuses", ()):
        if container["name"] == CONTAINER and (found := _container_trouble(name, container, start_seconds)):
            return found
    return Trouble("PodNotStarting", f"pod {name}: {warning}") if warning else None


def _container_trouble(pod: str, container: Object, start_seconds: int) -> Trouble | None:
    state, last = container.get("state", {}), container.get("lastState", {})
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "ContainerCreating")
    ended = state.get("terminated") or last.get("terminated")
    if "waiting" in state and reason in _PULL:
        return Trouble("ImagePullBackOff", f"pod {pod}: image {container['image']}: {_pull_error(waiting)}")
    if ended is not None:
        restarted = bool(container.get("restartCount")) or reason == "CrashLoopBackOff"
        word = "CrashLoopBackOff" if restarted else _exit_reason(ended)
        return Trouble(word, f"pod {pod}: {_exit(ended)}{_too_slow(ended, start_seconds)}")
    if "waiting" in state and reason not in _PATIENT:
        return Trouble(reason, f"pod {pod}: {waiting.get('message', reason)}")
    return None


def _pull_error(waiting: Object) -> str:
    """The pull's error without what changes from try to try: the back-off, and the sender's port."""
    message = str(waiting.get("message", waiting["reason"]))
    return _SENDER.sub("", message.partition("ErrImagePull: ")[2] or message)


def _exit_reason(ended: Object) -> str:
    return str(ended.get("reason") or "Error")


def _exit(ended: Object) -> str:
    how = f"container {CONTAINER} ended with exit code {ended.get('exitCode')} ({_exit_reason(ended)})"
    said = str(ended.get("message", "")).strip()
    return f"{how}: {said[-MAX_TERMINATION_MESSAGE:]}" if said else how


def _too_slow(ended: Object, start_seconds: int) -> str:
    """What to do about a container that was ended just when its time to load was over; else nothing."""
    if not (ended.get("startedAt") and ended.get("finishedAt")):
        return ""
    ran = datetime.fromisoformat(ended["finishedAt"]) - datetime.fromisoformat(ended["startedAt"])
    # The last probes may have timed out, and a process that is told to end has its grace period.
    if not start_seconds <= ran.total_seconds() <= start_seconds * 1.1 + TERMINATION_SECONDS + 10:
        return ""
    return (
        f"; it ran for {ran.total_seconds():.0f} s, and one that does not serve after {start_seconds} s is "
        "restarted: if the model takes longer to load, raise spec.engine.loadSeconds"
    )


def deployment_trouble(deployment: Object) -> Trouble | None:
    """What keeps a Deployment from making its pods: a quota, a policy, its deadline."""
    failure = _condition(deployment, "ReplicaFailure")
    if failure.get("status") == "True":
        return Trouble(failure.get("reason", "FailedCreate"), failure.get("message", ""))
    return deadline_trouble(deployment)


def deadline_trouble(deployment: Object) -> Trouble | None:
    """That a Deployment has waited for its next pod for longer than it may, or None."""
    progress = _condition(deployment, "Progressing")
    if progress.get("status") == "False":
        return Trouble(progress.get("reason", "ProgressDeadlineExceeded"), progress.get("message", ""))
    return None


def _condition(deployment: Object, kind: str) -> Object:
    conditions = deployment.get("status", {}).get("conditions", ())
    return next((dict(condition) for condition in conditions if condition["type"] == kind), {})


def advice(trouble: Trouble, spec: SpeculativeModelSpec) -> tuple[str, ...]:
    """Where to look, or what of the spec it comes from."""
    hints = [hint for part, hint in _ADVICE if part in trouble.message]
    hints += [f"it is named by {field}" for field in _fields_of_missing(trouble.message, spec)]
    if trouble.reason == "ImagePullBackOff":
        image = "spec.engine.image" if spec.engine.image else "the operator's setting serving-image"
        hints.append(f"it is named by {image}, and pulled with the Secrets in spec.engine.imagePullSecrets")
    if not hints and (field := _field_of_model(trouble.message, spec)):
        hints.append(f"the model is named by {field}")
    return tuple(hints)


def _field_of_model(message: str, spec: SpeculativeModelSpec) -> str | None:
    """Where the spec names its model, if that is what a pod's last words speak of."""
    source, written = spec.model.source, model_argument(spec.model).removeprefix("hub:")
    if f"model {written}" not in message and f"model '{written}'" not in message:
        return None
    if source.hub is not None:
        return "spec.model.source.hub.id"
    return "spec.model.source.path" if source.path is not None else "spec.model.source.package"


def _fields_of_missing(message: str, spec: SpeculativeModelSpec) -> tuple[str, ...]:
    found = _MISSING.search(message)
    if found is None:
        return ()
    kind = (found["kind"] or found["of"]).lower()
    name = found["name"] or found["holder"]
    return tuple(field for field, *named in _references(spec) if named == [kind, name])


def _references(spec: SpeculativeModelSpec) -> Iterator[tuple[str, str, str]]:
    """Field, kind and name of every object that a spec names."""
    hub, engine = spec.model.source.hub, spec.engine
    if hub is not None and hub.token_secret_ref is not None:
        yield "spec.model.source.hub.tokenSecretRef", "secret", hub.token_secret_ref.name
    if spec.api.keys_secret_ref is not None:
        yield "spec.api.keysSecretRef", "secret", spec.api.keys_secret_ref.name
    for variable in engine.env or ():
        source = variable.value_from
        if source is not None and source.secret_key_ref is not None:
            yield f"spec.engine.env[{variable.name}]", "secret", source.secret_key_ref.name
        if source is not None and source.config_map_key_ref is not None:
            yield f"spec.engine.env[{variable.name}]", "configmap", source.config_map_key_ref.name
    for volume in engine.volumes or ():
        claim = volume.persistent_volume_claim.claim_name
        yield f"spec.engine.volumes[{volume.name}]", "persistentvolumeclaim", claim
