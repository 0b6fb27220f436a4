"""Whether this machine can do what is about to be asked of it: found out before anything is changed.

``gather`` collects facts; ``check`` is a pure function from facts to problems.
"""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
import sys
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path

from outrider_local import cgroups, environment, forward, gobuild, kernels, node, ports, privileges
from outrider_local.layout import Layout
from outrider_local.ociimage import ARCHITECTURES
from outrider_local.report import EXIT_USAGE, ProblemError, detail, step
from outrider_local.settings import Settings
from outrider_local.shell import find

GIB = 1 << 30
PYTHON = (3, 11)
MEMORY_NEEDED = 5 * GIB

#: System tools and the Debian or Ubuntu package that brings each.
TOOLS = {
    "etcd": "etcd-server",
    "runc": "runc",
    "iptables": "iptables",
    "ip": "iproute2",
    "mount": "mount",
    "nsenter": "util-linux",
    "openssl": "openssl",
    "ldd": "libc-bin",
    kernels.COMPILER: "g++",
}
#: What only the tests need besides.
TEST_TOOLS = {"redis-server": "redis-server", "redis-sentinel": "redis-sentinel"}
#: Services that packages start, which nothing here uses.
SERVICES = {"etcd-server": "etcd", "redis-server": "redis-server", "redis-sentinel": "redis-sentinel"}
ENSUREPIP = "python3-venv"
#: An overlay, which the node's /var and its containers are, cannot be written on top of these.
UNFIT_FILE_SYSTEMS = {
    "overlay",
    "nfs",
    "nfs4",
    "cifs",
    "smb3",
    "9p",
    "ecryptfs",
    "vfat",
    "exfat",
    "ntfs",
    "ntfs3",
}


@dataclass(frozen=True)
class Disk:
    """Room on one file system, and what is to be written there."""

    path: str
    free: int
    needed: int
    purposes: tuple[str, ...]


@dataclass(frozen=True)
class Taken:
    """A wanted port that others use, with a word on the holder (may be empty)."""

    port: int
    holder: str
    #: One that is free.
    instead: int


@dataclass(frozen=True)
class Machine:
    """Facts about this machine."""

    system: str
    architecture: str
    python: tuple[int, int]
    root: bool
    sudo: bool
    apt: bool
    missing_tools: tuple[str, ...]
    ensurepip: bool
    memory: int
    disks: tuple[Disk, ...]
    state_file_system: str
    cgroup_problem: ProblemError | None
    #: Folders that the node would not see, by the variable that moves them (none for the checkout).
    hidden: tuple[tuple[str, Path], ...]
    taken: tuple[Taken, ...]
    node_runs: bool
    missing_test_tools: tuple[str, ...]


def gather(settings: Settings) -> Machine:
    """Look at the machine."""
    running = node.running(settings) is not None
    mountinfo = Path("/proc/self/mountinfo").read_text()
    return Machine(
        system=platform.system(),
        architecture=platform.machine(),
        python=(sys.version_info.major, sys.version_info.minor),
        root=privileges.is_root(),
        sudo=find("sudo") is not None,
        apt=find("apt-get") is not None,
        missing_tools=tuple(tool for tool in TOOLS if find(tool) is None),
        ensurepip=environment.has_ensurepip(),
        memory=_available_memory(),
        disks=_disks(settings),
        state_file_system=file_system(settings.state, mountinfo),
        cgroup_problem=_cgroup_problem(settings),
        hidden=hidden_folders(settings, mountinfo),
        taken=_taken(settings),
        node_runs=running,
        missing_test_tools=tuple(tool for tool in TEST_TOOLS if find(tool) is None),
    )


def check(machine: Machine, settings: Settings) -> list[ProblemError]:
    """Everything that stands in the way, missing packages apart."""
    problems = []
    if machine.system != "Linux":
        what = f"this is {machine.system}; the local cluster needs Linux (namespaces, cgroups)"
        return [
            ProblemError(what, "use a Linux machine, or the chart alone on a cluster of your own (README)")
        ]
    if machine.architecture not in ARCHITECTURES:
        known = ", ".join(ARCHITECTURES)
        problems.append(ProblemError(f"the processor is {machine.architecture}", f"this works on {known}"))
    if machine.python < PYTHON:
        version = ".".join(map(str, machine.python))
        problems.append(
            ProblemError(f"this Python is {version}", "3.11 or newer is needed: make PYTHON=python3.12 up")
        )
    if not machine.root and not machine.sudo:
        problems.append(ProblemError("this needs root, and there is no sudo", "run it as root"))
    if machine.cgroup_problem is not None:
        problems.append(machine.cgroup_problem)
    if machine.state_file_system in UNFIT_FILE_SYSTEMS or machine.state_file_system.startswith("fuse"):
        problems.append(
            ProblemError(
                f"{settings.state} lies on {machine.state_file_system}, which cannot carry containers",
                "set XDG_STATE_HOME to a folder on a local file system such as ext4, xfs or btrfs",
            )
        )
    problems += [_hidden_folder(variable, folder) for variable, folder in machine.hidden]
    problems += [_short_disk(disk) for disk in machine.disks if disk.free < disk.needed]
    if not machine.node_runs and machine.memory < MEMORY_NEEDED:
        free, needed = machine.memory / GIB, MEMORY_NEEDED / GIB
        problems.append(
            ProblemError(
                f"{free:.1f} GiB of memory are free, {needed:.0f} GiB are needed", "end other programs"
            )
        )
    problems += _taken_ports(machine.taken, settings)
    return problems


def packages(machine: Machine) -> list[str]:
    """The Debian packages that bring what is missing."""
    known = TOOLS | TEST_TOOLS
    wanted = [known[tool] for tool in machine.missing_tools]
    return list(dict.fromkeys(wanted if machine.ensurepip else [*wanted, ENSUREPIP]))


def run(settings: Settings, *, with_ports: bool = True) -> None:
    """Check everything, install missing packages; raise when something stands in the way.

    Without ports it is for tests, which choose their own, and need tools of their own.
    """
    machine = gather(settings)
    if not with_ports:
        all_missing = (*machine.missing_tools, *machine.missing_test_tools)
        machine = replace(machine, taken=(), missing_tools=all_missing)
    problems = check(machine, settings)
    missing = packages(machine)
    if missing and not machine.apt:
        tools = ", ".join([*machine.missing_tools, *([] if machine.ensurepip else ["Python's ensurepip"])])
        advice = f"install them with this machine's package manager (Debian calls them {' '.join(missing)})"
        problems.append(ProblemError(f"not installed: {tools}", advice))
    if problems:
        raise ProblemError("\n".join(f"- {problem}" for problem in problems), exit_code=EXIT_USAGE)
    if not machine.node_runs:
        say_what_root_does(machine.root)
    if missing:
        install(missing)


def say_what_root_does(root: bool) -> None:
    """Say before doing."""
    detail(f"{'root' if root else 'sudo'} is used for:")
    for purpose in privileges.NEEDED_FOR:
        detail(f"- {purpose}")


def install(missing: Iterable[str]) -> None:
    """Install Debian packages."""
    names = list(missing)
    step(f"installing system packages: {' '.join(names)}")
    apt = [*privileges.sudo_prefix(), "env", "DEBIAN_FRONTEND=noninteractive", "apt-get", "-qq"]
    with Path(os.devnull).open("wb") as nowhere:
        subprocess.run([*apt, "update"], stdout=nowhere, check=False)
        done = subprocess.run(
            [*apt, "install", "-y", "--no-install-recommends", *names], stdout=nowhere, check=False
        )
    if done.returncode:
        raise ProblemError(
            "apt-get could not install them", f"run: apt-get install {' '.join(names)}", EXIT_USAGE
        )
    if Path("/run/systemd/system").exists():
        for name in names:
            if name in SERVICES:
                end_service(name, SERVICES[name])


def end_service(package: str, service: str) -> None:
    """End what a package has started."""
    detail(f"the package {package} started a service; ending it: systemctl disable --now {service}")
    subprocess.run([*privileges.sudo_prefix(), "systemctl", "disable", "--now", service], check=False)


def file_system(path: Path, mountinfo: str) -> str:
    """The type of the file system that holds a path, existing or not."""
    mount = _mount(path, mountinfo)
    return mount.kind if mount else ""


def hidden_folders(settings: Settings, mountinfo: str) -> tuple[tuple[str, Path], ...]:
    """The folders which the node reads but does not see.

    It has /run, /proc and /sys of its own. Its /var is an overlay over the machine's, without what is mounted
    further below.
    """
    hidden = []
    for variable, folder in (("XDG_CACHE_HOME", settings.cache), ("", Path(os.path.realpath(settings.venv)))):
        mount = _mount(folder, mountinfo)
        below_var = mount and Path("/var") in Path(mount.point).parents
        if below_var or any(folder.is_relative_to(own) for own in ("/run", "/proc", "/sys")):
            hidden.append((variable, folder))
    return tuple(hidden)


def _mount(path: Path, mountinfo: str) -> cgroups.Mount | None:
    """The mount that holds a path, existing or not."""
    mounts = [mount for mount in cgroups.parse_mountinfo(mountinfo) if path.is_relative_to(mount.point)]
    return max(mounts, key=lambda mount: len(mount.point), default=None)


def needs(
    settings: Settings, *, environment_made: bool, uv_apart: bool, built: bool, node_runs: bool
) -> list[tuple[Path, float, str]]:
    """What is going to be written where, in GiB."""
    wanted: list[tuple[Path, float, str]] = [(settings.state, 0.2 if node_runs else 2.0, "the running node")]
    if not environment_made:
        wanted.append((settings.venv, 6.5, "the Python packages"))
    if not environment_made and uv_apart:
        wanted.append((settings.cache.parent / "uv", 6.5, "uv's copies of them"))
    if not built:
        wanted.append((settings.cache, 6.5, "Go's caches and the built programs"))
    return wanted


def _disks(settings: Settings) -> tuple[Disk, ...]:
    wanted = needs(
        settings,
        environment_made=environment.current(settings),
        # On one file system, the environment's files are links to uv's.
        uv_apart=_device(settings.cache) != _device(settings.checkout),
        built=not gobuild.programs(settings.checkout, settings.cache).missing,
        node_runs=node.running(settings) is not None,
    )
    by_device: dict[int, Disk] = {}
    for path, gibibytes, purpose in wanted:
        place, device = _existing(path), _device(path)
        before = by_device.get(device, Disk(str(place), shutil.disk_usage(place).free, 0, ()))
        needed = before.needed + int(gibibytes * GIB)
        by_device[device] = Disk(
            before.path, before.free, needed, (*before.purposes, f"{purpose} {gibibytes:g}")
        )
    return tuple(by_device.values())


def _existing(path: Path) -> Path:
    """The path, or the nearest folder above it that is there."""
    return next(folder for folder in (path, *path.parents) if folder.exists())


def _device(path: Path) -> int:
    return _existing(path).stat().st_dev


def _short_disk(disk: Disk) -> ProblemError:
    return ProblemError(
        f"{disk.free / GIB:.1f} GiB are free at {disk.path}, {disk.needed / GIB:.1f} GiB are needed"
        f" ({', '.join(disk.purposes)})",
        "make room, or move the caches and the node's state with XDG_CACHE_HOME and XDG_STATE_HOME",
    )


def _hidden_folder(variable: str, folder: Path) -> ProblemError:
    what = f"the node reads {folder} but would not see it there: it has /run, /proc and /sys of its own, and"
    return ProblemError(
        f"{what} of /var nothing that is mounted below it",
        f"set {variable} to another folder" if variable else "move the checkout to another folder",
    )


def _taken_ports(taken: Iterable[Taken], settings: Settings) -> list[ProblemError]:
    uses = {
        settings.port: ("OUTRIDER_PORT", "the model's API"),
        settings.api_port: ("OUTRIDER_API_PORT", "the Kubernetes API"),
    }
    # One command that corrects them all.
    command = settings.command("up", {uses[one.port][0]: one.instead for one in taken})
    return [
        ProblemError(
            f"port {one.port} on 127.0.0.1, meant for {uses[one.port][1]}, is taken"
            + (f" by {one.holder}" if one.holder else ""),
            f"choose another: {command}",
        )
        for one in taken
    ]


def _taken(settings: Settings) -> tuple[Taken, ...]:
    found: list[Taken] = []
    for port in _foreign_ports(settings):
        used = (settings.port, settings.api_port, *(one.instead for one in found))
        found.append(Taken(port, ports.holder(port), ports.next_free(port, *used)))
    return tuple(found)


def _foreign_ports(settings: Settings) -> list[int]:
    own = set()
    for forwarder in forward.running(Layout(settings.state)).values():
        if forwarder.process.alive:
            own |= {int(route.partition(":")[0]) for route in forwarder.routes}
    return [
        port for port in (settings.api_port, settings.port) if port not in own and not ports.is_free(port)
    ]


def _available_memory() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return 0


def _cgroup_problem(settings: Settings) -> ProblemError | None:
    try:
        cgroups.plan_here(Layout(settings.state).cgroup)
    except ProblemError as problem:
        return problem
    return None
