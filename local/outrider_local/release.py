"""The operator's Helm release on the local cluster."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider_local.cluster import Cluster, Object
from outrider_local.images import References
from outrider_local.progress import pod_report
from outrider_local.report import ProblemError, Stopwatch, detail
from outrider_local.settings import Settings

NAME = "outrider"
NAMESPACE = "outrider-system"
CHART = Path("charts/outrider")
_TIMEOUT = "180s"


def install(settings: Settings, cluster: Cluster, images: References) -> bool:
    """Install or upgrade the chart when it, or its values, changed; whether there was anything to do."""
    chart = settings.checkout / CHART
    values = chart_values(images)
    wanted = digest(chart, values)
    mark = settings.state / "release"
    if mark.exists() and mark.read_text() == wanted and _deployed(cluster):
        detail(f"release {NAME} is up to date")
        return False
    watch = Stopwatch()
    _clear_pending(cluster)
    sets = [f"--set-string={name}={value}" for name, value in values.items()]
    try:
        cluster.helm(
            *("upgrade", NAME, chart, "--install", "--create-namespace", f"--namespace={NAMESPACE}"),
            *("--history-max=5", "--wait", f"--timeout={_TIMEOUT}", *sets),
        )
    except ProblemError as problem:
        report = pod_report(cluster, NAMESPACE)
        raise ProblemError(
            f"{problem.what}\n{report}", "fix what the lines above show, then run make up again"
        ) from None
    mark.write_text(wanted)
    detail(f"release {NAME} installed in {watch}")
    return True


def chart_values(images: References) -> dict[str, str]:
    """What differs from the chart's defaults here: local images, never pulled when present."""
    return {
        "operator.image": images.operator,
        "operator.imagePullPolicy": "IfNotPresent",
        "serving.image": images.serving,
        "serving.imagePullPolicy": "IfNotPresent",
    }


def digest(chart: Path, values: dict[str, str]) -> str:
    """A digest of the chart's files and the values."""
    total = hashlib.sha256(json.dumps(values, sort_keys=True).encode())
    for path in sorted(path for path in chart.rglob("*") if path.is_file()):
        content = path.read_bytes()
        total.update(f"{path.relative_to(chart)} {len(content)}\n".encode() + content)
    return total.hexdigest()


def _clear_pending(cluster: Cluster) -> None:
    """Undo what a helm has begun that was ended in the middle: no other would touch the release."""
    history = _history(cluster)
    status = history[-1]["status"] if history else ""
    if not status.startswith("pending-") and status != "uninstalling":
        return
    good = [revision["revision"] for revision in history if revision["status"] == "deployed"]
    if good and status != "uninstalling":
        detail(f"release {NAME} was left {status}: going back to its revision {good[-1]}")
        cluster.helm("rollback", NAME, str(good[-1]), f"--namespace={NAMESPACE}")
    else:
        detail(f"release {NAME} was left {status}: uninstalling it (the resources stay)")
        cluster.helm("uninstall", NAME, f"--namespace={NAMESPACE}", "--wait", f"--timeout={_TIMEOUT}")


def _history(cluster: Cluster) -> list[Object]:
    """The release's revisions, the oldest first."""
    try:
        history: list[Object] = json.loads(
            cluster.helm("history", NAME, f"--namespace={NAMESPACE}", "--output=json")
        )
    except ProblemError:
        return []  # there is no such release
    return sorted(history, key=lambda revision: int(revision["revision"]))


def _deployed(cluster: Cluster) -> bool:
    history = _history(cluster)
    return bool(history) and history[-1]["status"] == "deployed"
