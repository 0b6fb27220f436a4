"""The engine: requests in, chunks out, one thread that runs the step loop."""

from __future__ import annotations

import logging
import queue
import threading
from collections.abc import AsyncGenerator, Callable

from outrider_serving.engine.loop import Stepper
from outrider_serving.engine.records import StepRecord
from outrider_serving.engine.runner import ModelRunner
from outrider_serving.engine.scheduler import Scheduler
from outrider_serving.engine.sequence import Sequence, Sink
from outrider_serving.engine.speculation import Build, Speculation
from outrider_serving.engine.stream import Stream
from outrider_serving.engine.types import (
    Chunk,
    EngineClosedError,
    EngineError,
    Labels,
    Request,
    SamplingClass,
    SamplingParams,
)
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.registry import build_proposer
from outrider_serving.sampling.randomness import GeneratorRandomness, Randomness
from outrider_serving.settings import OTHER_WORKLOAD, PodSettings

logger = logging.getLogger(__name__)

OnStep = Callable[[StepRecord], None]


class Engine:
    """Generates completions; speculation changes how fast, never what.

    `generate` is called in an event loop, everything else from any thread.
    """

    def __init__(
        self,
        loaded: LoadedModel,
        settings: PodSettings,
        *,
        max_waiting: int = 256,
        max_running: int = 32,
        on_step: OnStep | None = None,
        build: Build = build_proposer,
        randomness: Callable[[Request], Randomness] = lambda _: GeneratorRandomness(),
    ) -> None:
        """Make an engine that does nothing before `start`.

        Args:
            loaded: the target and its tokenizer.
            settings: those in force until `set_settings`.
            max_waiting: how many requests may wait while all places are taken.
            max_running: how many requests take part in a step at most.
            on_step: gets the record of every step, in the engine's thread; must not block.
            build: makes a proposer from its settings; None from the method that proposes nothing.
            randomness: makes the source of draws of a request without a seed.
        """
        self._loaded = loaded
        self._settings = settings
        self._on_step = on_step
        self._randomness = randomness
        self._scheduler = Scheduler(max_waiting=max_waiting, max_running=max_running)
        self._stepper = Stepper(
            self._scheduler, Speculation(build), ModelRunner(loaded.model), loaded.eos_token_ids
        )
        self._thread = threading.Thread(target=self._serve, name="outrider-engine", daemon=True)
        self._aborted = False
        self._failure: str | None = None

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return self._scheduler.running

    @property
    def waiting(self) -> int:
        """Requests that have not begun."""
        return self._scheduler.waiting

    @property
    def settings(self) -> PodSettings:
        """The settings in force from the next step on."""
        return self._settings

    @property
    def failure(self) -> str | None:
        """Why the engine has stopped for good, None while it has not; only a new process helps."""
        return self._failure

    def start(self) -> None:
        """Start the thread of the step loop; once."""
        self._thread.start()

    def close(self, drain: bool = True, timeout: float | None = None) -> None:
        """Take no more requests and stop. Blocks until the thread has ended: not for an event loop's thread.

        Args:
            drain: let running and waiting requests end first, at most `timeout` seconds (None: no limit).
                Whatever is left then, or at once without drain, fails with EngineClosedError.
            timeout: see drain.
        """
        self._scheduler.close()
        if self._thread.ident is None:
            self._refuse_rest()
            return
        if drain:
            self._thread.join(timeout)
        self._aborted = True
        self._thread.join()

    def set_settings(self, settings: PodSettings) -> None:
        """Put other settings in force from the next step on; running requests go on."""
        self._settings = settings

    def warm_up(self) -> None:
        """Generate two real tokens; blocks.

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
        result = _Result()
        self._submit(Request("warm-up", (bos if isinstance(bos, int) else 0,), params, labels), result)
        result.wait()

    async def generate(self, request: Request) -> AsyncGenerator[Chunk, None]:
        """Generate a completion; nothing happens before the first chunk is asked for.

        Ending the iteration early (break, cancellation, `aclose`) cancels the request at the next step.

        Raises:
            ValueError: the prompt is empty, holds an unknown token, or leaves no room for max_tokens.
            QueueFullError: too many requests wait.
            EngineClosedError: the engine is shutting down or has failed.
            EngineError: the request failed inside the engine.
        """
        self._check(request)
        stream = Stream()
        self._submit(request, stream)
        try:
            finished = False
            while not finished:
                chunk = await stream.get()
                finished = chunk.finish_reason is not None
                yield chunk
        finally:
            stream.cancel()

    def _check(self, request: Request) -> None:
        prompt, limit = request.prompt, self._loaded.context_length
        if not prompt:
            raise ValueError("the prompt has no tokens")
        if min(prompt) < 0 or max(prompt) >= self._loaded.vocab_size:
            raise ValueError(f"prompt tokens must be from 0 to {self._loaded.vocab_size - 1}")
        if request.params.max_tokens < 1 or len(prompt) + request.params.max_tokens > limit:
            raise ValueError(
                f"prompt ({len(prompt)} tokens) and max_tokens ({request.params.max_tokens}, at least 1) "
                f"exceed the context length ({limit})"
            )

    def _submit(self, request: Request, sink: Sink) -> None:
        self._scheduler.submit(Sequence(request, sink, self._loaded.tokenizer, self._randomness(request)))

    def _serve(self) -> None:
        """The thread: steps while there is work; ends when closed, or when a step fails as a whole."""
        try:
            while self._scheduler.wait() and not self._aborted:
                record = self._stepper.step(self._settings)
                if record.rows:
                    self._report(record)
        except Exception as error:
            logger.exception("the step loop has failed")
            self._failure = f"{type(error).__name__}: {error}"
        finally:
            self._scheduler.close()
            self._refuse_rest()

    def _refuse_rest(self) -> None:
        for sequence in self._scheduler.take_all():
            sequence.sink.fail(EngineClosedError(self._failure or "the engine is shutting down"))

    def _report(self, record: StepRecord) -> None:
        if self._on_step is None:
            return
        try:
            self._on_step(record)
        except Exception:
            logger.exception("on_step raised")


class _Result:
    """A `Sink` that a thread waits for."""

    cancelled = False

    def __init__(self) -> None:
        self._items: queue.SimpleQueue[Chunk | EngineError] = queue.SimpleQueue()

    def put(self, chunk: Chunk) -> None:
        self._items.put(chunk)

    def fail(self, error: EngineError) -> None:
        self._items.put(error)

    def wait(self) -> None:
        """Block until the request is complete.

        Raises:
            EngineError: it failed.
        """
        while True:
            item = self._items.get()
            if isinstance(item, EngineError):
                raise item
            if item.finish_reason is not None:
                return
