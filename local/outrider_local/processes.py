"""Background processes that are recognised again by process id and start time.

A process id alone may belong to a stranger by the time `down` runs; together with the start time that the
kernel notes for it, it cannot.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path


@dataclass(frozen=True)
class Identity:
    """One process on this boot of the machine."""

    pid: int
    started: int
    boot: str

    @property
    def alive(self) -> bool:
        """Whether the very same process still runs (a zombie does not)."""
        return self.boot == boot_id() and start_time(self.pid) == self.started

    def signal(self, number: int) -> None:
        """Send a signal, if the process is still there."""
        if self.alive:
            with suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def wait(self, seconds: float) -> bool:
        """Wait for the end of the process; whether it came."""
        end = time.monotonic() + seconds
        while self.alive:
            if time.monotonic() > end:
                return False
            time.sleep(0.05)
        return True

    def end(self, patience: float) -> None:
        """Ask the process to end, and after ``patience`` seconds make it."""
        self.signal(signal.SIGTERM)
        if not self.wait(patience):
            self.signal(signal.SIGKILL)
            self.wait(5)

    def to_json(self) -> dict[str, object]:
        """As it is written to a file."""
        return asdict(self)

    @staticmethod
    def from_json(value: Mapping[str, object]) -> Identity:
        """The reverse of ``to_json``."""
        return Identity(int(str(value["pid"])), int(str(value["started"])), str(value["boot"]))


def boot_id() -> str:
    """A value that changes when the machine restarts."""
    return Path("/proc/sys/kernel/random/boot_id").read_text().strip()


def parse_start_time(stat: str) -> int | None:
    """The start time (ticks since boot) in the text of /proc/PID/stat; None for a process that has ended."""
    # The command's name, in parentheses, may hold spaces and parentheses itself.
    fields = stat.rpartition(")")[2].split()
    state, started = fields[0], fields[19]
    return None if state in "ZX" else int(started)


def start_time(pid: int) -> int | None:
    """When a process started, or None when there is none."""
    try:
        return parse_start_time(Path(f"/proc/{pid}/stat").read_text())
    except (OSError, IndexError):
        return None


def identify(pid: int) -> Identity | None:
    """The identity of a running process."""
    started = start_time(pid)
    return None if started is None else Identity(pid, started, boot_id())


def start_background(
    command: Sequence[str], log: Path, environment: Mapping[str, str], *, pass_fd: int
) -> Identity:
    """Start a process that outlives this one and its terminal, writing to ``log``.

    ``pass_fd`` stays open in the child: both sides use it to tell readiness.
    """
    with log.open("ab") as sink:
        child = subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=sink,
            stderr=sink,
            env=dict(environment),
            cwd="/",
            start_new_session=True,
            pass_fds=(pass_fd,),
        )
    identity = identify(child.pid)
    # A child that ended at once is a zombie of ours: keep its number, it is not alive by any measure.
    return identity or Identity(child.pid, -1, boot_id())


def write_json(path: Path, value: object) -> None:
    """Write a JSON file in one move, so that a crash or a power cut leaves the old or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    with temporary.open("w") as file:
        file.write(json.dumps(value, indent=1) + "\n")
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)
