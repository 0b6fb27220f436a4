"""A side that is our engine, in process."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import count

from outrider_serving.bench.breakdown import break_down
from outrider_serving.bench.coverage import Written
from outrider_serving.bench.results import BenchError, Run, Stream
from outrider_serving.bench.sides import check_lengths
from outrider_serving.bench.workloads import Job, Sampling
from outrider_serving.engine.core import EngineCore
from outrider_serving.engine.records import StepRecord
from outrider_serving.engine.types import Delta, Labels, Request, SamplingParams
from outrider_serving.models.loading import LoadedModel
from outrider_serving.settings import OTHER_WORKLOAD
from outrider_serving.suffix.lookup import HistorySize

_HISTORY = "bench"

_PREPARED_AT_ONCE = 16

_ids = count()


@dataclass(slots=True)
class _Seen:
    """What a request has given so far."""

    prompt: tuple[int, ...]
    tokens: list[int] = field(default_factory=list)
    arrivals: list[float] = field(default_factory=list)
    proposed: int = 0
    accepted: int = 0
    began: float = 0.0

    def add(self, delta: Delta, seconds: float) -> None:
        """Take note of a delta that came so long after the start."""
        self.proposed += delta.proposed
        self.accepted += delta.accepted
        if delta.tokens:
            self.tokens.extend(delta.tokens)
            self.arrivals.append(seconds)

    def stream(self) -> Stream:
        """All of it."""
        return Stream(
            output=tuple(self.tokens),
            tokens=len(self.tokens),
            arrivals=tuple(self.arrivals),
            proposed=self.proposed,
            accepted=self.accepted,
            began=self.began,
            prompt=self.prompt,
        )


class EngineSide:
    """An engine with settings of its own, stepped by whoever calls `run`."""

    def __init__(self, name: str, loaded: LoadedModel, core: EngineCore) -> None:
        """Take an engine that nobody else uses; `loaded` is what it runs."""
        self.name = name
        self._tokenizer = loaded.tokenizer
        self._core = core

    @property
    def history(self) -> HistorySize:
        """What it remembers."""
        return self._core.history

    def prepare(self, job: Job) -> tuple[Written, ...]:
        """See `Side.prepare`: what it remembers is what it has written."""
        self._core.purge(_HISTORY)
        stored = job.workload.stored
        if not stored:
            return ()
        run = self._generate(stored, _PREPARED_AT_ONCE, job, private=False)
        return run.written or ()

    def run(self, job: Job) -> Run:
        """See `Side.run`. Requests are private, so that each reads its prompt anew, and leaves nothing."""
        return self._generate(job.workload.prompts, job.workload.streams, job, private=True)

    def _generate(self, prompts: Sequence[str], at_once: int, job: Job, *, private: bool) -> Run:
        """Each prompt to its end, so many at a time."""
        ids = [tuple(self._tokenizer(prompt).input_ids) for prompt in prompts]
        requests = [self._request(prompt, job, stream, private) for stream, prompt in enumerate(ids)]
        seen = {request.id: _Seen(request.prompt) for request in requests}
        records: list[StepRecord] = []
        start = time.perf_counter()
        waiting = deque(requests)
        for _ in range(min(at_once, len(waiting))):
            self._submit(waiting, seen, job, start)
        while self._core.busy:
            output = self._core.step()
            seconds = time.perf_counter() - start
            for delta in output.deltas:
                seen[delta.request_id].add(delta, seconds)
                if delta.finish_reason is not None and waiting:
                    self._submit(waiting, seen, job, start)
            for request_id, failure in output.failures:
                raise BenchError(f"{self.name}, workload {job.workload.name}: {request_id}: {failure}")
            if output.record is not None:
                records.append(output.record)
        run = Run(tuple(one.stream() for one in seen.values()), break_down(records))
        return check_lengths(run, job, self.name)

    def _submit(self, waiting: deque[Request], seen: dict[str, _Seen], job: Job, start: float) -> None:
        request = waiting.popleft()
        seen[request.id].began = time.perf_counter() - start
        try:
            self._core.submit(request)
        except ValueError as error:
            raise BenchError(f"{self.name}, workload {job.workload.name}: {error}") from error

    def close(self) -> None:
        """See `Side.close`."""
        self._core.close()

    def _request(self, prompt: tuple[int, ...], job: Job, stream: int, private: bool) -> Request:
        settings = self._core.settings
        params = _params(job.tokens, job.sampling, stream)
        labels = Labels(
            workload=OTHER_WORKLOAD,
            endpoint="bench",
            sampling_class=params.sampling_class,
            arm=settings.in_force,
            generation=settings.generation,
        )
        return Request(f"bench-{next(_ids)}", prompt, params, labels, history=_HISTORY, private=private)


def _params(tokens: int, sampling: Sampling, stream: int) -> SamplingParams:
    return SamplingParams(
        max_tokens=tokens,
        temperature=sampling.temperature,
        top_p=sampling.top_p,
        seed=sampling.seed_of(stream),
        ignore_eos=True,
    )
