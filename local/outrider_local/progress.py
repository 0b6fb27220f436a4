"""Waiting for a SpeculativeModel, with what happens meanwhile made visible."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable

from outrider_local.cluster import Cluster, Object
from outrider_local.report import ProblemError, Stopwatch, detail

KIND = "speculativemodels.outrider.dev"
#: On everything that the operator makes for a model.
_LABEL = "outrider.dev/model"
_PATIENCE = 420.0
#: Container states that do not heal by waiting.
_HOPELESS = {
    "CrashLoopBackOff",
    "CreateContainerConfigError",
    "CreateContainerError",
    "ErrImageNeverPull",
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "RunContainerError",
}
_LOG_LINES = 20
#: After so many seconds without news, the pod's log tells what it is at.
_SILENCE = 10.0
_LINE_WIDTH = 160


def wait_until_ready(
    cluster: Cluster, name: str, namespace: str, image: str, patience: float = _PATIENCE
) -> None:
    """Wait for the condition Ready, printing conditions and pods as they change.

    ``image`` is what the pods have to run (unless the resource names its own): after a change of the code, an
    operator that has just been replaced may still call the old pods ready.
    """
    watch = Stopwatch()
    seen: set[str] = set()
    spoke = 0.0
    while True:
        model = cluster.get(KIND, name, namespace)
        pods = living_pods(cluster, namespace, name)
        lines = [*condition_lines(model), *(pod_line(pod) for pod in pods)]
        for line in lines:
            if line not in seen:
                detail(f"{watch.seconds:5.1f} s  {line}")
                spoke = watch.seconds
        seen = set(lines)
        if is_ready(model) and runs_image(model, pods, image):
            return
        current = [pod for pod in pods if runs_image(model, [pod], image)]
        stuck = next((reason for pod in current if (reason := hopeless(pod))), None)
        if stuck:
            raise ProblemError(
                f"{name} does not start: {stuck}\n{pod_report(cluster, namespace, name)}",
                f"correct the resource (kubectl edit specm {name}) or the code, then run make up again",
            )
        if watch.seconds > patience:
            raise ProblemError(
                f"{name} is not ready after {patience:.0f} s\n{pod_report(cluster, namespace, name)}",
                f"look at: kubectl describe specm {name}; kubectl --namespace outrider-system get pods",
            )
        if pods and watch.seconds - spoke > _SILENCE:
            spoke = watch.seconds
            detail(f"{watch.seconds:5.1f} s  log: {last_line(cluster, pods[-1])}")
        time.sleep(1)


def is_ready(model: Object) -> bool:
    """Whether the condition Ready is true for the generation that was asked for."""
    status = model.get("status", {})
    observed = status.get("observedGeneration")
    if observed is not None and observed < model["metadata"]["generation"]:
        return False
    return any(c["type"] == "Ready" and c["status"] == "True" for c in status.get("conditions", []))


def runs_image(model: Object, pods: Iterable[Object], image: str) -> bool:
    """Whether every pod runs the image that it should."""
    wanted = model["spec"].get("engine", {}).get("image") or image
    return all(container["image"] == wanted for pod in pods for container in pod["spec"]["containers"])


def condition_lines(model: Object) -> list[str]:
    """One line a condition."""
    conditions = model.get("status", {}).get("conditions", [])
    if not conditions:
        return ["waiting for the operator to see the resource"]
    return [
        f"{one['type']}={one['status']}  {one.get('reason', '')}"
        + (f": {message}" if (message := one.get("message", "")) else "")
        for one in conditions
    ]


def living_pods(cluster: Cluster, namespace: str, name: str) -> list[Object]:
    """The model's pods, less those that are going."""
    pods = cluster.get("pods", namespace=namespace, selector=f"{_LABEL}={name}").get("items", [])
    return [pod for pod in pods if "deletionTimestamp" not in pod["metadata"]]


def pod_line(pod: Object) -> str:
    """A pod's phase, and why a container waits."""
    status = pod.get("status", {})
    containers = status.get("containerStatuses", [])
    ready = sum(bool(container.get("ready")) for container in containers)
    waiting = [c["state"]["waiting"].get("reason", "") for c in containers if "waiting" in c.get("state", {})]
    restarts = sum(container.get("restartCount", 0) for container in containers)
    words = [
        f"pod {pod['metadata']['name']}: {status.get('phase', 'Unknown')}",
        *waiting,
        f"{ready} of {len(containers)} ready",
    ]
    return ", ".join([*words, *([f"{restarts} restarts"] if restarts else [])])


def hopeless(pod: Object) -> str | None:
    """Why a pod will not come up by itself, if so."""
    for container in pod.get("status", {}).get("containerStatuses", []):
        waiting = container.get("state", {}).get("waiting", {})
        if waiting.get("reason") in _HOPELESS:
            message = f": {waiting['message']}" if waiting.get("message") else ""
            return f"container {container['name']} is in {waiting['reason']}{message}"
    return None


def pod_report(cluster: Cluster, namespace: str, name: str = "") -> str:
    """Pods, their last log lines and the latest events, for an error message.

    Of a model, or of the whole namespace.
    """
    if name:
        pods = living_pods(cluster, namespace, name)
        owners = cluster.get("deployments,replicasets", namespace=namespace, selector=f"{_LABEL}={name}")
        own = {name, *(one["metadata"]["name"] for one in (*pods, *owners.get("items", [])))}
    else:
        pods, own = cluster.get("pods", namespace=namespace).get("items", []), set()
    lines = []
    for pod in pods:
        lines.append(pod_line(pod))
        lines += [f"  | {line}" for line in _last_words(cluster, pod).splitlines()]
    events = [
        (event["involvedObject"].get("name", ""), event)
        for event in cluster.get("events", namespace=namespace).get("items", [])
        if event.get("type") == "Warning"
    ]
    told = [(about, event) for about, event in events if about in own or not name]
    lines += [f"event {about}: {event.get('reason')}: {event.get('message')}" for about, event in told[-5:]]
    return "\n".join(lines) or f"(no pods in the namespace {namespace})"


def last_line(cluster: Cluster, pod: Object) -> str:
    """The last line of a pod's log; of a line that rewrites itself, its last state."""
    lines = _log(cluster, pod, 1).replace("\r", "\n").strip().splitlines()
    return _message(lines[-1])[:_LINE_WIDTH] if lines else "(nothing yet)"


def _message(line: str) -> str:
    """The message of a structured log line; any other line as it is."""
    try:
        return str(json.loads(line)["message"])
    except (ValueError, TypeError, KeyError):
        return line


def _last_words(cluster: Cluster, pod: Object) -> str:
    """The log of the run that failed last, or of this one."""
    return _log(cluster, pod, _LOG_LINES, "--previous") or _log(cluster, pod, _LOG_LINES) or "(no log)"


def _log(cluster: Cluster, pod: Object, lines: int, *options: str) -> str:
    name, namespace = pod["metadata"]["name"], pod["metadata"]["namespace"]
    try:
        return cluster.kubectl("logs", f"pod/{name}", f"--namespace={namespace}", f"--tail={lines}", *options)
    except ProblemError:
        return ""  # there was no such run
