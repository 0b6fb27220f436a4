"""Starting, finding and ending forwarders, which let the machine's loopback into the node."""

from __future__ import annotations

import json
import os
import socket
import sys
from dataclasses import dataclass
from pathlib import Path

from outrider_local.forwarder import Route
from outrider_local.layout import Layout
from outrider_local.processes import Identity, start_background, write_json
from outrider_local.report import ProblemError
from outrider_local.shell import SYSTEM_PATH

_PATIENCE = 20


@dataclass(frozen=True)
class Forward:
    """A forwarder that was started."""

    name: str
    routes: tuple[str, ...]
    into: int
    process: Identity


def start(layout: Layout, name: str, into: int, routes: list[Route]) -> bool:
    """Forward ``routes`` into the network of process ``into``; whether anything had to be done."""
    wanted = tuple(str(route) for route in routes)
    current = running(layout).get(name)
    if current is not None:
        if current.routes == wanted and current.into == into and current.process.alive:
            return False
        current.process.end(2)
    ours, theirs = socket.socketpair()
    command = [sys.executable, "-m", "outrider_local.forwarder", str(theirs.fileno()), str(into), *wanted]
    environment = {
        "PATH": SYSTEM_PATH,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        **{key: value for key, value in os.environ.items() if key in ("SUDO_UID", "SUDO_GID")},
    }
    process = start_background(
        command, layout.log / f"forward-{name}.log", environment, pass_fd=theirs.fileno()
    )
    theirs.close()
    record = {"name": name, "routes": wanted, "into": into, "process": process.to_json()}
    write_json(layout.forwards / f"{name}.json", record)
    with ours:
        ours.settimeout(_PATIENCE)
        answer = ours.recv(4096).decode(errors="replace").strip()
    if answer != "ready":
        (layout.forwards / f"{name}.json").unlink()
        ports = ", ".join(str(route.listen) for route in routes)
        raise ProblemError(
            f"cannot forward port {ports} into the node: {answer or 'the forwarder ended'}",
            "choose other ports with OUTRIDER_API_PORT and OUTRIDER_PORT",
        )
    return True


def running(layout: Layout) -> dict[str, Forward]:
    """The forwarders on record, alive or not."""
    found = {}
    for path in sorted(layout.forwards.glob("*.json")):
        value = json.loads(path.read_text())
        process = Identity.from_json(value["process"])
        found[value["name"]] = Forward(value["name"], tuple(value["routes"]), value["into"], process)
    return found


def stop_all(layout: Layout) -> None:
    """End every forwarder on record."""
    for name, forward in running(layout).items():
        forward.process.end(2)
        (layout.forwards / f"{name}.json").unlink(missing_ok=True)
