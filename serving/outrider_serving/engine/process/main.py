"""The engine's process, `python -m outrider_serving.engine.process.main FD`: the step loop behind a socket.

The main thread builds the core and runs its steps; it waits for messages only while there is no request, and
wakes up to look after proposers. A reader and a writer thread keep the socket away from it, so neither a slow
API nor a large message holds a step. It is the only thread that runs torch for long: torch keeps workers for
each thread that does, and they would stand in each other's way.

The process ends when the other end of its socket closes, when its parent dies, or when a step fails as a
whole; a new one is `engine.process.client`'s to start.
"""

from __future__ import annotations

import ctypes
import gc
import importlib
import logging
import os
import queue
import signal
import socket
import sys
import threading
import time
from array import array
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NoReturn, Protocol

from outrider_serving import logs
from outrider_serving.engine.cgroup import limit_threads
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.protocol import (
    BEAT_SECONDS,
    Beat,
    Broken,
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
    ToEngine,
    encode,
    receive,
)
from outrider_serving.engine.records import GraphCounts, PageCounts, StepOutput
from outrider_serving.engine.types import EngineError, Request
from outrider_serving.models.errors import ModelError
from outrider_serving.settings import PodSettings
from outrider_serving.suffix.lookup import HistorySize

logger = logging.getLogger(__name__)

LAST_WORDS_SECONDS = 5.0
"""How long the reason of the end may take to be written."""

_PR_SET_PDEATHSIG = 1


class Core(Protocol):
    """What runs here, called by the main thread only."""

    @property
    def busy(self) -> bool:
        """Whether a step would do something."""
        ...

    @property
    def tend_in(self) -> float | None:
        """Seconds until `tend` may have something to do, at least 0; None where a message must come first."""
        ...

    @property
    def running(self) -> int:
        """Requests that take part in steps."""
        ...

    @property
    def pages(self) -> PageCounts:
        """Pages of keys and values now."""
        ...

    @property
    def graphs(self) -> GraphCounts:
        """Passes of the target in graphs now."""
        ...

    @property
    def history(self) -> HistorySize:
        """What is remembered of what requests have written."""
        ...

    @property
    def proposer_trouble(self) -> str | None:
        """Why a proposer that the settings name is not loaded, None where all are."""
        ...

    def submit(self, request: Request) -> None:
        """Take a request; raises ValueError or EngineError where it cannot be taken."""
        ...

    def cancel(self, request_id: str) -> None:
        """Nobody reads this request any more; it may have ended already.

        Where it held pages, `busy` is true until a step has freed them.
        """
        ...

    def set_settings(self, settings: PodSettings) -> None:
        """Put settings in force from the next step on."""
        ...

    def learn(self, tenant: str, outputs: Iterable[Sequence[int]], written: int) -> None:
        """Remember what requests of a tenant have written elsewhere, and when (seconds since the epoch)."""
        ...

    def purge(self, tenant: str) -> None:
        """Forget what requests of a tenant have written."""
        ...

    def erase(self, before: int) -> None:
        """Forget what requests had written before, in seconds since the epoch."""
        ...

    def begin_step(self) -> Callable[[], StepOutput]:
        """Begin a step; what it returns ends it. Whatever either raises is the end of the process.

        In between all may be called but this and `tend`; what it does holds from the next step on.
        """
        ...

    def tend(self) -> None:
        """Look after what needs no request; whatever it raises is the end of the process."""
        ...


Factory = Callable[[EngineOptions, PodSettings], tuple[Core, ModelInfo]]
"""Builds a core that has generated a token; raises ModelError where it cannot be as asked."""

Say = Callable[[ToApi], None]


class Loop:
    """The main thread's work.

    Attributes:
        occupied: it is not waiting for a message; read by other threads.
    """

    def __init__(self, core: Core, inbox: queue.SimpleQueue[ToEngine], say: Say) -> None:
        self._core = core
        self._inbox = inbox
        self._say = say
        self._told: tuple[str | None, HistorySize] = None, HistorySize()
        self.occupied = False

    def run(self) -> NoReturn:
        """Take messages and step, until something is raised."""
        while True:
            if not self._core.busy:
                self._rest()
            self._take_all()
            if self._core.busy:
                self._step()

    def _step(self) -> None:
        """One step; messages are taken beside it, for which the device would idle after it.

        What it did is told at once. The writer's thread encodes it, 0.2 ms for 64 requests; to tell it beside
        the next pass would hold each token back for a plan, proposals and a launch.
        """
        end = self._core.begin_step()
        try:
            self._take_all()
        finally:  # a message that cannot be taken ends the process, but not before what was generated is told
            self._tell(end())

    def _take_all(self) -> None:
        for _ in range(self._inbox.qsize()):
            self._take(self._inbox.get())

    def _rest(self) -> None:
        """Wait for a message and take it, or until there is something to tend."""
        if (self._core.proposer_trouble, self._core.history) != self._told:
            self._tell(StepOutput(None))
        self.occupied = False
        try:
            message = self._inbox.get(timeout=self._core.tend_in)
        except queue.Empty:
            self.occupied = True
            self._core.tend()
        else:
            self.occupied = True
            self._take(message)

    def _tell(self, done: StepOutput) -> None:
        core = self._core
        trouble, history = self._told = core.proposer_trouble, core.history
        figures = core.running, core.pages, trouble, core.graphs, history
        self._say(Stepped(done.record, done.deltas, done.failures, *figures))

    def _take(self, message: ToEngine) -> None:
        match message:
            case Submit(request):
                try:
                    self._core.submit(request)
                except (ValueError, EngineError) as error:
                    self._say(Refused(request.id, error))
            case Cancel(request_id):
                self._core.cancel(request_id)
            case SetSettings(settings):
                self._core.set_settings(settings)
            case Learn(tenant, outputs, written):
                began = time.thread_time()  # not how long it was kept from a processor
                self._core.learn(tenant, [array("i", output) for output in outputs], written)
                self._say(Learned(time.thread_time() - began))
            case Purge(tenant):
                self._core.purge(tenant)
            case Erase(before):
                self._core.erase(before)
            case Start():
                raise ValueError("started twice")


def main(descriptor: int) -> NoReturn:
    """Be the engine at the other end of a socket; ends the process."""
    _die_with_parent()
    _leave_stopping_to_parent()
    connection = socket.socket(fileno=descriptor)
    start = receive(connection)
    assert isinstance(start, Start)
    logs.configure(start.log_level)
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    writer = _Writer(connection)
    writer.start()
    threading.Thread(target=_read, args=(connection, inbox), name="reader", daemon=True).start()
    try:
        core, model = _build(start)
        writer.say(Ready(model))
        del model
        # What is there now stays: no garbage collection needs to walk through it between two steps.
        gc.freeze()
        loop = writer.loop = Loop(core, inbox, writer.say)
        loop.run()
    except ModelError as error:
        writer.say(Broken(str(error), refused=True))
    except BaseException as error:
        logger.exception("the engine has failed")
        writer.say(Broken(f"{type(error).__name__}: {error}"))
    writer.end()
    _exit(1)


def _build(start: Start) -> tuple[Core, ModelInfo]:
    """Import the factory and let it work; what it imports reads these variables."""
    # Progress bars would break the lines of the log.
    os.environ.setdefault("TQDM_DISABLE", "1")
    limit_threads()
    module, _, name = start.factory.partition(":")
    # Nothing of what PyTorch and transformers define is garbage; to look for some is a fifth of the import.
    gc.disable()
    factory: Factory = getattr(importlib.import_module(module), name)
    gc.freeze()
    gc.enable()
    return factory(start.options, start.settings)


class _Writer(threading.Thread):
    """Sends what the engine says, and a beat when it is silent.

    Attributes:
        loop: what the beats tell of; None while the core is built.
    """

    def __init__(self, connection: socket.socket) -> None:
        super().__init__(name="writer", daemon=True)
        self._connection = connection
        self._outbox: queue.SimpleQueue[ToApi | None] = queue.SimpleQueue()
        self.loop: Loop | None = None

    def say(self, message: ToApi) -> None:
        """Send this next; never blocks."""
        self._outbox.put(message)

    def end(self) -> None:
        """Return when everything is sent, or will not be."""
        self._outbox.put(None)
        self.join(LAST_WORDS_SECONDS)

    def run(self) -> None:
        """The thread."""
        try:
            while (message := self._next()) is not None:
                self._connection.sendall(encode(message))
        except OSError:  # the API is gone
            _exit(0)
        except BaseException:
            logger.exception("the engine cannot say what it has done")
            _exit(1)

    def _next(self) -> ToApi | None:
        try:
            return self._outbox.get(timeout=BEAT_SECONDS)
        except queue.Empty:
            return Beat(occupied=self.loop is not None and self.loop.occupied)


def _read(connection: socket.socket, inbox: queue.SimpleQueue[Any]) -> None:
    """The reader thread: what comes goes to the main thread; the end of it is the end of the process."""
    try:
        while True:
            inbox.put(receive(connection))
    except (EOFError, OSError):
        _exit(0)
    except BaseException:
        logger.exception("the engine cannot understand what it is told")
        _exit(1)


def _die_with_parent() -> None:
    """Be killed when the parent dies, even while stopped: the closing socket alone would not reach us then.

    The kernel looks at the thread that started this process, which has to live as long as its process.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


def _leave_stopping_to_parent() -> None:
    """Where a stop signals every process, requests that run here are still drained by the parent."""
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, signal.SIG_IGN)


def _exit(status: int) -> NoReturn:
    """End without taking the interpreter down, which beside torch takes seconds, or crashes."""
    logging.shutdown()
    os._exit(status)


if __name__ == "__main__":
    main(int(sys.argv[1]))
