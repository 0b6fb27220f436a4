"""The components' configuration, as it is written."""

from __future__ import annotations

import base64
import json
import tomllib
from pathlib import Path

import pytest

from outrider_local import addresses, components, configs, pki
from outrider_local.gobuild import MODULES, Programs
from outrider_local.layout import Layout

LAYOUT = Layout(Path("/home/me/.local/state/outrider/outrider"))


def test_containerd_knows_the_base_specification_and_the_pause_image() -> None:
    text = configs.containerd(LAYOUT, Path("/cni"), "/usr/sbin/runc", Path("/conf/base-spec.json"))
    config = tomllib.loads(text)
    runtime = config["plugins"]["io.containerd.cri.v1.runtime"]
    runc = runtime["containerd"]["runtimes"]["runc"]
    assert config["version"] == 3
    assert runc["base_runtime_spec"] == "/conf/base-spec.json"
    assert runc["options"] == {"BinaryName": "/usr/sbin/runc", "SystemdCgroup": False}
    assert runtime["cni"]["bin_dirs"] == ["/cni"]
    assert (
        config["plugins"]["io.containerd.cri.v1.images"]["pinned_images"]["sandbox"] == addresses.PAUSE_IMAGE
    )


def test_every_container_gets_the_environment_read_only() -> None:
    default = json.dumps({"process": {"cwd": "/"}, "mounts": [{"destination": "/proc"}]})
    spec = json.loads(configs.base_spec(default, Path("/src/.venv")))
    assert spec["process"] == {"cwd": "/"}
    assert [mount["destination"] for mount in spec["mounts"]] == ["/proc", addresses.ENVIRONMENT_MOUNT]
    assert spec["mounts"][1]["source"] == "/src/.venv"
    assert {"ro", "rbind", "nosuid", "nodev"} == set(spec["mounts"][1]["options"])


@pytest.mark.parametrize("version", [1, 2])
def test_kubelet_is_told_of_cgroup_v1_only_there(version: int) -> None:
    config = json.loads(configs.kubelet(LAYOUT, version))
    assert ("failCgroupV1" in config) == (version == 1)
    assert config["cgroupDriver"] == "cgroupfs"
    assert config["clusterDNS"] == [addresses.NODE_IP]


def test_host_kubeconfig_stands_alone(tmp_path: Path) -> None:
    layout = Layout(tmp_path)
    layout.pki.mkdir()
    for name in ("ca.crt", "admin.crt", "admin.key"):
        (layout.pki / name).write_text(name)
    config = json.loads(configs.host_kubeconfig(layout, 16443))
    cluster, user = config["clusters"][0]["cluster"], config["users"][0]["user"]
    assert cluster["server"] == "https://127.0.0.1:16443"
    assert base64.b64decode(cluster["certificate-authority-data"]) == b"ca.crt"
    assert base64.b64decode(user["client-key-data"]) == b"admin.key"
    assert str(tmp_path) not in json.dumps(config)


def test_api_server_certificate_is_valid_on_the_hosts_loopback() -> None:
    certificate = next(one for one in pki.CERTIFICATES if one.file == "apiserver")
    text = pki.extensions(certificate)
    assert "IP:127.0.0.1" in text
    assert f"IP:{addresses.API_SERVICE_IP}" in text
    client = next(one for one in pki.CERTIFICATES if one.file == "admin")
    assert "serverAuth" not in pki.extensions(client)


def test_every_component_is_started_and_stopped(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "require", lambda tool: f"/usr/bin/{tool}")
    programs = Programs({name: Path("/cache") / name for name in MODULES})
    commands = components.commands(LAYOUT, programs)
    assert set(commands) == set(components.STOP_ORDER)
    assert commands["kubelet"][0] == "/cache/kube/kubelet"
    assert commands["etcd"][0] == "/usr/bin/etcd"
    assert "--authorization-mode=Node,RBAC" in commands["kube-apiserver"]


def test_the_api_server_logs_what_service_accounts_ask_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(components, "require", lambda tool: f"/usr/bin/{tool}")
    programs = Programs({name: Path("/cache") / name for name in MODULES})
    flags = components.commands(LAYOUT, programs)["kube-apiserver"]
    assert f"--audit-log-path={LAYOUT.audit_log}" in flags
    assert f"--audit-policy-file={LAYOUT.conf}/audit.json" in flags
    bounds = [flag for flag in flags if flag.startswith(("--audit-log-maxsize=", "--audit-log-maxbackup="))]
    assert len(bounds) == 2

    policy = json.loads(configs.audit_policy())
    assert policy["omitStages"] == ["RequestReceived"]
    levels = [rule["level"] for rule in policy["rules"]]
    assert levels == ["None", "Metadata", "None", "Metadata", "None"]  # the first rule that fits decides
    control_plane, accounts, *_ = policy["rules"]
    assert control_plane["userGroups"] == ["system:serviceaccounts:kube-system"]
    assert accounts["userGroups"] == ["system:serviceaccounts"]
    assert policy["rules"][-1] == {"level": "None"}  # and not the requests of people
