"""A core that does what its requests say, for tests of the process around it: `scripted:build` in the child.

The first token of a prompt is what the core does with the request; else it commits one token in each step,
the generation of the settings in force. A delta's `proposed` is the number of requests that the core knows,
its `depth` how many cancels it has seen. Settings of the generation UNLUCKY name a proposer that cannot be
loaded, as `tend` finds. What a *start* does is one word of the file $SCRIPT, one word a
start; the last one holds for all further starts.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from enum import IntEnum
from pathlib import Path

from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.protocol import ModelInfo
from outrider_serving.engine.records import GraphCounts, PageCounts, RowRecord, StepRecord
from outrider_serving.engine.types import (
    DeadlineError,
    Delta,
    EngineError,
    FinishReason,
    QueueFullError,
    Request,
)
from outrider_serving.models.errors import ModelError
from outrider_serving.settings import Method, PodSettings
from outrider_serving.suffix.lookup import HistorySize

FACTORY = "serving.engine.scripted:build"
SCRIPT = "SCRIPT"
PACE_SECONDS = 0.001
UNLUCKY = 13


class Act(IntEnum):
    """What the core does with a request."""

    GENERATE = 0
    REFUSE = 1
    FULL = 2
    FAIL = 3
    EXPIRE = 4
    BREAK = 5
    HANG = 6
    FLOOD = 7


class Output:
    """What a step did; not of a class that the API's process knows."""

    def __init__(self) -> None:
        self.record: StepRecord | None = None
        self.deltas: tuple[Delta, ...] = ()
        self.failures: tuple[tuple[str, EngineError], ...] = ()


def _keeps(settings: PodSettings) -> bool:
    return any(arm.proposer.method is Method.SUFFIX for arm in settings.arms.values())


class ScriptedCore:
    """See the module."""

    def __init__(self, settings: PodSettings) -> None:
        self.settings = settings
        self.left: dict[str, int] = {}
        self.requests: dict[str, Request] = {}
        self.cancels = 0
        self.learned: dict[str, list[int]] = {}
        self.tended = settings
        self.proposer_trouble: str | None = None
        self._kept = _keeps(settings)

    @property
    def busy(self) -> bool:
        return bool(self.requests)

    @property
    def tend_in(self) -> float | None:
        return None if self.tended is self.settings else 0.0

    @property
    def running(self) -> int:
        return len(self.requests)

    @property
    def pages(self) -> PageCounts:
        return PageCounts(100, len(self.requests), 1)

    @property
    def graphs(self) -> GraphCounts:
        return GraphCounts(10 + len(self.requests), 2)

    @property
    def history(self) -> HistorySize:
        return HistorySize(len(self.learned), sum(map(len, self.learned.values())), kept=self._kept)

    def learn(self, tenant: str, outputs: Iterable[Sequence[int]], written: int) -> None:
        for output in outputs:
            self.learned.setdefault(tenant, []).extend(output)

    def purge(self, tenant: str) -> None:
        self.learned.pop(tenant, None)

    def erase(self, before: int) -> None:
        self.learned = {tenant: tokens for tenant, tokens in self.learned.items() if len(tokens) > before}

    def set_settings(self, settings: PodSettings) -> None:
        self.settings = settings
        self._kept |= _keeps(settings)

    def submit(self, request: Request) -> None:
        match request.prompt[0]:
            case Act.REFUSE:
                raise ValueError("the prompt is refused")
            case Act.FULL:
                raise QueueFullError(5, 4, retry_after=3)
        self.requests[request.id] = request
        self.left[request.id] = request.params.max_tokens

    def cancel(self, request_id: str) -> None:
        self.cancels += 1
        self._forget(request_id)

    def begin_step(self) -> Callable[[], Output]:
        time.sleep(PACE_SECONDS)
        return self._end_step

    def _end_step(self) -> Output:
        output, rows = Output(), []
        for request in list(self.requests.values()):
            error = self._error(request)
            if error is not None:
                output.failures += ((request.id, error),)
                self._forget(request.id)
                continue
            rows.append(_row(request))
            output.deltas += (self._delta(request),)
        output.record = StepRecord(
            *("stable", self.settings.generation, time.monotonic(), tuple(rows), 0, 0.1, 0.1, 0.1, 0.1),
        )
        return output

    def tend(self) -> None:
        self.tended = self.settings
        self.proposer_trouble = "it is unlucky" if self.settings.generation == UNLUCKY else None

    def _error(self, request: Request) -> EngineError | None:
        match request.prompt[0]:
            case Act.BREAK:
                raise RuntimeError("the device is gone")
            case Act.HANG:
                time.sleep(3600)
            case Act.FAIL:
                return EngineError("it broke")
            case Act.EXPIRE:
                return DeadlineError("its time is over")
        return None

    def _delta(self, request: Request) -> Delta:
        known = len(self.requests)
        self.left[request.id] -= 1
        ended = not self.left[request.id]
        if ended:
            self._forget(request.id)
        count = 10_000 if request.prompt[0] == Act.FLOOD else 1
        return Delta(
            request.id,
            (self.settings.generation,) * count,
            time.monotonic(),
            proposed=known,
            depth=self.cancels,
            finish_reason=FinishReason.LENGTH if ended else None,
        )

    def _forget(self, request_id: str) -> None:
        self.requests.pop(request_id, None)
        self.left.pop(request_id, None)


def _row(request: Request) -> RowRecord:
    return RowRecord(
        request.id, request.labels, tokens=1, context=1, proposed=0, depth=0, accepted=0, committed=1
    )


def build(options: EngineOptions, settings: PodSettings) -> tuple[ScriptedCore, ModelInfo]:
    match _act():
        case "refused":
            raise ModelError(f"model {options.model} has no weights")
        case "broken":
            raise MemoryError("no memory")
        case "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        case "slow":
            time.sleep(3600)
        case "changed":
            assert options.revision == "r1", "a later process is told to serve the first one's revision"
    revision = options.revision or "r1"
    core = ScriptedCore(settings)
    ends = frozenset({1})
    return core, ModelInfo(b"", revision, "float32", 64, ends, 320, 100, 16, graphs=core.graphs)


def _act() -> str:
    """The next word of the script."""
    script = os.environ.get(SCRIPT)
    if script is None:
        return "good"
    words = Path(script).read_text().split()
    if len(words) > 1:
        Path(script).write_text(" ".join(words[1:]))
    return words[0]
