"""Checks the container files, which cannot be built on every machine: `python tools/lint_containers.py`.

Each image must start from a pinned base, install from its lock with hashes, run as a numeric non-root
user, copy only what exists, and have the entry point and module path of the local image.
"""

from __future__ import annotations

import json
import re
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = {"operator": "outrider_operator", "serving": "outrider_serving"}


def instructions(text: str) -> list[tuple[str, str]]:
    """(keyword, argument) of each instruction, with continuation lines joined."""
    joined = re.sub(r"\\\n\s*", " ", text)
    lines = [line.strip() for line in joined.splitlines()]
    pairs = [line.partition(" ") for line in lines if line and not line.startswith("#")]
    return [(keyword.upper(), argument.strip()) for keyword, _, argument in pairs]


def problems(text: str, image: str) -> list[str]:
    """What is wrong with the container file of one image, in words; empty when nothing is."""
    steps = instructions(text)
    found: list[str] = []

    def arguments(keyword: str) -> list[str]:
        return [argument for name, argument in steps if name == keyword]

    for base in arguments("FROM"):
        reference = base.split()[0]
        _, _, tag = reference.partition(":")
        if not re.match(r"^\d+\.\d+\.\d+-", tag):
            found.append(f"FROM {reference}: pin the base by a full version")
    lock = f"--require-hashes -r locks/{image}.txt"
    if not any(lock in command for command in arguments("RUN")):
        found.append(f"RUN: install with `{lock}`")
    users = arguments("USER")
    if not users or not re.fullmatch(r"[1-9]\d*:[1-9]\d*", users[-1]):
        found.append("USER: the last one must be a numeric, non-root user and group")
    entry = ["python3", "-m", PACKAGES[image]]
    if arguments("ENTRYPOINT") != [json.dumps(entry)]:
        found.append(f"ENTRYPOINT: must be {json.dumps(entry)}, as in the local image")
    if not any("PYTHONPATH=/opt/outrider/app:" in variables for variables in arguments("ENV")):
        found.append("ENV: PYTHONPATH must begin with /opt/outrider/app, as in the local image")
    for copy in arguments("COPY"):
        if not copy.startswith("--from="):
            found += [
                f"COPY {source}: no such path" for source in copy.split()[:-1] if not (ROOT / source).exists()
            ]
    return found


def main() -> int:
    """Entry point; returns the exit status."""
    failed = False
    for image in PACKAGES:
        path = ROOT / "containers" / f"{image}.Dockerfile"
        for problem in problems(path.read_text(), image):
            print(f"{path.relative_to(ROOT)}: {problem}", file=sys.stderr)
            failed = True
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
