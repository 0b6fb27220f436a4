"""The life of a node: up, status, a command inside, down."""

from __future__ import annotations

import fcntl
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TextIO

from outrider_local import addresses, cgroups, configs, forward, pki
from outrider_local.forwarder import Route
from outrider_local.gobuild import Programs, programs
from outrider_local.launcher import Order
from outrider_local.layout import Layout
from outrider_local.ociimage import Configuration, Entry, Image, write_archive, write_layer
from outrider_local.privileges import give_to_caller
from outrider_local.processes import Identity, start_background, write_json
from outrider_local.report import ProblemError, Stopwatch, detail
from outrider_local.settings import Settings
from outrider_local.shell import SYSTEM_PATH, find, output, require, succeeds, tail, without_proxies

_PATIENCE = 180.0
API_FORWARD = "api"
SERVICE_FORWARD = "service"


@dataclass(frozen=True)
class Record:
    """What is known of a node that was started."""

    cgroups: tuple[str, ...]
    launcher: Identity | None = None
    init: Identity | None = None
    ready: bool = False

    def to_json(self) -> dict[str, object]:
        """As it is written to a file."""
        return {
            "cgroups": list(self.cgroups),
            "launcher": self.launcher.to_json() if self.launcher else None,
            "init": self.init.to_json() if self.init else None,
            "ready": self.ready,
        }

    @staticmethod
    def from_json(value: Mapping[str, Any]) -> Record:
        """The reverse of ``to_json``."""
        launcher, init = (
            Identity.from_json(value[key]) if value[key] else None for key in ("launcher", "init")
        )
        return Record(tuple(map(str, value["cgroups"])), launcher, init, bool(value["ready"]))


def read_record(layout: Layout) -> Record | None:
    """The record of the node, if one was ever started and not ended by `down`.

    Of one that is spoilt the cgroups are known all the same, and through them the processes.
    """
    try:
        return Record.from_json(json.loads(layout.record.read_text()))
    except FileNotFoundError:
        return None
    except (ValueError, TypeError, KeyError):
        return Record(tuple(cgroups.find_here(layout.cgroup)))


def running(settings: Settings) -> Record | None:
    """The record of a node whose processes run."""
    record = read_record(Layout(settings.state))
    alive = record and record.ready and record.init and record.init.alive
    return record if alive else None


def healthy(settings: Settings) -> bool:
    """Whether the node runs and its API server answers through the forwarded port."""
    return running(settings) is not None and succeeds(
        *kubectl_command(settings, "--request-timeout=5s", "get", "--raw", "/readyz"),
        env=without_proxies(os.environ),
    )


def kubectl_command(settings: Settings, *words: str) -> list[str]:
    """A kubectl command line that works on the host."""
    kubectl = programs(settings.checkout, settings.cache).path("kubectl")
    return [str(kubectl), f"--kubeconfig={settings.kubeconfig}", *words]


def up(settings: Settings) -> bool:
    """Start the node and the forwarder to its API server; whether anything had to be done. Needs root."""
    layout = Layout(settings.state)
    with _locked(settings):
        record = running(settings)
        if record is not None and record.init is not None:
            return _forward_api(settings, layout, record.init)
        if read_record(layout) is not None:
            detail("an earlier node was not ended properly: cleaning up after it")
        _end(layout)
        _start(settings, layout)
    return True


def _start(settings: Settings, layout: Layout) -> None:
    watch = Stopwatch()
    built = programs(settings.checkout, settings.cache)
    if built.missing:
        names = ", ".join(module.name for module in built.missing)
        raise ProblemError(f"not built yet: {names}", "run the build command first")
    plan = cgroups.plan_here(layout.cgroup)
    _load_modules()
    _own_folder(settings.state)
    layout.make()
    write_json(layout.record, Record(plan.directories).to_json())
    pki.make(layout.pki)
    default_spec = output(built.path("ctr"), "oci", "spec")
    spec = configs.base_spec(default_spec, settings.venv)
    configs.write_all(layout, plan.version, built.path("bridge").parent, require("runc"), spec)
    _pause_image(built, layout.root / "pause.tar")
    try:
        init = _launch(settings, layout, plan, built)
        _forward_api(settings, layout, init)
    except BaseException:
        _end(layout, keep_logs=True)
        detail(f"the logs are in {layout.log}")
        raise
    detail(f"node {settings.name} is ready after {watch} (cgroup v{plan.version})")


def _launch(settings: Settings, layout: Layout, plan: cgroups.Plan, built: Programs) -> Identity:
    order = Order(
        str(layout.root),
        {name: str(folder) for name, folder in built.folders.items()},
        [str(layout.root / "pause.tar")],
    )
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "outrider_local.launcher", str(theirs.fileno())]
    environment = {"PATH": SYSTEM_PATH, "PYTHONPATH": str(settings.local), "LANG": "C.UTF-8"}
    launcher = start_background(command, layout.log / "node.log", environment, pass_fd=theirs.fileno())
    theirs.close()
    record = Record(plan.directories, launcher)
    write_json(layout.record, record.to_json())
    with ours:
        ours.settimeout(_PATIENCE)
        ours.sendall(order.to_json().encode() + b"\n")
        with ours.makefile("r") as lines:
            for line in lines:
                message = json.loads(line)
                if "problem" in message:
                    raise ProblemError(f"the node did not start: {message['problem']}", message["advice"])
                if message.get("init"):
                    record = Record(plan.directories, launcher, Identity.from_json(message["init"]))
                    write_json(layout.record, record.to_json())
                if "ready" in message and record.init is not None:
                    write_json(layout.record, Record(plan.directories, launcher, record.init, True).to_json())
                    return record.init
    raise ProblemError(f"the node ended while it started:\n{tail(layout.log / 'node.log')}")


def _forward_api(settings: Settings, layout: Layout, init: Identity) -> bool:
    route = Route(settings.api_port, addresses.LOOPBACK, addresses.API_PORT)
    started = forward.start(layout, API_FORWARD, init.pid, [route])
    kubeconfig = configs.host_kubeconfig(layout, settings.api_port)
    if not layout.kubeconfig.exists() or layout.kubeconfig.read_text() != kubeconfig:
        descriptor = os.open(layout.kubeconfig, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            file.write(kubeconfig)
        give_to_caller(layout.kubeconfig)
    return started


def forward_port(settings: Settings, name: str, listen: int, address: str, port: int) -> bool:
    """Forward a loopback port to an address of the cluster; whether anything had to be done. Needs root."""
    init = _required_init(settings)
    return forward.start(Layout(settings.state), name, init.pid, [Route(listen, address, port)])


def inside(settings: Settings, command: Sequence[str], *, network_only: bool = False) -> list[str]:
    """A command line that runs ``command`` in the node, or just in its network. Needs root."""
    init = _required_init(settings)
    kubeconfig = Layout(settings.state).kubeconfig_of("admin")
    path = f"{programs(settings.checkout, settings.cache).search_path()}:{SYSTEM_PATH}"
    others = [] if network_only else ["--mount", "--uts", "--ipc", "--pid", "--cgroup"]
    nsenter = [require("nsenter"), f"--target={init.pid}", "--net", *others]
    return [*nsenter, "--", "env", f"PATH={path}", f"KUBECONFIG={kubeconfig}", *command]


def _required_init(settings: Settings) -> Identity:
    record = running(settings)
    if record is None or record.init is None:
        raise ProblemError(f"the node {settings.name} does not run", "start it with the up command")
    return record.init


def images(settings: Settings) -> set[str]:
    """The names of the images that the node has. Needs root."""
    return set(output(*inside(settings, ["ctr", "--namespace=k8s.io", "images", "list", "--quiet"])).split())


def import_image(settings: Settings, archive: Path) -> None:
    """Give the node an image. Needs root."""
    output(*inside(settings, ["ctr", "--namespace=k8s.io", "images", "import", str(archive)]))


def down(settings: Settings) -> bool:
    """End what `up` started and remove what it made; whether there was anything. Needs root."""
    layout = Layout(settings.state)
    if not settings.state.exists():
        return False
    with _locked(settings) as lock:
        _end(layout)
        lock.unlink()
    with suppress(OSError):  # other nodes may live there
        settings.state_home.rmdir()
    return True


def _end(layout: Layout, keep_logs: bool = False) -> None:
    record = read_record(layout)
    if layout.forwards.exists():
        forward.stop_all(layout)
    if record is not None:
        if record.init is not None:
            record.init.signal(signal.SIGTERM)
        elif record.launcher is not None:
            record.launcher.signal(signal.SIGTERM)
        if record.launcher is not None and not record.launcher.wait(20):
            record.launcher.signal(signal.SIGKILL)
            record.launcher.wait(5)
        for process in cgroups.members(record.cgroups):
            process.signal(signal.SIGKILL)
        left = cgroups.remove(record.cgroups)
        if left:
            raise ProblemError(f"these cgroups hold processes that do not end: {' '.join(left)}")
    if layout.root.exists():
        _remove(layout, keep_logs)


def _remove(layout: Layout, keep_logs: bool) -> None:
    for path in layout.root.iterdir():
        if keep_logs and path == layout.log:
            continue
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        else:
            path.unlink()
    if not keep_logs:
        layout.root.rmdir()


def _pause_image(built: Programs, archive: Path) -> None:
    """The image of the process that holds a pod's namespaces."""
    with tempfile.TemporaryDirectory(dir=archive.parent) as folder:
        layer = write_layer([Entry("pause", source=built.path("pause"), mode=0o755)], Path(folder) / "layer")
        image = Image((layer,), Configuration(("/pause",), user="65532:65532"))
        write_archive(image, addresses.PAUSE_IMAGE, archive)


def _load_modules() -> None:
    """Load the two kernel modules that a node uses, where they are modules and not loaded."""
    probes = {
        "overlay": lambda: "overlay" in Path("/proc/filesystems").read_text(),
        "br_netfilter": Path("/proc/sys/net/bridge").exists,
    }
    for module, present in probes.items():
        if present():
            continue
        detail(f"loading the kernel module {module}")
        subprocess.run([find("modprobe") or "modprobe", module], capture_output=True, check=False)
        if not present():
            detail(f"it could not be loaded; pods may not work without it: modprobe {module}")


def _own_folder(folder: Path) -> None:
    """Make the state folder and those above it that are missing, for the user who called sudo."""
    missing = [path for path in (folder, *folder.parents) if not path.exists()]
    for path in reversed(missing):
        path.mkdir(mode=0o755, exist_ok=True)
        give_to_caller(path)


@contextmanager
def _locked(settings: Settings) -> Iterator[Path]:
    """One `up` or `down` of a node at a time; the lock file, which its holder may remove."""
    path = settings.state_home / f".{settings.name}.lock"
    while True:
        _own_folder(settings.state_home)
        with suppress(FileNotFoundError):  # a `down` has just removed the folder
            lock = path.open("w")
            if _is_locked(lock, path):
                break
            lock.close()
    with lock:
        yield path


def _is_locked(lock: TextIO, path: Path) -> bool:
    """Lock an open file; False when it is the lock no more, because its last holder has removed it."""
    try:
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise ProblemError(
            f"another command is starting or ending the node {path.stem[1:]}", "wait for it"
        ) from None
    return path.exists() and os.path.samestat(os.fstat(lock.fileno()), path.stat())
