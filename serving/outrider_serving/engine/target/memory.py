"""How much memory there is for pages and for proposers, and who has it."""

from __future__ import annotations

import threading
from collections.abc import Iterable
from pathlib import Path

import torch

from outrider_serving.engine.cgroup import memory_limit
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.types import EngineError

_GIB = 1 << 30


class CapacityError(ValueError):
    """The model does not fit into the memory that it may take; the message has figures and remedies."""


class ProposerMemoryError(EngineError):
    """A proposer does not fit into what is left of the reserve."""


def total_bytes(device: torch.device) -> int:
    """Memory of the device; on a CPU that of the machine, or of the container where this is less."""
    if device.type == "cuda":
        return int(torch.cuda.mem_get_info(device)[1])
    pages = {line.split(":")[0]: line.split()[1] for line in Path("/proc/meminfo").read_text().splitlines()}
    machine = int(pages["MemTotal"]) * 1024
    return min(machine, memory_limit() or machine)


def divide(
    total: int,
    share: float,
    weights: int,
    proposer_bytes: int,
    graph_bytes: int = 0,
    *,
    shapes: Iterable[KVShape],
    dtype: torch.dtype,
    page_size: int,
    context_length: int,
    max_running: int,
) -> int:
    """Divide the memory that the engine may take: how many pages of keys and values there are.

    Pages get what weights and reserves leave, but no more than `most_pages`.

    Args:
        total: bytes of memory.
        share: of it that the engine may take, in (0, 1].
        weights: bytes of the model.
        proposer_bytes: reserve for proposers.
        graph_bytes: reserve for captured passes; see `cuda.reserve`.
        shapes: what each layer keeps of a token, in `dtype`.
        dtype: see shapes.
        page_size: tokens in a page.
        context_length: most tokens of a request, for which there must be pages.
        max_running: requests in a step at most.

    Raises:
        CapacityError: there is no room for a single request of full length.
    """
    page_bytes = page_size * sum(shape.bytes_per_token(dtype) for shape in shapes)
    left = int(total * share) - weights - proposer_bytes - graph_bytes
    needed = -(-context_length // page_size)
    pages = min(left // page_bytes, most_pages(context_length, page_size, max_running))
    if pages < needed:
        graphs = f" and one of {_gib(graph_bytes)} for CUDA graphs" if graph_bytes else ""
        raise CapacityError(
            f"keys and values of one request of {context_length} tokens take {_gib(needed * page_bytes)}, "
            f"but {_gib(max(left, 0))} are left of the {_gib(int(total * share))} that may be used "
            f"({share:g} of {_gib(total)}), after {_gib(weights)} of weights and a reserve of "
            f"{_gib(proposer_bytes)} for proposers{graphs}: "
            "give more memory, a larger share or a shorter context"
        )
    return pages


def most_pages(context_length: int, page_size: int, max_running: int) -> int:
    """Twice what `max_running` requests of full length can use at once.

    The second half is for prefixes that are kept for later requests.
    """
    return 2 * max_running * -(-context_length // page_size)


class Reserve:
    """The memory for proposers, and who holds how much of it. May be used from any thread."""

    def __init__(self, total: int) -> None:
        """Take the bytes of the reserve."""
        self._total = total
        self._held: dict[str, int] = {}
        self._lock = threading.Lock()

    @property
    def left(self) -> int:
        """Bytes that nobody holds."""
        return self._total - sum(self._held.values())

    def take(self, holder: str, wanted: int, name: str) -> None:
        """Give `holder` its memory; `name` is what a message calls it.

        Raises:
            ProposerMemoryError: it is more than is left; the message has both figures.
        """
        with self._lock:
            if wanted > self.left:
                raise ProposerMemoryError(
                    f"proposer {name} needs {_gib(wanted)} of memory, but {_gib(self.left)} are left of the "
                    f"reserve of {_gib(self._total)} for proposers"
                )
            self._held[holder] = wanted

    def give_back(self, holder: str) -> None:
        """Take back what `holder` has, if anything."""
        with self._lock:
            self._held.pop(holder, None)


def _gib(count: int) -> str:
    return f"{count / _GIB:.3g} GiB" if count >= 1 << 20 else f"{count} bytes"
