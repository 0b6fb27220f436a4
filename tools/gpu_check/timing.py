"""How long something takes on the device."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import torch

_COPIED = 1 << 32
"""Bytes."""


def seconds(work: Callable[[], object], times: int = 30, warm: int = 5) -> float:
    """The median of several runs, each from an idle device to its end."""
    taken = []
    for number in range(warm + times):
        torch.cuda.synchronize()
        started = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if number >= warm:
            taken.append(time.perf_counter() - started)
    return statistics.median(taken)


def bandwidth(device: torch.device) -> float:
    """Bytes that the device's memory reads and writes in a second while it copies."""
    source = torch.empty(_COPIED, dtype=torch.uint8, device=device)
    target = torch.empty_like(source)
    return 2 * _COPIED / seconds(lambda: target.copy_(source))
