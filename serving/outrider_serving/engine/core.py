"""The engine: requests in, deltas out, one step at a time, in one thread."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from functools import partial

from outrider_serving.depth import DepthRule, MeasuredDepth
from outrider_serving.engine.active import Active
from outrider_serving.engine.grammars import Grammars
from outrider_serving.engine.records import GraphCounts, PageCounts, StepOutput
from outrider_serving.engine.residence import Build, Grant
from outrider_serving.engine.schedule.scheduler import EngineLimits, Scheduler
from outrider_serving.engine.schedule.sequence import end_tokens
from outrider_serving.engine.speculation import Speculation
from outrider_serving.engine.step import Step, Stepper
from outrider_serving.engine.target.cuda.runner import cuda_runner
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.memory import Reserve
from outrider_serving.engine.target.runner import ModelRunner
from outrider_serving.engine.types import (
    EngineError,
    Labels,
    Request,
    SamplingClass,
    SamplingParams,
)
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.registry import build_proposer
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.matcher import Matcher
from outrider_serving.sampling.randomness import GeneratorRandomness, Randomness
from outrider_serving.settings import OTHER_WORKLOAD, PodSettings
from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import best_indexes
from outrider_serving.suffix.lookup import HistorySize
from outrider_serving.suffix.pieces import Coming

Draws = Callable[[Request], tuple[Randomness, Randomness]]
"""Makes a request's two sources: what verification draws from, and what proposals are drawn from."""


_PATIENCE = 0.01
"""Seconds that a step without other work waits for a grammar."""

_LEAVING_SECONDS = 0.1
"""After which it is looked again whether memory of a history was given back."""


class EngineCore:
    """Generates completions; speculation changes how fast, never what. One thread calls everything here."""

    def __init__(
        self,
        loaded: LoadedModel,
        settings: PodSettings,
        limits: EngineLimits,
        *,
        proposer_bytes: int = 0,
        build: Build | None = None,
        draws: Draws = lambda _: (GeneratorRandomness(), GeneratorRandomness()),
        depths: DepthRule | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Take the memory of the pages.

        Args:
            loaded: the target and its tokenizer.
            settings: those in force until `set_settings`.
            limits: pages, and what takes part in a step.
            proposer_bytes: reserve of memory for proposers.
            build: makes a proposer from its settings, None from the method that proposes nothing; by default
                those of the registry.
            draws: see `Draws`.
            depths: how deep to propose; by default what is measured decides.
            clock: what deadlines are measured by, in seconds.
        """
        self._loaded = loaded
        self._settings = settings
        self._draws = draws
        self._active: dict[str, Active] = {}
        self._grammars = Grammars(loaded, limits.max_waiting)
        self._clock = clock
        self._history = History(best_indexes())
        self._coming = Coming(self._history)
        model, slots = loaded.model, limits.pages * limits.page_size
        self._scheduler = Scheduler(limits)
        self._reserve = Reserve(proposer_bytes)
        self._speculation = Speculation(
            Grant(model, loaded.vocab_size, self._scheduler.pool, self._reserve),
            vocab_size=loaded.vocab_size,
            build=build or partial(build_proposer, history=self._history),
            depths=depths or MeasuredDepth(),
            clock=clock,
        )
        store = KVStore(loaded.kv_shapes, slots, model.dtype, model.device)
        self._cuda = cuda_runner(model, store, loaded.kv_shapes, limits, loaded.context_length)
        runner = self._cuda or ModelRunner(model, store, loaded.compiled)
        self._stepper = Stepper(self._scheduler, self._speculation, runner, model.device, clock)

    @property
    def running(self) -> int:
        """Requests that have begun and not ended."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Requests that have not begun, or were preempted."""
        return self._scheduler.waiting

    @property
    def busy(self) -> bool:
        """There are requests, so a step does something."""
        return bool(self._active or self._grammars)

    @property
    def tend_in(self) -> float | None:
        """Seconds until `tend` may have something to do; None where it has nothing more to do."""
        if self._coming:
            return 0.0
        due = self._speculation.due_in(self._settings)
        if self._history.indexes.leaving():  # how much that is, is to be told until it is nothing
            return _LEAVING_SECONDS if due is None else min(due, _LEAVING_SECONDS)
        return due

    @property
    def pages(self) -> PageCounts:
        """Pages of keys and values now."""
        pool = self._scheduler.pool
        return PageCounts(total=pool.total, held=pool.held, cached=pool.cached)

    @property
    def graphs(self) -> GraphCounts:
        """Passes of the target in graphs now."""
        cuda = self._cuda
        return GraphCounts() if cuda is None else GraphCounts(cuda.captured, cuda.fallbacks)

    @property
    def history(self) -> HistorySize:
        """How much of what requests have written is remembered."""
        return self._history.size

    @property
    def suffix_compiled(self) -> bool:
        """Whether the index of the suffix proposer is compiled code."""
        return self._history.indexes.compiled

    @property
    def settings(self) -> PodSettings:
        """The settings in force from the next step on."""
        return self._settings

    @property
    def proposer_trouble(self) -> str | None:
        """Why a proposer that the settings name is not loaded; None where all are."""
        return self._speculation.trouble

    @property
    def proposer_free(self) -> int:
        """Bytes of the reserve for proposers that none holds."""
        return self._reserve.left

    def set_settings(self, settings: PodSettings) -> None:
        """Put other settings in force from the next step on; running requests go on."""
        self._settings = settings

    def submit(self, request: Request) -> None:
        """Queue a request; one with a grammar as soon as that is compiled.

        Raises:
            ValueError: it cannot be served: the prompt is empty, holds an unknown token, or leaves no room
                for max_tokens; the grammar is malformed.
            QueueFullError: too many requests wait.
        """
        self._check(request)
        if request.params.grammar is None:
            self._enter(request, None)
        else:
            self._grammars.begin(request)

    def cancel(self, request_id: str) -> None:
        """Drop a request at the next step; one that has ended is no error."""
        if request_id in self._active:
            self._scheduler.cancel(request_id)
        elif request_id in self._grammars:
            self._grammars.cancel(request_id)

    def step(self) -> StepOutput:
        """One step of all requests; see `begin_step`."""
        return self.begin_step()()

    def begin_step(self) -> Callable[[], StepOutput]:
        """Begin a step of all requests; what it returns ends it, and is to be called once.

        In between the device is at the target pass, or on a CPU has ended it. Requests may be submitted and
        cancelled then, and other settings be put in force: the next step is the first to look at that.

        Raises:
            Exception: the engine is broken for good; requests are as they were. So may what it returns.
        """
        refused = self._enter_compiled()
        return partial(self._end_step, self._stepper.begin(self._settings, self._active), refused)

    def _end_step(self, step: Step, refused: list[tuple[str, EngineError]]) -> StepOutput:
        output = self._stepper.end(step)
        for request_id in [
            *(delta.request_id for delta in output.deltas if delta.finish_reason is not None),
            *(request_id for request_id, _ in output.failures),
            *output.cancelled,
        ]:
            self._learn(self._active.pop(request_id, None))
        self._coming.go_on()
        return replace(output, failures=(*refused, *output.failures))

    def tend(self) -> None:
        """Load and close proposers as the settings want it, try again what has failed, and go on remembering.

        Every step does so as well: this is for the time in which there is none.
        """
        self._stepper.prepare(self._settings, self._active)
        self._coming.go_on()

    def learn(self, tenant: str, outputs: Iterable[Sequence[int]], written: int) -> None:
        """Remember what requests of a tenant have written elsewhere; it may be proposed from now on.

        Args:
            tenant: whose it is.
            outputs: token ids.
            written: when, in seconds since the epoch.
        """
        for output in outputs:
            self._history.learn(tenant, output, written)

    def purge(self, tenant: str) -> None:
        """Forget what requests of a tenant have written, those that run or wait included."""
        self._history.purge(tenant)
        self._coming.purge(tenant)
        self._grammars.purge(tenant)
        for active in self._active.values():
            active.purged |= active.sequence.request.history == tenant

    def erase(self, before: int) -> None:
        """Forget what requests had written before, in seconds since the epoch."""
        self._history.erase(before)
        self._coming.erase(before)

    def close(self) -> None:
        """Give everything back."""
        self._speculation.close()
        self._grammars.close()

    def warm_up(self) -> None:
        """Generate two real tokens.

        Raises:
            EngineError: they could not be generated.
        """
        bos = self._loaded.tokenizer.bos_token_id
        params = SamplingParams(max_tokens=2, temperature=0, ignore_eos=True)
        labels = Labels(
            workload=OTHER_WORKLOAD,
            endpoint="warm_up",
            sampling_class=SamplingClass.GREEDY,
            arm=self._settings.in_force,
            generation=self._settings.generation,
        )
        prompt = (bos if isinstance(bos, int) else 0,)
        self.submit(Request("warm-up", prompt, params, labels, private=True))
        while self.busy:
            for _, error in self.step().failures:
                raise error

    def _learn(self, ended: Active | None) -> None:
        """Let what a request has written be remembered, if it may be."""
        if ended is None or ended.purged:
            return
        sequence, request = ended.sequence, ended.sequence.request
        if request.history is not None and not request.private:
            self._coming.put(request.history, sequence.tokens[len(request.prompt) :], _now())

    def _check(self, request: Request) -> None:
        prompt, limit = request.prompt, self._loaded.context_length
        if request.id in self._active or request.id in self._grammars:
            raise ValueError(f"there is a request {request.id} already")
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._loaded.vocab_size:
            raise ValueError(f"prompt tokens must be from 0 to {self._loaded.vocab_size - 1}")
        if request.params.max_tokens < 1 or len(prompt) + request.params.max_tokens > limit:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({request.params.max_tokens}, at least 1) "
                f"exceed the context length ({limit})"
            )
        self._scheduler.check_fits(request)

    def _enter(self, request: Request, constraint: Matcher | None) -> None:
        law = TokenLaw(
            request.params,
            request.prompt,
            vocab_size=self._loaded.vocab_size,
            ends=end_tokens(request.params, self._loaded.eos_token_ids),
            constraint=constraint,
        )
        verifying, proposing = self._draws(request)
        sequence = self._scheduler.submit(request, self._loaded.eos_token_ids)
        self._speculation.expect(request, self._settings)
        self._active[request.id] = Active(sequence, law, verifying, proposing)

    def _enter_compiled(self) -> list[tuple[str, EngineError]]:
        """Queue the requests whose grammar is compiled; without other work, wait a moment for one."""
        refused: list[tuple[str, EngineError]] = []
        if self._grammars:
            patience = 0.0 if self._active else _PATIENCE
            for request, outcome in self._grammars.ready(patience, self._clock()):
                try:
                    if isinstance(outcome, EngineError):
                        raise outcome
                    self._enter(request, outcome)
                except EngineError as error:
                    refused.append((request.id, error))
        return refused


def _now() -> int:
    """Seconds since the epoch: texts may be older than this process."""
    return int(time.time())
