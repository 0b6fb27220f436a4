"""Why a pod does not serve, read off its status as a person would at 3 a.m."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from outrider_operator.names import CONTAINER
from outrider_operator.observation import Object, is_ready

_PATIENT = frozenset({"ContainerCreating", "PodInitializing"})
"""Reasons to wait that are no trouble."""

_PULL = frozenset({"ErrImagePull", "ImagePullBackOff"})
"""Reasons that take turns while an image cannot be pulled: told as the latter."""

MAX_TERMINATION_MESSAGE: Final = 600


@dataclass(frozen=True, slots=True)
class Trouble:
    """A reason in one word, as Kubernetes names it, and a sentence."""

    reason: str
    message: str


def pod_trouble(pod: Object, warning: str | None) -> Trouble | None:
    """What keeps a pod from being ready, or None while it is ready or merely starting.

    A container that crashed is in trouble from then until it is ready, also while it runs once more: else
    the condition would swing with every restart.
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
        if container["name"] == CONTAINER and (found := _container_trouble(name, container)):
            return found
    return Trouble("PodNotStarting", f"pod {name}: {warning}") if warning else None


def _container_trouble(pod: str, container: Object) -> Trouble | None:
    state, last = container.get("state", {}), container.get("lastState", {})
    waiting = state.get("waiting", {})
    reason = waiting.get("reason", "ContainerCreating")
    ended = state.get("terminated") or last.get("terminated")
    if "waiting" in state and reason in _PULL:
        return Trouble("ImagePullBackOff", f"pod {pod}: image {container['image']}: {_pull_error(waiting)}")
    if ended is not None:
        restarted = bool(container.get("restartCount")) or reason == "CrashLoopBackOff"
        return Trouble("CrashLoopBackOff" if restarted else _exit_reason(ended), f"pod {pod}: {_exit(ended)}")
    if "waiting" in state and reason not in _PATIENT:
        return Trouble(reason, f"pod {pod}: {waiting.get('message', reason)}")
    return None


def _pull_error(waiting: Object) -> str:
    """The pull's error without the back-off around it, which comes and goes."""
    message = str(waiting.get("message", waiting["reason"]))
    return message.partition("ErrImagePull: ")[2] or message


def _exit_reason(ended: Object) -> str:
    return str(ended.get("reason") or "Error")


def _exit(ended: Object) -> str:
    how = f"container {CONTAINER} ended with exit code {ended.get('exitCode')} ({_exit_reason(ended)})"
    said = str(ended.get("message", "")).strip()
    return f"{how}: {said[-MAX_TERMINATION_MESSAGE:]}" if said else how


def deployment_trouble(deployment: Object) -> Trouble | None:
    """What keeps a Deployment from making its pods: a quota, a policy, its deadline."""
    conditions = {
        condition["type"]: condition for condition in deployment.get("status", {}).get("conditions", ())
    }
    failure, progress = conditions.get("ReplicaFailure", {}), conditions.get("Progressing", {})
    if failure.get("status") == "True":
        return Trouble(failure.get("reason", "FailedCreate"), failure.get("message", ""))
    if progress.get("status") == "False":
        return Trouble(progress.get("reason", "ProgressDeadlineExceeded"), progress.get("message", ""))
    return None
