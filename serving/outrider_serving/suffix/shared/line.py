"""What the parts of a session have in common: a connection, what is known, and how refusals are told."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from typing import TypeVar

from redis.exceptions import ResponseError

from outrider_serving.suffix.shared.connection import Link
from outrider_serving.suffix.shared.keys import Keys
from outrider_serving.suffix.shared.state import State
from outrider_serving.suffix.shared.stats import Telling

SHORTEST_BACKOFF, LONGEST_BACKOFF = 0.05, 5.0
"""Seconds."""

ELSEWHERE = ("READONLY", "MOVED", "ASK", "CLUSTERDOWN", "MASTERDOWN", "NOAUTH", "WRONGPASS", "LOADING")
"""Refusals that a new connection may not meet."""

_PASSING = ("OOM", "MISCONF", "NOREPLICAS", "BUSY", "TRYAGAIN", "NOPERM", *ELSEWHERE)
"""Refusals that say nothing against the record."""

_NO_RIGHT = "can't run this command"
"""What Redis 7.0 says of a command within a script instead of NOPERM."""

Result = TypeVar("Result")


def backoff(attempt: int) -> float:
    """Seconds to wait after so many failures in a row: full jitter below a bound that doubles."""
    return random.uniform(0, min(LONGEST_BACKOFF, SHORTEST_BACKOFF * 2 ** min(attempt, 16)))


def refusal(error: ResponseError) -> str:
    """Which of the passing refusals this is; empty for another one. Of a script's it is within the text."""
    if _NO_RIGHT in str(error):
        return "NOPERM"
    words = [error.status_code or "", *str(error).replace("-", " ").split()]
    return next((code for code in _PASSING if code in words), "")


@dataclass(frozen=True, slots=True)
class Line:
    """A connection, and what those who use it share."""

    state: State
    keys: Keys
    link: Link
    thread: Executor
    """For what takes long."""
    telling: Telling

    @property
    def retention(self) -> int:
        """Seconds that text is kept."""
        return self.state.options.retention_seconds

    async def eval(
        self, script: str, names: Sequence[str], arguments: Sequence[str | int | bytes] = ()
    ) -> object:
        """What a script answers about keys."""
        return await self.link.call("EVAL", script, len(names), *names, *arguments)

    async def in_thread(self, work: Callable[..., Result], *arguments: object) -> Result:
        """Let pure work be done beside the event loop."""
        return await asyncio.get_running_loop().run_in_executor(self.thread, work, *arguments)

    def refused(self, message: str, error: ResponseError) -> str:
        """Count and tell a refusal; which of the passing ones it is, or empty."""
        code = refusal(error)
        self.state.counts.faults[code.lower() or "refused"] += 1
        self.telling.fault(message, code.lower() or "refused", error)
        return code
