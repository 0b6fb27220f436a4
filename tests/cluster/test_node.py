"""The node itself: what containers find there, and what is left when it is gone."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from cluster_fixture import LocalCluster, end, new_settings, run_local
from outrider_local import addresses, forward, node
from outrider_local.layout import Layout
from outrider_local.settings import Settings

NAMESPACE = "node-checks"


@pytest.fixture(scope="module")
def namespace(cluster: LocalCluster) -> str:
    """A namespace under the restricted Pod Security Standard."""
    labels = {"pod-security.kubernetes.io/enforce": "restricted"}
    apply(
        cluster, {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
    )
    cluster.kubectl(
        "wait", "--for=create", f"--namespace={NAMESPACE}", "serviceaccount/default", "--timeout=30s"
    )
    return NAMESPACE


def apply(cluster: LocalCluster, *objects: dict[str, Any]) -> None:
    cluster.kubectl(
        "apply", "-f", "-", stdin=json.dumps({"apiVersion": "v1", "kind": "List", "items": objects})
    )


def restricted_pod(name: str, image: str, code: str, **container: Any) -> dict[str, Any]:
    return {
        "apiVersion": "v1",
        "kind": "Pod",
        "metadata": {"name": name, "namespace": NAMESPACE, "labels": {"app": name}},
        "spec": {
            "restartPolicy": "Never",
            "terminationGracePeriodSeconds": 1,
            "securityContext": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
            "containers": [
                {
                    "name": "main",
                    "image": image,
                    "command": ["python3", "-c", code],
                    "securityContext": {
                        "allowPrivilegeEscalation": False,
                        "readOnlyRootFilesystem": True,
                        "capabilities": {"drop": ["ALL"]},
                    },
                    **container,
                }
            ],
        },
    }


def finish(cluster: LocalCluster, pod: dict[str, Any]) -> str:
    """Run a pod to its end; its log."""
    name = pod["metadata"]["name"]
    apply(cluster, pod)
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Succeeded", f"pod/{name}", f"-n{NAMESPACE}", "--timeout=90s"
    )
    return cluster.kubectl("logs", name, f"-n{NAMESPACE}")


def test_kubectl_works_from_the_host(cluster: LocalCluster) -> None:
    conditions = cluster.get("node", addresses.NODE)["status"]["conditions"]
    assert [c["status"] for c in conditions if c["type"] == "Ready"] == ["True"]


def test_restricted_container_finds_code_and_packages(cluster: LocalCluster, namespace: str) -> None:
    code = """
import importlib.metadata, json, os, sys
import outrider_operator, outrider_serving, pydantic
def write(path):
    try:
        open(path, "w").close()
    except OSError as error:
        return type(error).__name__, error.errno
    return "written", 0
status = dict(line.rstrip().split(":\\t", 1) for line in open("/proc/self/status") if ":\\t" in line)
print(json.dumps({
    "uid": os.getuid(), "capabilities": int(status["CapBnd"], 16), "seccomp": status["Seccomp"],
    "no_new_privileges": status["NoNewPrivs"],
    "app": outrider_serving.__file__, "packages": pydantic.__file__,
    "root": write("/x"), "environment": write("/opt/outrider/environment/x"),
    "version": importlib.metadata.version("pydantic"),
}))
"""
    said = json.loads(finish(cluster, restricted_pod("packages", cluster.images.serving, code)))
    assert said["uid"] == 65532
    assert (said["capabilities"], said["seccomp"], said["no_new_privileges"]) == (0, "2", "1")
    assert said["app"].startswith("/opt/outrider/app/")
    assert said["packages"].startswith("/opt/outrider/environment/")
    read_only = ["OSError", 30]
    assert said["root"] == said["environment"] == read_only


def test_limits_and_volumes_hold_beside_the_base_specification(cluster: LocalCluster, namespace: str) -> None:
    config_map = {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": {"name": "words", "namespace": NAMESPACE},
        "data": {"greeting": "hello"},
    }
    apply(cluster, config_map)
    pod = restricted_pod(
        "limits",
        cluster.images.operator,
        "print(open('/words/greeting').read()); open('/scratch/x', 'w').write('y'); bytearray(400 << 20)",
        resources={"limits": {"memory": "128Mi", "cpu": "500m"}},
        volumeMounts=[{"name": "words", "mountPath": "/words"}, {"name": "scratch", "mountPath": "/scratch"}],
    )
    pod["spec"]["volumes"] = [
        {"name": "words", "configMap": {"name": "words"}},
        {"name": "scratch", "emptyDir": {"sizeLimit": "10Mi"}},
    ]
    apply(cluster, pod)
    cluster.kubectl(
        "wait", "--for=jsonpath={.status.phase}=Failed", "pod/limits", f"-n{NAMESPACE}", "--timeout=60s"
    )
    state = cluster.get("pod", "limits", NAMESPACE)["status"]["containerStatuses"][0]["state"]
    assert state["terminated"]["reason"] == "OOMKilled"
    assert "hello" in cluster.kubectl("logs", "limits", f"-n{NAMESPACE}")


def test_a_service_is_reached_by_name_and_through_a_forward(cluster: LocalCluster, namespace: str) -> None:
    server = restricted_pod(
        "web",
        cluster.images.operator,
        "import http.server as h; h.test(h.SimpleHTTPRequestHandler, port=8080)",
        readinessProbe={"tcpSocket": {"port": 8080}, "periodSeconds": 1},
        workingDir="/opt/outrider/app",
    )
    service = {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": {"name": "web", "namespace": NAMESPACE},
        "spec": {"selector": {"app": "web"}, "ports": [{"port": 80, "targetPort": 8080}]},
    }
    apply(cluster, server, service)
    cluster.kubectl("wait", "--for=condition=Ready", "pod/web", f"-n{NAMESPACE}", "--timeout=60s")
    fetch = "import urllib.request as u; print(u.urlopen('http://{}/', timeout=10).status)"
    client = restricted_pod("client", cluster.images.operator, fetch.format(f"web.{NAMESPACE}"))
    assert finish(cluster, client).strip() == "200"

    address = cluster.get("service", "web", NAMESPACE)["spec"]["clusterIP"]
    port = cluster.forward(address, 80)
    direct = [
        "python3",
        "-c",
        f"import os; os.environ['no_proxy'] = '*'; {fetch.format(f'127.0.0.1:{port}')}",
    ]
    assert subprocess.run(direct, capture_output=True, text=True, check=True).stdout.strip() == "200"
    in_network = cluster.in_network(
        "python3", "-c", f"import os; os.environ['no_proxy'] = '*'; {fetch.format(address)}"
    )
    result = subprocess.run(in_network, env=cluster.environment, capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "200"


def test_images_are_given_once(cluster: LocalCluster) -> None:
    before = cluster.local("node", "images")
    assert cluster.images.operator in before
    assert cluster.images.serving in before
    assert cluster.local("node", "images") == before


def test_a_second_node_comes_survives_a_crash_and_leaves_nothing_behind(cluster: LocalCluster) -> None:
    settings = new_settings("-b")
    mounts = Path("/proc/self/mountinfo").read_text()
    records = []
    try:
        run_local(settings, "node", "up")
        assert node.healthy(settings)
        assert "already runs" in run_local(settings, "node", "up")
        for forwarder in forward.running(Layout(settings.state)).values():
            forwarder.process.end(0)
        assert not node.healthy(settings)
        run_local(settings, "node", "up")
        assert node.healthy(settings)
        records.append(launched(settings))
        records[0].launcher.end(0)
        assert not node.healthy(settings)
        assert "cleaning up" in run_local(settings, "node", "up")
        assert node.healthy(settings)
        records.append(launched(settings))
        spoil_records(settings)
        assert "cleaning up" in run_local(settings, "node", "up")
        assert node.healthy(settings)
        records.append(launched(settings))
        spoil_records(settings)
    finally:
        end(settings)
    assert not any(identity.alive for record in records for identity in (record.launcher, record.init))
    assert not any(Path(directory).exists() for record in records for directory in record.cgroups)
    assert not settings.state.exists()
    assert Path("/proc/self/mountinfo").read_text() == mounts
    assert not _processes_that_mention(str(settings.state))
    assert run_local(settings, "down").strip().endswith("nothing to do")
    assert node.healthy(cluster.settings)  # the other node never noticed


def spoil_records(settings: Settings) -> None:
    """As a full disk would."""
    layout = Layout(settings.state)
    for path in (layout.record, *layout.forwards.iterdir()):
        path.write_text("")


def launched(settings: Settings) -> Any:
    """The record of a running node, its processes alive and its cgroups made."""
    record = node.read_record(Layout(settings.state))
    assert record is not None
    assert record.launcher is not None
    assert record.launcher.alive
    assert record.init is not None
    assert all(Path(directory).is_dir() for directory in record.cgroups)
    return record


def _processes_that_mention(text: str) -> list[str]:
    found = []
    for command in Path("/proc").glob("[0-9]*/cmdline"):
        try:
            words = command.read_text().split("\0")
        except OSError:
            continue
        if any(text in word for word in words):
            found.append(" ".join(words))
    return found
