"""On what a comparison was made: what one needs to know to believe it or to repeat it. No torch."""

from __future__ import annotations

import os
import platform
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

_PACKAGES = ("outrider", "torch", "transformers", "triton")


def versions() -> dict[str, str | None]:
    """Of Python and of the packages that decide speed; None for one that is not installed."""
    return {"python": platform.python_version()} | {name: _version(name) for name in _PACKAGES}


def machine() -> dict[str, Any]:
    """Processor, cores that this process may use, memory in bytes, and the last minute's load average."""
    return {
        "processor": _first("/proc/cpuinfo", "model name") or platform.processor() or platform.machine(),
        "cores": len(os.sched_getaffinity(0)),
        "memory": os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE"),
        "system": f"{platform.system()} {platform.release()}",
        "load": os.getloadavg()[0],
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def _first(file: str, key: str) -> str | None:
    """The first value of a key in one of the kernel's files."""
    try:
        lines = Path(file).read_text().splitlines()
    except OSError:
        return None
    return next(
        (value.strip() for name, _, value in (x.partition(":") for x in lines) if name.strip() == key), None
    )
