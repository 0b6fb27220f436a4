"""The files below a node's state folder."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Layout:
    """Paths of one node. All but the kubeconfig belong to whoever runs the node (root)."""

    root: Path

    @property
    def cgroup(self) -> str:
        """The name of the node's cgroups: no other state folder of this machine has the same."""
        return f"{self.root.name}-{hashlib.sha256(str(self.root).encode()).hexdigest()[:8]}"

    @property
    def record(self) -> Path:
        """What `down` has to end and remove; written before anything is started."""
        return self.root / "node.json"

    @property
    def forwards(self) -> Path:
        """One file for each forwarder that runs."""
        return self.root / "forwards"

    @property
    def kubeconfig(self) -> Path:
        """For kubectl and helm on the host."""
        return self.root / "kubeconfig"

    @property
    def pki(self) -> Path:
        """Keys and certificates; closed to others."""
        return self.root / "pki"

    @property
    def conf(self) -> Path:
        """The components' configuration."""
        return self.root / "conf"

    @property
    def cni(self) -> Path:
        """The pod network."""
        return self.conf / "cni"

    @property
    def log(self) -> Path:
        """One log a component, and those of the node and its forwarders."""
        return self.root / "log"

    @property
    def audit_log(self) -> Path:
        """What service accounts asked of the API server, a JSON object a line; older parts lie beside it."""
        return self.log / "audit.log"

    @property
    def etcd(self) -> Path:
        """Etcd's data."""
        return self.root / "etcd"

    @property
    def containerd(self) -> Path:
        """Containerd's images and snapshots."""
        return self.root / "containerd"

    @property
    def kubelet(self) -> Path:
        """Kubelet's folder, which the node sees as /var/lib/kubelet."""
        return self.root / "kubelet"

    @property
    def var_upper(self) -> Path:
        """What the node writes below /var."""
        return self.root / "var-upper"

    @property
    def var_work(self) -> Path:
        """Scratch space of the overlay over /var."""
        return self.root / "var-work"

    def make(self) -> None:
        """Make every folder."""
        for folder in (
            self.forwards,
            self.cni,
            self.log,
            self.etcd,
            self.containerd,
            self.kubelet,
            self.var_upper,
            self.var_work,
        ):
            folder.mkdir(parents=True, exist_ok=True)

    def kubeconfig_of(self, user: str) -> Path:
        """The kubeconfig of a component, for use inside the node."""
        return self.conf / f"{user}.kubeconfig"
