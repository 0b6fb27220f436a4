"""One part of the check: `python -m tools.gpu_check.part PART FILE` appends its findings to a file."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import asdict
from importlib import import_module
from pathlib import Path

from tools.gpu_check.finding import Findings

PARTS = ("parity", "replay", "cost", "generate", "engine")
"""Each is a module here, whose `find` takes the device."""


def main() -> None:
    """Run a part to its end, or to what it raises."""
    import torch

    part, path = sys.argv[1:]
    find: Callable[[torch.device], Findings] = import_module(f"tools.gpu_check.{part}").find
    with Path(path).open("a", encoding="utf-8") as lines:
        for one in find(torch.device("cuda", 0)):
            lines.write(json.dumps(asdict(one)) + "\n")
            lines.flush()


if __name__ == "__main__":
    main()
