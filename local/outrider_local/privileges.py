"""Steps that need root: the node and its forwarders. Everything else runs as whoever called.

As root they are plain calls. Otherwise the same command runs again under sudo, after saying so.
"""

from __future__ import annotations

import os
import subprocess
import sys

from outrider_local.report import EXIT_USAGE, ProblemError, detail
from outrider_local.settings import Settings
from outrider_local.shell import find

NEEDED_FOR = (
    "installing missing system packages",
    "starting and ending the node: namespaces, mounts and cgroups of its own",
    "entering the node's network for the forwarded ports, and its mounts to import images",
)


def is_root() -> bool:
    """Whether this process may do everything."""
    return os.geteuid() == 0


def sudo_prefix() -> list[str]:
    """What to put before a command that needs root."""
    if is_root():
        return []
    sudo = find("sudo")
    if sudo is None:
        raise ProblemError("this needs root, and there is no sudo", "run it as root", EXIT_USAGE)
    return [sudo]


def rerun(settings: Settings, arguments: list[str], *, capture: bool = False) -> str:
    """Run one of our own commands under sudo with the same settings."""
    variables = [f"{name}={value}" for name, value in settings.variables().items()]
    own = [sys.executable, "-m", "outrider_local", *arguments]
    detail(f"with sudo: outrider_local {' '.join(arguments)}")
    command = [*sudo_prefix(), "env", *variables, *own]
    result = subprocess.run(command, stdout=subprocess.PIPE if capture else None, text=True, check=False)
    if result.returncode:
        raise SystemExit(result.returncode)  # it has said why
    return result.stdout or ""


def give_to_caller(path: str | os.PathLike[str]) -> None:
    """Give a file made under sudo to the user who called sudo."""
    user, group = os.environ.get("SUDO_UID", ""), os.environ.get("SUDO_GID", "")
    if is_root() and user.isdecimal() and group.isdecimal():
        os.chown(path, int(user), int(group))
