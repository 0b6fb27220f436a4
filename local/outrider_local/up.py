"""`make up`: from a fresh machine to tokens. Every step looks first, and does only what is not done yet."""

from __future__ import annotations

import json
import subprocess
import time
from pathlib import Path

from outrider_local import environment, gobuild, images, node, preflight, privileges, progress, release
from outrider_local.cluster import Cluster, Object
from outrider_local.report import ProblemError, Stopwatch, detail, step
from outrider_local.settings import Settings
from outrider_local.shell import without_proxies

EXAMPLE = Path("examples/gemma-3-270m.yaml")
_API_PATIENCE = 30.0


def up(settings: Settings) -> None:
    """Bring everything up and ask one completion."""
    watch = Stopwatch()
    step("checking this machine")
    preflight.run(settings)
    environment.make(settings)
    gobuild.build(settings.checkout, settings.cache)
    start_node(settings)
    cluster = Cluster(settings)
    step("images")
    references = images.provide(settings)
    step(f"helm release {release.NAME} in the namespace {release.NAMESPACE}")
    release.install(settings, cluster, references)
    name, namespace = apply_example(settings, cluster)
    step(f"waiting for speculativemodel/{name} (loading a model takes a minute the first time)")
    progress.wait_until_ready(cluster, name, namespace, references.serving)
    forward_service(settings, cluster, name, namespace)
    url = f"http://127.0.0.1:{settings.port}/v1"
    step(f"one completion by the openai client from {url}")
    say_hello(settings, url)
    step("kubectl get speculativemodels")
    detail(cluster.kubectl("get", "speculativemodels", "--all-namespaces"))
    step(f"up after {watch}")
    detail(what_next(settings, cluster, name, url))


def start_node(settings: Settings) -> None:
    """Start the node, or say that it runs."""
    step(f"node {settings.name}: etcd, containerd, kubelet and the control plane in namespaces of their own")
    if node.healthy(settings):
        detail("already runs")
        return
    if privileges.is_root():
        node.up(settings)
    else:
        privileges.rerun(settings, ["node", "up"])
    end = time.monotonic() + _API_PATIENCE
    while not node.healthy(settings):
        if time.monotonic() > end:
            raise ProblemError(
                f"the node runs, but its API server does not answer on port {settings.api_port}",
                f"look into {settings.state}/log, or start anew: {settings.command('down up')}",
            )
        time.sleep(0.5)


def apply_example(settings: Settings, cluster: Cluster) -> tuple[str, str]:
    """Apply the example; the name and the namespace of its resource."""
    step(f"kubectl apply --filename={EXAMPLE}")
    file = settings.checkout / EXAMPLE
    dry = cluster.kubectl("create", "--dry-run=client", "--output=json", f"--filename={file}")
    wanted = json.loads(dry)
    name, namespace = wanted["metadata"]["name"], wanted["metadata"].get("namespace", "default")
    if _was_applied(cluster.get(progress.KIND, name, namespace), wanted["spec"]):
        detail("was applied before; what was edited since is kept")
    else:
        detail(cluster.kubectl("apply", f"--filename={file}").strip())
    return name, namespace


def _was_applied(live: Object, spec: object) -> bool:
    """Whether kubectl last applied just this spec: applying it again would undo a user's edits."""
    annotations = live.get("metadata", {}).get("annotations", {})
    applied = json.loads(annotations.get("kubectl.kubernetes.io/last-applied-configuration", "{}"))
    return bool(applied.get("spec") == spec)


def forward_service(settings: Settings, cluster: Cluster, name: str, namespace: str) -> None:
    """Let 127.0.0.1 into the model's Service, which has the resource's name."""
    spec = cluster.get("service", name, namespace).get("spec")
    if not spec:
        raise ProblemError(f"there is no service {name} in the namespace {namespace}")
    address, port = spec["clusterIP"], spec["ports"][0]["port"]
    step(f"127.0.0.1:{settings.port} leads to service/{name} ({address}:{port})")
    if privileges.is_root():
        node.forward_port(settings, node.SERVICE_FORWARD, settings.port, address, port)
    else:
        privileges.rerun(settings, ["node", "forward", address, str(port)])


def say_hello(settings: Settings, url: str) -> None:
    """Ask one completion, in the project's environment."""
    command = [str(settings.venv / "bin" / "python"), "-m", "outrider_local.hello", url]
    variables = without_proxies(
        {"PYTHONPATH": str(settings.local), "PATH": "/usr/bin:/bin", "LANG": "C.UTF-8"}
    )
    # Its output goes straight to the terminal, so that tokens are seen as they come.
    done = subprocess.run(command, env=variables, stderr=subprocess.PIPE, text=True, check=False)
    if done.returncode:
        said = done.stderr.strip().splitlines()[-1:] or ["no error message"]
        raise ProblemError(f"the completion failed: {said[0]}", "look at: kubectl logs, and make up again")


def what_next(settings: Settings, cluster: Cluster, name: str, url: str) -> str:
    """What a person may try now."""
    kubectl = gobuild.programs(settings.checkout, settings.cache).path("kubectl")
    model = _served_name(cluster, name)
    body = f'{{"model": "{model}", "prompt": "1, 2, 3, 1, 2, 3, 1,", "max_tokens": 32, "temperature": 0}}'
    proposer = '{"spec": {"proposer": {"method": "none"}}}'
    down = settings.command("down", knobs=("OUTRIDER_NAME", "XDG_STATE_HOME"))
    return "\n".join(
        (
            f"the API:         {url}",
            "what to try next:",
            f"  curl {url}/completions -H 'Content-Type: application/json' -d '{body}'",
            f"  export KUBECONFIG={cluster.kubeconfig} PATH={kubectl.parent}:$PATH",
            f"  kubectl describe specm {name}",
            f"  kubectl edit specm {name}",
            f"  kubectl patch specm {name} --type merge --patch '{proposer}'    # and back: ngram",
            f"  {down}",
        )
    )


def _served_name(cluster: Cluster, name: str) -> str:
    spec = cluster.get(progress.KIND, name).get("spec", {}).get("model", {})
    return str(spec.get("servedName") or name)
