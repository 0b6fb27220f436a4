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
from outrider_local.processes import Identity, identify, start_background, write_json
from outrider_local.report import ProblemError
from outrider_local.shell import SYSTEM_PATH

_PATIENCE = 20
_MODULE = "outrider_local.forwarder"


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
    record = layout.forwards / f"{name}.json"
    own = [_MODULE, str(theirs.fileno()), str(record), str(into)]
    command = [sys.executable, "-m", *own, *wanted]
    environment = {
        "PATH": SYSTEM_PATH,
        "PYTHONPATH": str(Path(__file__).resolve().parents[1]),
        **{key: value for key, value in os.environ.items() if key in ("SUDO_UID", "SUDO_GID")},
    }
    process = start_background(
        command, layout.log / f"forward-{name}.log", environment, pass_fd=theirs.fileno()
    )
    theirs.close()
    write_json(record, {"name": name, "routes": wanted, "into": into, "process": process.to_json()})
    with ours:
        ours.settimeout(_PATIENCE)
        answer = ours.recv(4096).decode(errors="replace").strip()
    if answer != "ready":
        record.unlink()
        ports = ", ".join(str(route.listen) for route in routes)
        raise ProblemError(
            f"cannot forward port {ports} into the node: {answer or 'the forwarder ended'}",
            "choose other ports with OUTRIDER_API_PORT and OUTRIDER_PORT",
        )
    return True


def running(layout: Layout) -> dict[str, Forward]:
    """The forwarders on record, alive or not. One whose record is spoilt counts while it runs."""
    read = [_read(path) or _search(path) for path in sorted(layout.forwards.glob("*.json"))]
    return {forward.name: forward for forward in read if forward is not None}


def stop_all(layout: Layout) -> None:
    """End every forwarder on record."""
    for forward in running(layout).values():
        forward.process.end(2)
    for path in layout.forwards.glob("*.json"):
        path.unlink(missing_ok=True)


def _read(path: Path) -> Forward | None:
    """What a record says, if it can be read."""
    try:
        value = json.loads(path.read_text())
        process = Identity.from_json(value["process"])
        return Forward(path.stem, tuple(map(str, value["routes"])), int(value["into"]), process)
    except (ValueError, TypeError, KeyError):
        return None


def _search(path: Path) -> Forward | None:
    """The forwarder of a record, by its command line."""
    for process in Path("/proc").glob("[0-9]*"):
        try:
            words = (process / "cmdline").read_text().split("\0")[:-1]
        except (OSError, ValueError):
            continue  # it has just ended, or is no program of ours
        if (
            words[2:3] == [_MODULE]
            and words[4:5] == [str(path)]
            and (identity := identify(int(process.name)))
        ):
            return Forward(path.stem, tuple(words[6:]), int(words[5]), identity)
    return None
