"""What requests have written, between the API, which hears of it elsewhere too, and the engine."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Protocol

from outrider_serving.engine.process.protocol import Learn, Learned
from outrider_serving.suffix.lookup import LESSON_TOKENS
from outrider_serving.suffix.pieces import pieces

_SHARE = 0.01
"""Of the engine's time, while requests run."""


class OutputListener(Protocol):
    """Is told what requests write that may be remembered; of each, until it has ended or is given up."""

    def began(self, request_id: str, history: str, *, private: bool) -> None:
        """A request that sees a history was sent to the engine; what a private one writes is nobody's."""

    def wrote(self, request_id: str, tokens: Sequence[int]) -> None:
        """Tokens were committed; one that did not begin is no error."""

    def ended(self, request_id: str) -> None:
        """Nothing more will come of it; one that did not begin is no error."""


class Teacher:
    """Tells an engine what was written elsewhere, one small lesson after another.

    Each waits until the one before is taken, so no request ever waits behind more than one. Belongs to the
    event loop.
    """

    def __init__(self, send: Callable[[Learn], bool], busy: Callable[[], bool]) -> None:
        """Take what sends to an engine that is ready, False where there is none, and whether requests run."""
        self._send = send
        self._busy = busy
        self._turn = asyncio.Lock()
        self._taken: asyncio.Future[float] | None = None

    async def teach(
        self, tenant: str, outputs: Sequence[array[int]], written: int, alive: Callable[[], bool]
    ) -> bool:
        """Return when all is told, or it is void; False where there is no engine.

        One that comes is told by others. While requests run it takes a hundredth of the engine's time.

        Args:
            tenant: whose it is.
            outputs: token ids, each an array of type "i".
            written: when the oldest of them was, in seconds since the epoch.
            alive: whether it was not purged; asked before each lesson.
        """
        for lesson in lessons(tenant, outputs, written):
            async with self._turn:
                await self._all_taken()
                if not alive():
                    break
                if not self._send(lesson):
                    return False
                self._taken = asyncio.get_running_loop().create_future()
                seconds = await self._all_taken()
                if self._busy():
                    await asyncio.sleep(seconds * (1 - _SHARE) / _SHARE)
        return True

    async def _all_taken(self) -> float:
        """Wait for the lesson that is under way; the seconds that it took.

        Who told it may be cancelled meanwhile: the next one waits for it all the same.
        """
        return 0.0 if self._taken is None else await asyncio.shield(self._taken)

    def took(self, message: Learned) -> None:
        """The engine has taken a lesson."""
        self._end(message.seconds)

    def lost(self) -> None:
        """The engine is gone."""
        self._end(0.0)

    def _end(self, seconds: float) -> None:
        if self._taken is not None and not self._taken.done():
            self._taken.set_result(seconds)


def lessons(tenant: str, outputs: Sequence[array[int]], written: int) -> Iterator[Learn]:
    """The messages that tell an engine of outputs, none of them long; see `Teacher.teach`."""
    batch, tokens = list[bytes](), 0
    for output in outputs:
        for piece in pieces(output):
            if batch and tokens + len(piece) > LESSON_TOKENS:
                yield Learn(tenant, tuple(batch), written)
                batch, tokens = [], 0
            batch.append(piece.tobytes())
            tokens += len(piece)
    if batch:
        yield Learn(tenant, tuple(batch), written)
