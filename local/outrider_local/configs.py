"""The components' configuration files, as text. Pure, so that they can be looked at in tests."""

from __future__ import annotations

import base64
import json
from pathlib import Path

from outrider_local import addresses
from outrider_local.layout import Layout

COMPONENT_USERS = ("admin", "controller-manager", "scheduler", "proxy", "kubelet")


def kubeconfig(server: str, cluster: dict[str, str], user: dict[str, str]) -> str:
    """A kubeconfig with one cluster and one user (JSON is YAML)."""
    config = {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "outrider",
        "clusters": [{"name": "outrider", "cluster": {"server": server, **cluster}}],
        "users": [{"name": "outrider", "user": user}],
        "contexts": [{"name": "outrider", "context": {"cluster": "outrider", "user": "outrider"}}],
    }
    return json.dumps(config, indent=1) + "\n"


def component_kubeconfig(layout: Layout, user: str) -> str:
    """The kubeconfig of a component inside the node: it names the certificate files."""
    return kubeconfig(
        f"https://{addresses.LOOPBACK}:{addresses.API_PORT}",
        {"certificate-authority": str(layout.pki / "ca.crt")},
        {
            "client-certificate": str(layout.pki / f"{user}.crt"),
            "client-key": str(layout.pki / f"{user}.key"),
        },
    )


def host_kubeconfig(layout: Layout, port: int) -> str:
    """The administrator's kubeconfig for the host, with the certificates inside: the file stands alone."""

    def data(name: str) -> str:
        return base64.b64encode((layout.pki / name).read_bytes()).decode()

    return kubeconfig(
        f"https://{addresses.LOOPBACK}:{port}",
        {"certificate-authority-data": data("ca.crt")},
        {"client-certificate-data": data("admin.crt"), "client-key-data": data("admin.key")},
    )


def containerd(layout: Layout, cni_plugins: Path, runc: str, base_spec: Path) -> str:
    """No plugins that a single node does not use, and our base specification for containers.

    ``restrict_oom_score_adj``: in a container without CAP_SYS_RESOURCE nobody may lower an OOM score, and
    runc fails in an obscure way when asked to.
    """
    runtime = "plugins.'io.containerd.cri.v1.runtime'"
    images = "plugins.'io.containerd.cri.v1.images'"
    return f"""\
version = 3
root = '{layout.containerd}'
state = '/run/containerd'
disabled_plugins = [
  'io.containerd.nri.v1.nri',
  'io.containerd.snapshotter.v1.erofs',
  'io.containerd.tracing.processor.v1.otlp',
]

[grpc]
  address = '/run/containerd/containerd.sock'

[plugins.'io.containerd.internal.v1.opt']
  path = '{layout.root}/opt'

[{images}]
  snapshotter = 'overlayfs'

[{images}.pinned_images]
  sandbox = '{addresses.PAUSE_IMAGE}'

[{runtime}]
  restrict_oom_score_adj = true
  ignore_deprecation_warnings = ['io.containerd.deprecation/cgroup-v1']

[{runtime}.cni]
  bin_dirs = ['{cni_plugins}']
  conf_dir = '{layout.cni}'

[{runtime}.containerd.runtimes.runc]
  runtime_type = 'io.containerd.runc.v2'
  base_runtime_spec = '{base_spec}'

[{runtime}.containerd.runtimes.runc.options]
  BinaryName = '{runc}'
  SystemdCgroup = false
"""


def base_spec(default: str, environment: Path) -> str:
    """The default container specification plus the project's Python environment, read-only.

    The environment (some GB) reaches every container by this mount instead of through an image layer; charts
    and custom resources need not know of it, and Pod Security has nothing against it.
    """
    spec = json.loads(default)
    spec["mounts"].append(
        {
            "destination": addresses.ENVIRONMENT_MOUNT,
            "type": "bind",
            "source": str(environment),
            "options": ["rbind", "ro", "nosuid", "nodev"],
        }
    )
    return json.dumps(spec, indent=1) + "\n"


def cni() -> str:
    """The pod network: a bridge, and host ports."""
    bridge = {
        "type": "bridge",
        "bridge": "cni0",
        "isGateway": True,
        "ipMasq": False,
        "hairpinMode": True,
        "ipam": {
            "type": "host-local",
            "ranges": [[{"subnet": addresses.POD_NETWORK}]],
            "routes": [{"dst": "0.0.0.0/0"}],
            "dataDir": "/run/cni-ipam",
        },
    }
    portmap = {"type": "portmap", "capabilities": {"portMappings": True}}
    return (
        json.dumps({"cniVersion": "1.0.0", "name": "outrider", "plugins": [bridge, portmap]}, indent=1) + "\n"
    )


def audit_policy() -> str:
    """Who asked for what, without bodies: pods (the operator, wherever it is), and who but the control plane
    touched a Lease.

    A policy matches groups by their whole name. So the control plane's own service accounts are taken out
    first; all others follow, whatever their namespace.
    """
    leases = {"group": "coordination.k8s.io", "resources": ["leases"]}
    policy = {
        "apiVersion": "audit.k8s.io/v1",
        "kind": "Policy",
        "omitStages": ["RequestReceived"],
        "rules": [
            {"level": "None", "userGroups": ["system:serviceaccounts:kube-system"]},
            {"level": "Metadata", "userGroups": ["system:serviceaccounts"]},
            {"level": "None", "resources": [leases], "namespaces": ["kube-system", "kube-node-lease"]},
            {"level": "Metadata", "resources": [leases]},
            {"level": "None"},
        ],
    }
    return json.dumps(policy, indent=1) + "\n"


def kubelet(layout: Layout, cgroup_version: int) -> str:
    """What kubelet runs by.

    - ``failCgroupV1: false`` only where it is needed: kubelet refuses cgroup v1 by default.
    - ``protectKernelDefaults``: the node shows kubelet the kernel settings that it wants (see ``isolate``),
      so that it writes none.
    - ``syncFrequency``: a changed ConfigMap reaches a pod within seconds, not a minute.
    """
    thresholds = {
        "memory.available": "200Mi",
        "nodefs.available": "1%",
        "nodefs.inodesFree": "1%",
        "imagefs.available": "1%",
        "imagefs.inodesFree": "1%",
    }
    config: dict[str, object] = {
        "apiVersion": "kubelet.config.k8s.io/v1beta1",
        "kind": "KubeletConfiguration",
        "cgroupDriver": "cgroupfs",
        "cgroupsPerQOS": True,
        "enforceNodeAllocatable": ["pods"],
        "failSwapOn": False,
        "protectKernelDefaults": True,
        "containerRuntimeEndpoint": "unix:///run/containerd/containerd.sock",
        "address": "0.0.0.0",
        "readOnlyPort": 0,
        "authentication": {
            "anonymous": {"enabled": False},
            "webhook": {"enabled": True},
            "x509": {"clientCAFile": str(layout.pki / "ca.crt")},
        },
        "authorization": {"mode": "Webhook"},
        "tlsCertFile": str(layout.pki / "kubelet-server.crt"),
        "tlsPrivateKeyFile": str(layout.pki / "kubelet-server.key"),
        "clusterDomain": addresses.CLUSTER_DOMAIN,
        "clusterDNS": [addresses.NODE_IP],
        "resolvConf": str(layout.conf / "resolv.conf"),
        "volumePluginDir": "/var/lib/kubelet/volume-plugins",
        "evictionHard": thresholds,
        # Images come from files and cannot be fetched again: never collect them.
        "imageGCHighThresholdPercent": 100,
        "imageGCLowThresholdPercent": 99,
        "syncFrequency": "10s",
        "nodeStatusUpdateFrequency": "5s",
        "registryPullQPS": 0,
        "eventRecordQPS": 0,
    }
    if cgroup_version == 1:
        config["failCgroupV1"] = False
    return json.dumps(config, indent=1) + "\n"


def kube_proxy(layout: Layout) -> str:
    """kube-proxy; conntrack settings are the machine's and stay as they are."""
    config = {
        "apiVersion": "kubeproxy.config.k8s.io/v1alpha1",
        "kind": "KubeProxyConfiguration",
        "mode": "iptables",
        "hostnameOverride": addresses.NODE,
        "clusterCIDR": addresses.POD_NETWORK,
        "clientConnection": {"kubeconfig": str(layout.kubeconfig_of("proxy"))},
        "healthzBindAddress": "127.0.0.1:10256",
        "metricsBindAddress": "127.0.0.1:10249",
        "conntrack": {"maxPerCore": 0, "min": 0, "tcpEstablishedTimeout": "0s", "tcpCloseWaitTimeout": "0s"},
        "iptables": {"minSyncPeriod": "0s", "syncPeriod": "30s"},
    }
    return json.dumps(config, indent=1) + "\n"


def corefile(layout: Layout) -> str:
    """CoreDNS: the cluster's names only, since no packet leaves the node."""
    return f"""\
.:53 {{
  errors
  health {addresses.LOOPBACK}:{addresses.DNS_HEALTH_PORT}
  ready {addresses.LOOPBACK}:{addresses.DNS_READY_PORT}
  kubernetes {addresses.CLUSTER_DOMAIN} in-addr.arpa {{
    kubeconfig {layout.kubeconfig_of("admin")}
    pods insecure
  }}
  cache 5
}}
"""


def write_all(layout: Layout, cgroup_version: int, cni_plugins: Path, runc: str, base_spec: str) -> None:
    """Write every file; certificates must exist."""
    files = {
        layout.conf / "base-spec.json": base_spec,
        layout.conf / "containerd.toml": containerd(
            layout, cni_plugins, runc, layout.conf / "base-spec.json"
        ),
        layout.cni / "10-outrider.conflist": cni(),
        layout.conf / "audit.json": audit_policy(),
        layout.conf / "kubelet.json": kubelet(layout, cgroup_version),
        layout.conf / "proxy.json": kube_proxy(layout),
        layout.conf / "Corefile": corefile(layout),
        layout.conf / "resolv.conf": f"nameserver {addresses.LOOPBACK}\n",
        **{layout.kubeconfig_of(user): component_kubeconfig(layout, user) for user in COMPONENT_USERS},
    }
    for path, text in files.items():
        path.write_text(text)
