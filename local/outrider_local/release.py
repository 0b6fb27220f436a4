"""The operator's Helm release on the local cluster."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path

from outrider_local.cluster import Cluster
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
    if (chart / "crds").is_dir():
        # helm installs these once and never again: bring changed definitions in ourselves.
        cluster.kubectl("apply", "--server-side", "--force-conflicts", f"--filename={chart / 'crds'}")
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


def _deployed(cluster: Cluster) -> bool:
    try:
        status = json.loads(cluster.helm("status", NAME, f"--namespace={NAMESPACE}", "--output=json"))
    except ProblemError:
        return False
    return bool(status["info"]["status"] == "deployed")
