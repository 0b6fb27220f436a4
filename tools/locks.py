"""Compiles the lock files from pyproject.toml: `python tools/locks.py UV [--check | --upgrade]`.

`locks/dev.txt` holds everything; the two image locks hold a part of it at the same versions. Pins that
still satisfy pyproject.toml stay; `--upgrade` moves all to the newest. `--check` writes nothing and exits
with 1 when a lock no longer is what pyproject.toml asks for.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
LOCKS = ("dev", "serving", "operator")


def compile_locks(uv: str, folder: Path, *, upgrade: bool) -> None:
    """Writes every lock into `folder`, keeping the pins that are there already.

    Raises:
        subprocess.CalledProcessError: the requirements cannot be resolved.
    """
    for extra in LOCKS:
        command = [uv, "pip", "compile", str(ROOT / "pyproject.toml"), "--extra", extra, "--quiet"]
        command += ["--universal", "--python-version", "3.11", "--generate-hashes", "--no-header"]
        command += ["--no-annotate", "--no-emit-index-url", "--output-file", str(folder / f"{extra}.txt")]
        if extra != "dev":
            command += ["--constraint", str(folder / "dev.txt")]
        if upgrade:
            command.append("--upgrade")
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)


def main() -> int:
    """Entry point; returns the exit status."""
    parser = argparse.ArgumentParser(description="Compile the lock files.")
    parser.add_argument("uv", help="path of the uv executable")
    parser.add_argument("--check", action="store_true", help="write nothing; exit 1 if a lock is stale")
    parser.add_argument("--upgrade", action="store_true", help="move every pin to the newest version")
    arguments = parser.parse_args()
    locks = ROOT / "locks"
    if not arguments.check:
        compile_locks(arguments.uv, locks, upgrade=arguments.upgrade)
        return 0
    with tempfile.TemporaryDirectory() as name:
        copy = Path(name) / "locks"
        shutil.copytree(locks, copy)
        compile_locks(arguments.uv, copy, upgrade=False)
        stale = [x for x in LOCKS if (copy / f"{x}.txt").read_bytes() != (locks / f"{x}.txt").read_bytes()]
    for extra in stale:
        print(f"locks/{extra}.txt is stale: run `make generate` and commit the result", file=sys.stderr)
    return 1 if stale else 0


if __name__ == "__main__":
    sys.exit(main())
