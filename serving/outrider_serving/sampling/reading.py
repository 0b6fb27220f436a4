"""Work on many rows that now and then looks at numbers of a device: what all of them want is read at once.

Each row's work is written as if it were alone, in a generator. It yields the tensors that it wants to look
at, and is sent them on the CPU. So however many rows there are, a round of them waits for a device once. What
lies on the CPU already is sent back at once.
"""

from __future__ import annotations

from collections.abc import Generator, Mapping, Sequence
from operator import attrgetter
from typing import TypeVar

import torch
from torch import Tensor

from outrider_serving.sampling.transfer import fetched

T = TypeVar("T")

_IS_CPU = attrgetter("is_cpu")

Reading = Generator[Sequence[Tensor], Sequence[Tensor], T]
"""Yields int64 or float64 tensors on any device, is sent the same on the CPU, and returns its answer."""


def together(readings: Sequence[Reading[T]]) -> list[T | Exception]:
    """The answer of each, or what it raised; they do not influence each other.

    Raises:
        torch.AcceleratorError: the device is broken, and with it every request.
    """
    answers: dict[int, T | Exception] = {}
    waiting: dict[int, Sequence[Tensor]] = {}
    for n, reading in enumerate(readings):
        _go_on(n, reading, None, waiting, answers)
    while waiting:
        asked, waiting = waiting, {}
        for n, found in _fetched(asked).items():
            _go_on(n, readings[n], found, waiting, answers)
    return [answers[n] for n in range(len(readings))]


def _go_on(
    n: int,
    reading: Reading[T],
    found: Sequence[Tensor] | Exception | None,
    waiting: dict[int, Sequence[Tensor]],
    answers: dict[int, T | Exception],
) -> None:
    """Run the n-th one up to where it next wants to look at something, or to its end."""
    try:
        if isinstance(found, Exception):
            raise found
        wanted = next(reading) if found is None else reading.send(found)
        while all(map(_IS_CPU, wanted)):
            wanted = reading.send(wanted)
        waiting[n] = wanted
    except StopIteration as end:
        answers[n] = end.value
    except torch.AcceleratorError:
        raise
    except Exception as error:
        answers[n] = error


def _fetched(asked: Mapping[int, Sequence[Tensor]]) -> dict[int, Sequence[Tensor] | Exception]:
    """What each wants to look at; where that cannot be had at once, each is tried alone."""
    try:
        found = iter(fetched([tensor for tensors in asked.values() for tensor in tensors]))
        return {n: [next(found) for _ in tensors] for n, tensors in asked.items()}
    except torch.AcceleratorError:
        raise
    except Exception as error:
        if len(asked) == 1:
            return dict.fromkeys(asked, error)
        return {n: found for n, tensors in asked.items() for n, found in _fetched({n: tensors}).items()}
