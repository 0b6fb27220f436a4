"""One life of the engine's process, as its parent sees it: started, listened to, watched, ended.

Time is told by ticks, of the parent's event loop and of the child's own threads, never by the difference of
two readings of a clock: where everything was stopped at once (a frozen container, a sleeping laptop) no
ticks were missed, and a child that only woke up with us is not taken for one that hangs.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import socket
import sys
from collections.abc import Callable
from dataclasses import dataclass
from enum import StrEnum
from signal import strsignal

from outrider_serving.engine.process.protocol import (
    BEAT_SECONDS,
    Beat,
    Broken,
    Ready,
    ToApi,
    ToEngine,
    encode,
    read,
)

logger = logging.getLogger(__name__)

LAST_SECONDS = 1.0
"""How long a process takes at most from closing its socket to its end."""

KILL_SECONDS = 30.0
"""A process that has not ended so long after SIGKILL is held by the kernel, and with it its device."""


@dataclass(frozen=True, slots=True)
class Patience:
    """When a process that has been ready, and lives, is taken for one that hangs. In seconds.

    Attributes:
        silence: without a beat: it is stopped, or something in it does not let any thread run.
        step: in which it was occupied without ending a step.
    """

    silence: float = 10.0
    step: float = 300.0


DEFAULT_PATIENCE = Patience()


class Reason(StrEnum):
    """Why a process ended; the label of the counter of restarts."""

    DIED = "died"
    STALLED = "stalled"
    FAILED = "failed"


@dataclass(frozen=True, slots=True)
class Ending:
    """How a process ended.

    Attributes:
        what: continues "the engine's process ...".
        refused: what it said if it cannot serve the model as asked, else None.
        lost: it does not end even when killed.
    """

    reason: Reason
    what: str
    refused: str | None = None
    lost: bool = False


class Child:
    """A running engine's process. Belongs to the event loop."""

    def __init__(
        self,
        process: asyncio.subprocess.Process,
        reader: asyncio.StreamReader,
        writer: asyncio.StreamWriter,
    ) -> None:
        self._process = process
        self._reader = reader
        self._writer = writer
        self._ready = False
        self._silent = 0
        self._stuck = 0
        self._ending: Ending | None = None

    @classmethod
    async def spawn(cls) -> Child:
        """Start a process, which waits for `Start`; OSError if there cannot be one.

        The process lives no longer than the thread that calls this.
        """
        ours, theirs = socket.socketpair()
        try:
            with theirs:
                process = await asyncio.create_subprocess_exec(
                    *(sys.executable, "-m", "outrider_serving.engine.process.main", str(theirs.fileno())),
                    pass_fds=[theirs.fileno()],
                    stdin=asyncio.subprocess.DEVNULL,
                    # Ctrl-C is for us alone: what runs may still end.
                    start_new_session=True,
                )
            reader, writer = await asyncio.open_connection(sock=ours)
        except BaseException:
            ours.close()  # which ends the process, if there is one
            raise
        return cls(process, reader, writer)

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    def send(self, message: ToEngine) -> None:
        """Tell the engine; without effect where it is gone."""
        if not self._writer.is_closing():
            self._writer.write(encode(message))

    async def run(self, hear: Callable[[ToApi], None], patience: Patience) -> Ending:
        """Listen until the process has ended, which it has when this returns or raises.

        Args:
            hear: is told everything but beats.
            patience: after which a process that hangs is killed.
        """
        watching = asyncio.create_task(self._watch(patience))
        try:
            while True:
                message = await read(self._reader)
                self._note(message, patience)
                if not isinstance(message, Beat):
                    hear(message)
        except (EOFError, OSError):
            # Killing it at once may make asyncio lose the status of a process that is just ending.
            await self._ended(LAST_SECONDS)
        finally:
            watching.cancel()
            await self._end()
        return self._ending or Ending(Reason.DIED, self._status())

    def _note(self, message: ToApi, patience: Patience) -> None:
        """What a message says about the process itself."""
        self._silent = 0
        match message:
            case Ready():
                self._ready = True
            case Broken(what, refused):
                self._ending = Ending(Reason.FAILED, f"has failed: {what}", what if refused else None)
        stuck = self._ready and isinstance(message, Beat) and message.occupied
        self._stuck = self._stuck + 1 if stuck else 0
        if self._stuck * BEAT_SECONDS >= patience.step:
            self._condemn(f"has not ended a step for {patience.step:g} s, and was killed")

    async def _watch(self, patience: Patience) -> None:
        while True:
            await asyncio.sleep(BEAT_SECONDS)
            self._silent += 1
            if self._ready and self._silent * BEAT_SECONDS >= patience.silence:
                self._condemn(f"has given no sign of life for {patience.silence:g} s, and was killed")

    def _condemn(self, what: str) -> None:
        if self._ending is None:
            self._ending = Ending(Reason.STALLED, what)
            self._process.kill()
            self._writer.transport.abort()  # which ends `run`, whether or not the process can be killed

    async def _end(self) -> None:
        """Kill what is left of the process and wait for its end."""
        self._writer.transport.abort()
        if self._process.returncode is None:
            self._process.kill()
            if not await self._ended(KILL_SECONDS):
                self._ending = Ending(Reason.STALLED, "does not end although it was killed", lost=True)

    async def _ended(self, seconds: float) -> bool:
        """Wait for the process's end; False if it still has not ended after `seconds`."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(seconds):
                await self._process.wait()
        return self._process.returncode is not None

    def _status(self) -> str:
        status = self._process.returncode
        assert status is not None
        if status >= 0:
            return f"has ended with status {status}"
        return f"was ended by signal {-status} ({strsignal(-status)})"
