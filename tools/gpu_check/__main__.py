"""Runs the parts, each in a process of its own and within its own time, and writes the report.

A part that fails, hangs or breaks the device takes no other along, and what it found before stays.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from tools.gpu_check.finding import Finding, table
from tools.gpu_check.part import PARTS

SECONDS = {"parity": 75, "replay": 75, "cost": 120, "generate": 130, "engine": 60}
"""Of each part; 460 together."""

_NEEDS = ("torch", "transformers", "triton")

_LAST_WORDS = 300
"""Characters of what a part that failed said last."""


def main(words: Sequence[str] | None = None) -> int:
    """Run the check.

    Returns:
        The exit status: 1 where something is not right, or a part did not come to its end; 2 where the check
        cannot run here, or not as asked.
    """
    parser = argparse.ArgumentParser(prog="python -m tools.gpu_check", description=__doc__)
    parser.add_argument("--out", type=Path, required=True, help="folder for report.md and findings.json")
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=list(PARTS), help="default: all")
    options = parser.parse_args(words)
    if lacking := _lacking():
        print(f"gpu-check: {lacking}", file=sys.stderr)
        return 2
    options.out.mkdir(parents=True, exist_ok=True)
    found = {part: _run(part, options.out / f"{part}.jsonl") for part in options.parts}
    report = table(found)
    (options.out / "report.md").write_text(report, encoding="utf-8")
    raw = {part: [asdict(one) for one in findings] for part, findings in found.items()}
    (options.out / "findings.json").write_text(json.dumps(raw, indent=1) + "\n", encoding="utf-8")
    print(report)
    return int(any(one.right is False for findings in found.values() for one in findings))


def _lacking() -> str | None:
    """Why the check cannot run here, and what to do; None where it can."""
    if absent := [name for name in _NEEDS if importlib.util.find_spec(name) is None]:
        return (
            f"{sys.executable} has no {', '.join(absent)}: name a Python that has "
            f"{', '.join(_NEEDS)}, as in make gpu-check PYTHON=.venv/bin/python"
        )
    import torch

    if torch.cuda.is_available():
        return None
    built = f"for CUDA {torch.version.cuda}" if torch.version.cuda else "without CUDA: install one with it"
    return (
        f"torch sees no GPU here. This torch ({torch.__version__}) is built {built}. Run this on a machine "
        "where nvidia-smi lists a GPU; in a container, give it one. What needs none is in make test"
    )


def _run(part: str, path: Path) -> list[Finding]:
    """What a part found, and whether it came to its end."""
    path.unlink(missing_ok=True)
    print(f"{part} ...", file=sys.stderr, flush=True)
    started, limit = time.monotonic(), SECONDS[part]
    command = [sys.executable, "-m", "tools.gpu_check.part", part, str(path)]
    try:
        ended = subprocess.run(command, timeout=limit, stderr=subprocess.PIPE, text=True, check=False)
    except subprocess.TimeoutExpired:
        end = Finding("the part itself", f"did not end within {limit} s", right=False)
    else:
        sys.stderr.write(ended.stderr)
        figure = f"{time.monotonic() - started:.0f} s"
        if ended.returncode:
            said = " ".join(ended.stderr.split())[-_LAST_WORDS:]
            figure += f", exit status {ended.returncode}: {said}"
        end = Finding("the part itself", figure, right=ended.returncode == 0)
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [*(Finding(**json.loads(line)) for line in lines), end]


if __name__ == "__main__":
    sys.exit(main())
