"""Running other programs, with errors that show what the program said."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping
from pathlib import Path

from outrider_local.report import ProblemError

SYSTEM_PATH = "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"
_PROXY_VARIABLES = ("http_proxy", "https_proxy", "all_proxy", "HTTP_PROXY", "HTTPS_PROXY", "ALL_PROXY")


def output(*command: str | Path, env: Mapping[str, str] | None = None, stdin: str | None = None) -> str:
    """Run a command and return its standard output; raise with its own words when it fails."""
    words = [str(word) for word in command]
    result = subprocess.run(words, capture_output=True, text=True, env=env, input=stdin, check=False)
    if result.returncode:
        said = result.stderr.strip() or result.stdout.strip() or f"exit status {result.returncode}"
        raise ProblemError(
            f"{' '.join(words[:4])} ...: {said}" if len(words) > 4 else f"{' '.join(words)}: {said}"
        )
    return result.stdout


def succeeds(*command: str | Path, env: Mapping[str, str] | None = None) -> bool:
    """Whether a command exits with 0; its output is dropped."""
    words = [str(word) for word in command]
    quiet = subprocess.DEVNULL
    return (
        subprocess.run(words, stdin=quiet, stdout=quiet, stderr=quiet, env=env, check=False).returncode == 0
    )


def find(tool: str) -> str | None:
    """The path of a system tool, also where PATH lacks the sbin folders."""
    return shutil.which(tool) or shutil.which(tool, path=SYSTEM_PATH)


def require(tool: str) -> str:
    """The path of a system tool that preflight has promised."""
    path = find(tool)
    if path is None:
        raise ProblemError(f"{tool} is not installed", "run the preflight command to see what is missing")
    return path


def without_proxies(environment: Mapping[str, str]) -> dict[str, str]:
    """The environment less its proxy settings: nothing of the node is reached through a proxy."""
    return {name: value for name, value in environment.items() if name not in _PROXY_VARIABLES}


def tail(path: Path, lines: int = 12) -> str:
    """The last lines of a log, or a word that there is none."""
    try:
        with path.open("rb") as log:
            log.seek(0, os.SEEK_END)
            log.seek(max(0, log.tell() - 16384))
            text = log.read().decode(errors="replace")
    except OSError:
        return f"(no {path})"
    return "\n".join(text.splitlines()[-lines:])
