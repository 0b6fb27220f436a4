"""Cgroups for a node, on machines with cgroup v1, v2 or both.

The node gets cgroups of its own, whose name no other node has, and a cgroup namespace whose root they are;
kubelet and runc then work below them as if the machine were theirs. The machine's own mounts and cgroups stay
as they are.

The planning half is pure: it reads the texts of ``/proc/self/mountinfo`` and ``/proc/self/cgroup`` and, for
v2, a few files below the mount through a function that is passed in.
"""

from __future__ import annotations

import os
import re
import time
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from outrider_local.processes import Identity, identify
from outrider_local.report import ProblemError

ROOT = "/sys/fs/cgroup"
#: What kubelet looks for on cgroup v1; it wants the named hierarchy of systemd too, even without systemd.
V1_CONTROLLERS = ("cpu", "cpuacct", "cpuset", "memory", "devices", "freezer", "blkio", "pids", "name=systemd")
#: What it looks for on v2; the optional ones are passed on where the machine has them.
V2_CONTROLLERS = ("cpu", "cpuset", "memory", "pids")
V2_OPTIONAL = ("io", "hugetlb")
#: A v2 cgroup that hands controllers to its children may hold no processes itself: they go into these leaves.
NODE_LEAF = "node"
EVACUATED_LEAF = "outrider-rest"

#: Reads a file below the cgroup mount; None when it does not exist.
Reader = Callable[[str], str | None]


@dataclass(frozen=True)
class Mount:
    """One line of mountinfo, as far as it matters here."""

    root: str
    point: str
    options: frozenset[str]
    kind: str
    super_options: frozenset[str]


@dataclass(frozen=True)
class InnerMount:
    """A cgroup file system that the node mounts for itself."""

    kind: str
    options: str
    point: str
    #: Names that lead to it, where several controllers share one hierarchy.
    links: tuple[str, ...] = ()


@dataclass(frozen=True)
class Plan:
    """What to make for a node, and how it sees it."""

    version: int
    #: The node's own cgroups, by their path on the machine: made by `up`, removed by `down`.
    directories: tuple[str, ...]
    mounts: tuple[InnerMount, ...]
    #: v1: the cpuset cgroup, which must be given processors and memory nodes before it takes processes.
    cpuset: str = ""
    #: v2: the controllers to hand down, and the cgroup above ours.
    controllers: tuple[str, ...] = ()
    parent: str = ""
    #: v2: whether the parent holds processes which have to go into a leaf first.
    evacuate: bool = field(default=False)


def plan(name: str, mountinfo: str, own: str, read: Reader) -> Plan:
    """Choose the version and lay out the node's cgroups. v1 wins where it holds the memory controller."""
    mounts = parse_mountinfo(mountinfo)
    v1: dict[str, Mount] = {}
    for mount in mounts:
        for option in mount.super_options if mount.kind == "cgroup" else ():
            v1.setdefault(option, mount)
    if "memory" in v1:
        return _plan_v1(name, v1, parse_membership(own))
    unified = [mount for mount in mounts if mount.kind == "cgroup2"]
    if unified:
        return _plan_v2(name, unified[0], read)
    raise ProblemError(
        "no cgroup hierarchy is mounted on this machine", f"mount one at {ROOT}: mount -t cgroup2 none {ROOT}"
    )


def plan_here(name: str) -> Plan:
    """The plan for this process on this machine."""
    return plan(
        name, Path("/proc/self/mountinfo").read_text(), Path("/proc/self/cgroup").read_text(), read_file
    )


def read_file(path: str) -> str | None:
    """The content of a file, or None."""
    try:
        return Path(path).read_text()
    except OSError:
        return None


def parse_mountinfo(text: str) -> list[Mount]:
    """The mounts of a process, from the text of its mountinfo."""
    mounts = []
    for line in text.splitlines():
        own, separator, rest = line.partition(" - ")
        fields, tail = own.split(" "), rest.split(" ")
        if separator and len(fields) >= 6 and len(tail) >= 3:
            mounts.append(
                Mount(
                    root=_unescape(fields[3]),
                    point=_unescape(fields[4]),
                    options=frozenset(fields[5].split(",")),
                    kind=tail[0],
                    super_options=frozenset(tail[2].split(",")),
                )
            )
    return mounts


def parse_membership(text: str) -> dict[str, str]:
    """``{controller: cgroup}`` from the text of /proc/PID/cgroup; v2 is under the empty name."""
    membership = {}
    for line in text.splitlines():
        _, controllers, path = line.split(":", 2)
        for controller in controllers.split(","):
            membership[controller] = path
    return membership


def _unescape(text: str) -> str:
    return re.sub(r"\\([0-7]{3})", lambda match: chr(int(match[1], 8)), text)


def _plan_v1(name: str, hierarchies: dict[str, Mount], own: dict[str, str]) -> Plan:
    missing = [controller for controller in V1_CONTROLLERS if controller not in hierarchies]
    if missing:
        raise ProblemError(
            f"this machine has cgroup v1 without {', '.join(missing)}",
            f"mount them, for example: mount -t cgroup -o {missing[0]} cgroup {ROOT}/{missing[0]}",
        )
    directories: list[str] = []
    inner: list[InnerMount] = []
    cpuset = ""
    # One hierarchy may carry several controllers (cpu and cpuacct mostly do): it is mounted once.
    for point in dict.fromkeys(hierarchies[controller].point for controller in V1_CONTROLLERS):
        together = tuple(c for c in V1_CONTROLLERS if hierarchies[c].point == point)
        mount = hierarchies[together[0]]
        here = own.get(together[0], "/")
        below = os.path.relpath(here, mount.root) if Path(here).is_relative_to(mount.root) else "."
        directory = os.path.normpath(f"{point}/{below}/{name}")
        directories.append(directory)
        if "cpuset" in together:
            cpuset = directory
        names = [controller.removeprefix("name=") for controller in together]
        options = ",".join(f"none,{c}" if c.startswith("name=") else c for c in together)
        links = tuple(names) if len(names) > 1 else ()
        inner.append(InnerMount("cgroup", options, f"{ROOT}/{','.join(names)}", links))
    return Plan(1, tuple(directories), tuple(inner), cpuset=cpuset)


def _plan_v2(name: str, mount: Mount, read: Reader) -> Plan:
    parent = mount.point
    if "ro" in mount.options:
        raise ProblemError(
            f"{parent} is mounted read-only, as in a container without privileges",
            "run on the machine itself, or in a privileged container with a cgroup namespace of its own",
        )
    available = (read(f"{parent}/cgroup.controllers") or "").split()
    missing = [controller for controller in V2_CONTROLLERS if controller not in available]
    if missing:
        raise ProblemError(
            f"the cgroup v2 hierarchy at {parent} lacks {', '.join(missing)}",
            "the kernel must have them and no cgroup v1 hierarchy may hold them;"
            " in a container, they must be delegated to it",
        )
    # The machine's real root cgroup (it alone has no cgroup.type) may hold processes beside its children.
    inner_root = read(f"{parent}/cgroup.type") is not None
    occupied = bool((read(f"{parent}/cgroup.procs") or "").strip())
    return Plan(
        2,
        (f"{parent}/{name}",),
        (InnerMount("cgroup2", "", ROOT),),
        controllers=tuple(c for c in (*V2_CONTROLLERS, *V2_OPTIONAL) if c in available),
        parent=parent,
        evacuate=inner_root and occupied,
    )


def make(plan: Plan) -> None:
    """Make the node's cgroups."""
    if plan.version == 2:
        if plan.evacuate:
            leaf = Path(plan.parent) / EVACUATED_LEAF
            leaf.mkdir(exist_ok=True)
            _move((Path(plan.parent) / "cgroup.procs").read_text().split(), leaf)
        _hand_down(Path(plan.parent), plan.controllers)
    for directory in plan.directories:
        Path(directory).mkdir(parents=True, exist_ok=True)
    if plan.cpuset:
        cpuset = Path(plan.cpuset)
        for file in ("cpuset.cpus", "cpuset.mems"):
            (cpuset / file).write_text((cpuset.parent / file).read_text())
        (cpuset / "cgroup.clone_children").write_text("1")


def enter(plan: Plan) -> None:
    """Move this process into the node's cgroups. A cgroup namespace made after this has them as its root."""
    for directory in plan.directories:
        (Path(directory) / "cgroup.procs").write_text(str(os.getpid()))


def settle(plan: Plan) -> None:
    """On v2, once the cgroup namespace is made: move into a leaf, so that its root can have children."""
    if plan.version == 2:
        root = Path(plan.directories[0])
        leaf = root / NODE_LEAF
        leaf.mkdir(exist_ok=True)
        (leaf / "cgroup.procs").write_text(str(os.getpid()))
        _hand_down(root, plan.controllers)


def find(name: str, mountinfo: str) -> list[str]:
    """The cgroups of a name, wherever they lie: on v1 they are below those of whoever made them."""
    points = {mount.point for mount in parse_mountinfo(mountinfo) if mount.kind in ("cgroup", "cgroup2")}
    found = []
    for point in sorted(points):
        for folder, children, _ in os.walk(point):
            if name in children:
                found.append(f"{folder}/{name}")
                children.remove(name)
    return found


def find_here(name: str) -> list[str]:
    """The cgroups of a name on this machine."""
    return find(name, Path("/proc/self/mountinfo").read_text())


def members(directories: Iterable[str]) -> list[Identity]:
    """The processes in cgroups and in all below them."""
    pids = set()
    for directory in directories:
        for folder, _, _ in os.walk(directory):
            pids |= {int(pid) for pid in (read_file(f"{folder}/cgroup.procs") or "").split()}
    return [identity for pid in sorted(pids) if (identity := identify(pid))]


def remove(directories: Iterable[str], seconds: float = 5) -> list[str]:
    """Remove cgroups with all below them; return those that would not go within the time."""
    end = time.monotonic() + seconds
    left = [directory for directory in directories if Path(directory).is_dir()]
    while left:
        for directory in left:
            for folder, _, _ in os.walk(directory, topdown=False):
                with suppress(OSError):  # processes of it are still ending
                    Path(folder).rmdir()
        left = [directory for directory in left if Path(directory).is_dir()]
        if time.monotonic() > end:
            break
        if left:
            time.sleep(0.1)
    return left


def _hand_down(cgroup: Path, controllers: Iterable[str]) -> None:
    control = cgroup / "cgroup.subtree_control"
    active = control.read_text().split()
    for controller in controllers:
        if controller not in active:
            control.write_text(f"+{controller}")


def _move(pids: Iterable[str], cgroup: Path) -> None:
    for pid in pids:
        with suppress(OSError):  # it has ended, or is a kernel thread that stays where it is
            (cgroup / "cgroup.procs").write_text(pid)
