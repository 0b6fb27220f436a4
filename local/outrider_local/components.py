"""The node's components and how each is started."""

from __future__ import annotations

from outrider_local import addresses
from outrider_local.gobuild import Programs
from outrider_local.layout import Layout
from outrider_local.shell import require

#: The order in which they are asked to end.
STOP_ORDER = (
    "kubelet",
    "kube-proxy",
    "coredns",
    "kube-scheduler",
    "kube-controller-manager",
    "kube-apiserver",
    "containerd",
    "etcd",
)


def commands(layout: Layout, programs: Programs) -> dict[str, list[str]]:
    """``{component: command line}``."""
    pki, conf = layout.pki, layout.conf
    etcd = f"http://{addresses.LOOPBACK}:{addresses.ETCD_PORT}"

    def program(name: str) -> str:
        return str(programs.path(name))

    return {
        "etcd": [
            require("etcd"),
            f"--data-dir={layout.etcd}",
            f"--listen-client-urls={etcd}",
            f"--advertise-client-urls={etcd}",
            f"--listen-peer-urls=http://{addresses.LOOPBACK}:{addresses.ETCD_PEER_PORT}",
            "--logger=zap",
            "--log-level=warn",
        ],
        "containerd": [program("containerd"), f"--config={conf}/containerd.toml", "--log-level=info"],
        "kube-apiserver": [
            program("kube-apiserver"),
            f"--etcd-servers={etcd}",
            f"--advertise-address={addresses.NODE_IP}",
            f"--secure-port={addresses.API_PORT}",
            f"--client-ca-file={pki}/ca.crt",
            f"--tls-cert-file={pki}/apiserver.crt",
            f"--tls-private-key-file={pki}/apiserver.key",
            f"--kubelet-client-certificate={pki}/apiserver-kubelet.crt",
            f"--kubelet-client-key={pki}/apiserver-kubelet.key",
            f"--kubelet-certificate-authority={pki}/ca.crt",
            "--kubelet-preferred-address-types=InternalIP",
            f"--service-account-key-file={pki}/sa.pub",
            f"--service-account-signing-key-file={pki}/sa.key",
            f"--service-account-issuer=https://kubernetes.default.svc.{addresses.CLUSTER_DOMAIN}",
            f"--service-cluster-ip-range={addresses.SERVICE_NETWORK}",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            f"--audit-policy-file={conf}/audit.json",
            f"--audit-log-path={layout.audit_log}",
            # MiB a part, and older parts kept: a busy operator writes about 2 MiB for a thousand requests.
            "--audit-log-maxsize=50",
            "--audit-log-maxbackup=3",
            "--allow-privileged=true",
        ],
        "kube-controller-manager": [
            program("kube-controller-manager"),
            f"--kubeconfig={layout.kubeconfig_of('controller-manager')}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
            f"--service-account-private-key-file={pki}/sa.key",
            f"--root-ca-file={pki}/ca.crt",
            f"--cluster-signing-cert-file={pki}/ca.crt",
            f"--cluster-signing-key-file={pki}/ca.key",
            "--use-service-account-credentials=true",
        ],
        "kube-scheduler": [
            program("kube-scheduler"),
            f"--kubeconfig={layout.kubeconfig_of('scheduler')}",
            "--leader-elect=false",
            "--bind-address=127.0.0.1",
        ],
        "kubelet": [
            program("kubelet"),
            f"--config={conf}/kubelet.json",
            f"--kubeconfig={layout.kubeconfig_of('kubelet')}",
            f"--hostname-override={addresses.NODE}",
            f"--node-ip={addresses.NODE_IP}",
            "--root-dir=/var/lib/kubelet",
            "--v=2",
        ],
        "kube-proxy": [program("kube-proxy"), f"--config={conf}/proxy.json", "--v=2"],
        "coredns": [program("coredns"), "-conf", f"{conf}/Corefile"],
    }
