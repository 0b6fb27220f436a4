"""The engine as the API sees it: requests go to a process of its own, which is replaced when it dies.

When the process has died, everything in flight ends with EngineClosedError and a new process is started, at
first after a second, then after twice as long each time, up to a minute; one that was ready for a minute
puts that back. Meanwhile requests are refused, and `unready` says why. A new process does not answer for
requests of an earlier one: a text of which a part has been read cannot be generated again.

A pod's restart would help with nothing that a new process does not, and costs the API's own state. Only after
MAX_SHORT_LIVES processes in a row that died before they were ready for a minute does `failure` ask for
one: then it is the last thing that has not been tried.
"""

from __future__ import annotations

import asyncio
import dataclasses
import logging
import time
from array import array
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import TypeVar

from outrider_serving import logs
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.child import DEFAULT_PATIENCE, Child, Ending, Patience, Reason
from outrider_serving.engine.process.protocol import (
    Cancel,
    Erase,
    Learn,
    Learned,
    ModelInfo,
    Purge,
    Ready,
    Refused,
    SetSettings,
    Start,
    Stepped,
    Submit,
    ToApi,
)
from outrider_serving.engine.process.written import OutputListener, Teacher
from outrider_serving.engine.records import GraphCounts, PageCounts, StepRecord
from outrider_serving.engine.types import Delta, EngineClosedError, EngineError, Request
from outrider_serving.models.errors import ModelError
from outrider_serving.settings import PodSettings
from outrider_serving.suffix.lookup import HistorySize

logger = logging.getLogger(__name__)

FACTORY = "outrider_serving.engine.process.launch:launch"

HEALTHY_SECONDS = 60.0
"""A process that was ready for so long was a good one."""

FIRST_DELAY_SECONDS = 1.0
MAX_DELAY_SECONDS = 60.0
MAX_SHORT_LIVES = 5

LOADING = "the model is loading"
CLOSING = "the engine is shutting down"

MAX_UNREAD = 4096
"""Deltas that may wait for their reader."""

Stream = asyncio.Queue[Delta | Exception]

Told = TypeVar("Told")


class EngineClient:
    """An engine in a process of its own. Belongs to the event loop; its figures may be read by any thread."""

    def __init__(
        self,
        options: EngineOptions,
        settings: PodSettings,
        *,
        factory: str = FACTORY,
        patience: Patience = DEFAULT_PATIENCE,
        on_step: Callable[[StepRecord], None] = lambda _: None,
        on_end: Callable[[Ending], None] = lambda _: None,
        on_history: Callable[[], None] = lambda: None,
        outputs: OutputListener | None = None,
    ) -> None:
        """An engine that does nothing before `start`.

        Args:
            options: what it is to be.
            settings: those in force until `set_settings`.
            factory: "module:function" of an `engine.process.main.Factory`; both processes can import it.
            patience: with a process that does not move.
            on_step: gets the record of every step.
            on_end: is told of every process that has ended and is to be replaced.
            on_history: is told of every process when it begins to keep what requests write: of what was
                written before, it knows nothing.
            outputs: is told what requests write that may be remembered.
        """
        self._options = options
        self._settings = settings
        self._factory = factory
        self._patience = patience
        self._on_step = on_step
        self._on_end = on_end
        self._on_history = on_history
        self._outputs = outputs
        self._streams: dict[str, Stream] = {}
        self._child: Child | None = None
        self._model: asyncio.Future[ModelInfo] = asyncio.get_running_loop().create_future()
        self._supervisor: asyncio.Task[None] | None = None
        self._ready_since: float | None = None
        self._short_lives = 0
        self._running = 0
        self._pages = PageCounts()
        self._graphs = GraphCounts()
        self._history = HistorySize()
        self._teacher = Teacher(self._teach, lambda: self.running > 0)
        self._lost = False
        self._proposer_trouble: str | None = None
        self.unready: str | None = LOADING
        """Why requests are refused now, None while they are not."""
        self.kernels = ""
        """The compiled code that runs the target; empty where transformers' own modules do."""
        self.suffix_compiled = False
        """Whether the index of the suffix proposer is compiled code."""

    @property
    def settings(self) -> PodSettings:
        """Those in force, or about to be."""
        return self._settings

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        return min(self._running, len(self._streams))

    @property
    def waiting(self) -> int:
        """Requests that do not yet."""
        return len(self._streams) - self.running

    @property
    def pages(self) -> PageCounts:
        """Pages of keys and values after the last step; none while there is no process that is ready."""
        return self._pages

    @property
    def graphs(self) -> GraphCounts:
        """Passes of the target in graphs after the last step; none while no process is ready."""
        return self._graphs

    @property
    def pid(self) -> int | None:
        """Of the engine's process, None while there is none."""
        return self._child.pid if self._child else None

    @property
    def history(self) -> HistorySize:
        """What is remembered of what requests have written, after the last step."""
        return self._history

    @property
    def proposer_trouble(self) -> str | None:
        """Why a proposer that the settings name was not loaded when it was last told, None where all were."""
        return self._proposer_trouble

    @property
    def failure(self) -> str | None:
        """Why this process should be replaced as well, None while there is hope without it."""
        hopeless = self._lost or self._short_lives >= MAX_SHORT_LIVES
        return self.unready if hopeless else None

    async def start(self) -> ModelInfo:
        """Start the process and wait until it has loaded the model; once. `close` cancels it.

        Raises:
            ModelError: the model cannot be served as asked.
            EngineError: the process ended for another reason.
        """
        self._supervisor = asyncio.create_task(self._supervise())
        return await asyncio.shield(self._model)

    async def close(self) -> None:
        """End the process; what is in flight ends with EngineClosedError. May be called at any time."""
        self.unready = CLOSING
        if self._supervisor is not None:
            self._supervisor.cancel()
            await asyncio.wait((self._supervisor,))
        self._teacher.lost()
        self._fail(CLOSING)
        self._model.cancel()

    def set_settings(self, settings: PodSettings) -> None:
        """Put other settings in force from the next step on; running requests go on."""
        self._settings = settings
        if self._child is not None:
            self._child.send(SetSettings(settings))

    async def learn(
        self, tenant: str, outputs: Sequence[array[int]], written: int, alive: Callable[[], bool]
    ) -> bool:
        """Tell the engine what requests of a tenant have written elsewhere; see `Teacher.teach`."""
        return await self._teacher.teach(tenant, outputs, written, alive)

    def _teach(self, lesson: Learn) -> bool:
        if self._child is None or self.unready is not None:
            return False
        self._child.send(lesson)
        return True

    def purge(self, tenant: str) -> None:
        """Let the engine forget what requests of a tenant have written."""
        if self._child is not None:
            self._child.send(Purge(tenant))

    def erase(self, before: int) -> None:
        """Let the engine forget what requests had written before, in seconds since the epoch."""
        if self._child is not None:
            self._child.send(Erase(before))

    async def generate(self, request: Request) -> AsyncGenerator[Delta, None]:
        """Generate a completion; nothing happens before the first delta is asked for.

        Ending the iteration early (break, cancellation, `aclose`) cancels the request. Deltas that are not
        read wait here, up to MAX_UNREAD of them, and hold nothing up.

        Raises:
            ValueError: the request cannot be served as asked, or its id is in use.
            QueueFullError: too many requests wait.
            DeadlineError: its deadline passed.
            EngineClosedError: the engine is not ready, or has ended.
            EngineError: the request failed inside the engine, or too many of its deltas were not read.
        """
        stream = self._open(request)
        try:
            finished = False
            while not finished:
                item = await stream.get()
                if isinstance(item, Exception):
                    raise item
                finished = item.finish_reason is not None
                yield item
        finally:
            # A stream that has ended is not among them any more, and another may have its id by now.
            if self._streams.get(request.id) is stream:
                self._cancel(request.id)

    def _open(self, request: Request) -> Stream:
        if self.unready is not None or self._child is None:
            raise EngineClosedError(self.unready)
        if request.id in self._streams:
            raise ValueError(f"the request id {request.id!r} is in use")
        stream = self._streams[request.id] = Stream()
        if self._outputs is not None and request.history is not None:
            self._outputs.began(request.id, request.history, private=request.private)
        self._child.send(Submit(request))
        return stream

    async def _supervise(self) -> None:
        """Keep a process alive until cancelled; the first one has to become ready."""
        while True:
            ending = await self._live()
            if not self._model.done():
                self._model.set_exception(
                    EngineError(f"the engine's process {ending.what}")
                    if ending.refused is None
                    else ModelError(ending.refused)
                )
                return
            delay = self._bury(ending)
            if ending.lost:
                self._lost = True
                return
            await asyncio.sleep(delay)

    async def _live(self) -> Ending:
        """One process from its start to its end."""
        level = logging.getLevelName(logging.getLogger().level).lower()
        try:
            self._child = await Child.spawn()
            logs.event(logger, "the engine's process has started", pid=self.pid)
            self._child.send(Start(self._factory, self._options, self._settings, level))
            return await self._child.run(self._hear, self._patience)
        except Exception as error:
            logger.exception("the engine's process cannot be kept")
            return Ending(Reason.FAILED, f"cannot be kept: {type(error).__name__}: {error}")
        finally:
            self._child = None

    def _hear(self, message: ToApi) -> None:
        match message:
            case Stepped(record, deltas, failures, running, pages, trouble, graphs, history):
                self._running, self._pages, self._proposer_trouble = running, pages, trouble
                begins = history.kept and not self._history.kept
                self._graphs, self._history = graphs, history
                if begins:
                    self._on_history()
                for delta in deltas:
                    self._hand_over(delta.request_id, delta, last=delta.finish_reason is not None)
                for request_id, error in failures:
                    self._hand_over(request_id, error, last=True)
                if record is not None:
                    _tell(self._on_step, record)
            case Refused(request_id, error):
                self._hand_over(request_id, error, last=True)
            case Learned():
                self._teacher.took(message)
            case Ready(model):
                self._become_ready(model)

    def _hand_over(self, request_id: str, item: Delta | Exception, *, last: bool) -> None:
        stream = self._streams.get(request_id)
        if stream is None:  # its reader has gone
            return
        if self._outputs is not None and isinstance(item, Delta):
            self._outputs.wrote(request_id, item.tokens)
        if not last and stream.qsize() >= MAX_UNREAD:
            self._cancel(request_id)
            stream.put_nowait(EngineError(f"its reader is too slow: {MAX_UNREAD} deltas of it were not read"))
            return
        if last:
            self._forget(request_id)
        stream.put_nowait(item)

    def _forget(self, request_id: str) -> None:
        """It has ended, or nobody reads it any more."""
        del self._streams[request_id]
        if self._outputs is not None:
            self._outputs.ended(request_id)

    def _cancel(self, request_id: str) -> None:
        self._forget(request_id)
        if self._child is not None:
            self._child.send(Cancel(request_id))

    def _become_ready(self, model: ModelInfo) -> None:
        # Whatever "main" or a directory may hold by then: a later process serves the same model.
        self._options = dataclasses.replace(self._options, revision=model.revision)
        self._ready_since = time.monotonic()
        self._pages, self._graphs = PageCounts(total=model.pages), model.graphs
        self.unready = None
        self.kernels = model.kernels
        self.suffix_compiled = model.suffix_compiled
        kernels = model.kernels or "none"
        logs.event(
            logger, "the engine is ready", pages=model.pages, page_size=model.page_size, kernels=kernels
        )
        if not self._model.done():
            self._model.set_result(model)

    def _bury(self, ending: Ending) -> float:
        """Account for a process that has ended; the seconds until the next one is started."""
        since, self._ready_since = self._ready_since, None
        healthy = since is not None and time.monotonic() - since >= HEALTHY_SECONDS
        self._short_lives = 0 if healthy else self._short_lives + 1
        delay = min(MAX_DELAY_SECONDS, FIRST_DELAY_SECONDS * 2.0 ** max(0, self._short_lives - 1))
        self._running, self._pages, self._proposer_trouble = 0, PageCounts(), None
        self._graphs, self._history = GraphCounts(), HistorySize()
        self.unready = f"the engine's process {ending.what}" + (
            "" if ending.lost else ", and is being restarted"
        )
        self._teacher.lost()
        self._fail(self.unready)
        logs.event(
            logger,
            "the engine's process has ended",
            logging.ERROR,
            reason=ending.reason,
            what=ending.what,
            short_lives=self._short_lives,
            next_in=None if ending.lost else delay,
        )
        _tell(self._on_end, ending)
        return delay

    def _fail(self, why: str) -> None:
        """End everything in flight."""
        streams = dict(self._streams)
        for request_id, stream in streams.items():
            self._forget(request_id)
            stream.put_nowait(EngineClosedError(why))


def _tell(listener: Callable[[Told], None], what: Told) -> None:
    """Whoever listens cannot harm a request."""
    try:
        listener(what)
    except Exception:
        logger.exception("a listener of the engine raised")
