"""What the node's first process does before it starts anything: its own mounts and network.

Everything here happens in new namespaces and is gone when they are: no mount, link, route, sysctl or
iptables rule of the machine changes.
"""

from __future__ import annotations

import socket
from pathlib import Path

from outrider_local import addresses
from outrider_local.cgroups import ROOT, InnerMount, Plan
from outrider_local.layout import Layout
from outrider_local.shell import output

#: Kernel settings that kubelet insists on. They are machine-wide, so the node only gets to see the values:
#: small files are mounted over the real ones, and nothing is written to the kernel.
SHOWN_SYSCTLS = {
    "vm/overcommit_memory": 1,
    "vm/panic_on_oom": 0,
    "kernel/panic": 10,
    "kernel/panic_on_oops": 1,
    "kernel/keys/root_maxkeys": 1000000,
    "kernel/keys/root_maxbytes": 25000000,
}
#: These belong to the network namespace and are really set.
NETWORK_SYSCTLS = {"net/ipv4/ip_forward": 1, "net/bridge/bridge-nf-call-iptables": 1}


def isolate(layout: Layout, plan: Plan) -> None:
    """Set up the mounts and the network of the node."""
    _mount("--make-rprivate", "/")
    _mount("-t", "proc", "proc", "/proc")
    _mount("-t", "sysfs", "sysfs", "/sys")
    mount_cgroups(plan)
    _mount_folders(layout)
    _show_sysctls()
    _mount("--make-rshared", "/")
    socket.sethostname(addresses.NODE)
    _network()


def mount_cgroups(plan: Plan) -> None:
    """Mount the hierarchies again: in our cgroup namespace they show the node's cgroups as their roots."""
    if plan.version == 2:
        (only,) = plan.mounts
        _mount("-t", only.kind, "cgroup2", only.point)
        return
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", ROOT)
    for inner in plan.mounts:
        _mount_v1(inner)


def _mount_v1(inner: InnerMount) -> None:
    Path(inner.point).mkdir()
    _mount("-t", inner.kind, "-o", inner.options, "cgroup", inner.point)
    for link in inner.links:
        Path(ROOT, link).symlink_to(Path(inner.point).name)


def _mount_folders(layout: Layout) -> None:
    """/var is an overlay and /run is empty: kubelet, CNI and containerd never meet the machine's own."""
    overlay = f"lowerdir=/var,upperdir={layout.var_upper},workdir={layout.var_work}"
    _mount("-t", "overlay", "-o", overlay, "overlay", "/var")
    _mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", "/run")
    Path("/run/lock").mkdir()
    Path("/var/lib/kubelet").mkdir(parents=True, exist_ok=True)
    _mount("--bind", layout.kubelet, "/var/lib/kubelet")


def _show_sysctls() -> None:
    folder = Path("/run/sysctl")
    folder.mkdir()
    for name, value in SHOWN_SYSCTLS.items():
        shown, real = folder / name.replace("/", "."), Path("/proc/sys") / name
        if real.exists():
            shown.write_text(f"{value}\n")
            _mount("--bind", shown, real)


def _network() -> None:
    _ip("link", "set", "lo", "up")
    _ip("link", "add", "node0", "type", "bridge")
    _ip("addr", "add", f"{addresses.NODE_IP}/{addresses.NODE_PREFIX}", "dev", "node0")
    _ip("link", "set", "node0", "up")
    _ip("route", "add", "default", "via", addresses.NOWHERE, "dev", "node0")
    for name, value in NETWORK_SYSCTLS.items():
        setting = Path("/proc/sys") / name
        if setting.exists():
            setting.write_text(str(value))
        else:
            print(f"no {setting}: is the kernel module br_netfilter loaded?", flush=True)


def _mount(*words: str | Path) -> None:
    output("mount", *words)


def _ip(*words: str) -> None:
    output("ip", *words)
