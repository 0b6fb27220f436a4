"""The process outside the node that holds it: enters the cgroups, makes the namespaces, starts process 1.

Run as ``python3 -m outrider_local.launcher DESCRIPTOR`` with a JSON document on the descriptor's socket; the
outcome (``ready`` or a problem) goes back on the same socket.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import traceback
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path

from outrider_local import cgroups, namespaces
from outrider_local.gobuild import Programs
from outrider_local.init import Init
from outrider_local.isolate import isolate
from outrider_local.layout import Layout
from outrider_local.processes import identify
from outrider_local.report import ProblemError


@dataclass(frozen=True)
class Order:
    """What `node up` hands to the launcher."""

    state: str
    folders: dict[str, str]
    images: list[str]

    def to_json(self) -> str:
        """As it goes over the socket."""
        return json.dumps(asdict(self))


def main(descriptor: int) -> None:
    """Run the node until it is told to stop."""
    channel = socket.socket(fileno=descriptor)
    with channel.makefile("r") as lines:
        order = Order(**json.loads(lines.readline()))
    try:
        plan = cgroups.plan_here(Layout(Path(order.state)).cgroup)
        cgroups.make(plan)
        cgroups.enter(plan)
        namespaces.unshare(namespaces.NODE)
        cgroups.settle(plan)
        child = os.fork()
        if child == 0:
            _first_process(order, plan, channel)
        first = identify(child)
        _tell(channel, {"init": first.to_json() if first else None})
        channel.close()
        os.waitpid(child, 0)
    except Exception as error:  # whatever it is, the person who waits has to read it
        _tell_problem(channel, error)
        sys.exit(1)


def _first_process(order: Order, plan: cgroups.Plan, channel: socket.socket) -> None:
    """Process 1 of the node; never returns."""
    status = 0
    try:
        namespaces.die_with_parent(signal.SIGKILL)
        layout = Layout(Path(order.state))
        isolate(layout, plan)
        programs = Programs({name: Path(folder) for name, folder in order.folders.items()})

        def ready() -> None:
            _tell(channel, {"ready": True})
            channel.close()

        Init(layout, programs, [Path(image) for image in order.images]).run(ready)
    except Exception as error:
        _tell_problem(channel, error)
        status = 1
    os._exit(status)


def _tell_problem(channel: socket.socket, error: Exception) -> None:
    traceback.print_exc()
    problem = error if isinstance(error, ProblemError) else ProblemError(f"{type(error).__name__}: {error}")
    _tell(channel, {"problem": problem.what, "advice": problem.advice})


def _tell(channel: socket.socket, message: dict[str, object]) -> None:
    with suppress(OSError):  # nobody waits any more
        channel.sendall(json.dumps(message).encode() + b"\n")


if __name__ == "__main__":
    main(int(sys.argv[1]))
