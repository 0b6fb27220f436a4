"""What the container that we run in may use, as the kernel's files say it: control groups v2, then v1."""

from __future__ import annotations

import math
import os
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def limit_threads() -> None:
    """Let torch have no more threads than the container has CPUs; to be called before torch is imported.

    It counts the machine's cores; threads beyond the container's would wait for each other.
    """
    cpus = cpu_limit()
    if cpus is not None and cpus < len(os.sched_getaffinity(0)):
        os.environ.setdefault("OMP_NUM_THREADS", str(cpus))


def cpu_limit(cgroup: Path = CGROUP) -> int | None:
    """CPUs, rounded up; None where nothing limits them."""
    words = _words(cgroup / "cpu.max") or [
        *_words(cgroup / "cpu" / "cpu.cfs_quota_us"),
        *_words(cgroup / "cpu" / "cpu.cfs_period_us"),
    ]
    match [_limit(word) for word in words]:
        case [int(quota), int(period)]:
            return math.ceil(quota / period)
        case _:
            return None


def memory_limit(cgroup: Path = CGROUP) -> int | None:
    """Bytes of memory; None where nothing limits them. (v1 has a number beyond any machine's for that.)"""
    words = _words(cgroup / "memory.max") or _words(cgroup / "memory" / "memory.limit_in_bytes")
    return _limit(words[0]) if words else None


def _words(file: Path) -> list[str]:
    try:
        return file.read_text().split()
    except OSError:
        return []


def _limit(word: str) -> int | None:
    """The number; None for what is no limit: "max", -1 and 0."""
    return int(word) or None if word.isdecimal() else None
