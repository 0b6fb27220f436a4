"""The three system calls that Python 3.11 lacks."""

from __future__ import annotations

import ctypes
import os
from pathlib import Path

NEW_MOUNT = 0x00020000
NEW_CGROUP = 0x02000000
NEW_UTS = 0x04000000
NEW_IPC = 0x08000000
NEW_PID = 0x20000000
NEW_NET = 0x40000000
NODE = NEW_MOUNT | NEW_CGROUP | NEW_UTS | NEW_IPC | NEW_PID | NEW_NET

_PR_SET_PDEATHSIG = 1
_libc = ctypes.CDLL(None, use_errno=True)


def unshare(flags: int) -> None:
    """Give this process new namespaces (children get the new pid namespace)."""
    _check(_libc.unshare(flags), "unshare")


def enter(namespace: Path, kind: int) -> None:
    """Move the calling thread into a namespace of another process."""
    descriptor = os.open(namespace, os.O_RDONLY | os.O_CLOEXEC)
    try:
        _check(_libc.setns(descriptor, kind), f"setns {namespace}")
    finally:
        os.close(descriptor)


def die_with_parent(signal_number: int) -> None:
    """Have the kernel send this process a signal when the parent ends."""
    _check(_libc.prctl(_PR_SET_PDEATHSIG, signal_number, 0, 0, 0), "prctl")


def _check(result: int, what: str) -> None:
    if result:
        number = ctypes.get_errno()
        raise OSError(number, f"{what}: {os.strerror(number)}")
