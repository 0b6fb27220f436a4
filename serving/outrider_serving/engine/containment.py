"""Keeps what fails one request of a step away from the others."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import torch

from outrider_serving.engine.active import Turn

logger = logging.getLogger(__name__)

Result = TypeVar("Result")


def sound(turns: Sequence[Turn]) -> list[Turn]:
    """Those that nothing has failed so far."""
    return [turn for turn in turns if turn.error is None]


def tried(turns: Sequence[Turn], work: Callable[[], Result]) -> Result | None:
    """What `work` returns; where it raises, None, and that is what fails these requests.

    Args:
        turns: whose work it is; none where what raises is to be tried again, request by request.
        work: what is done.

    Raises:
        torch.AcceleratorError: the device is broken, and with it every request.
    """
    try:
        return work()
    except torch.AcceleratorError:
        raise
    except Exception as error:
        ids = ", ".join(turn.sequence.request.id for turn in turns)
        logger.exception("part of a step failed: %s", ids or "its requests are tried one by one")
        for turn in sound(turns):
            turn.error = error
        return None


def each(turns: Sequence[Turn], work: Callable[[Turn], Result]) -> list[Result]:
    """What `work` returns for each; what it raises fails that one."""
    results = (tried([turn], partial(work, turn)) for turn in turns)
    return [result for result in results if result is not None]
