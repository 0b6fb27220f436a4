"""What requests write goes to the shared log, and what others' requests have written comes to the engine."""

from __future__ import annotations

import asyncio
import hashlib
import json
import time
from array import array
from collections.abc import Coroutine, Sequence
from dataclasses import dataclass, field
from typing import Any

from outrider_serving.engine.process.client import EngineClient
from outrider_serving.settings import SuffixSettings
from outrider_serving.suffix.shared.keys import identity_of
from outrider_serving.suffix.shared.log import SharedLog
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.suffix.shared.stats import LogStats

ERASE_SECONDS = 60.0
"""How often the engine is told to forget what is too old."""


@dataclass(slots=True)
class _Written:
    """What a request has written so far."""

    history: str
    generation: int
    tokens: array[int] = field(default_factory=lambda: array("i"))


class Sharing:
    """Between the engine and the shared log; an `OutputListener` of the engine. Belongs to the event loop.

    A pod without a shared log learns alone; in both cases what is too old is forgotten.
    """

    def __init__(self, options: LogOptions | None, retention_seconds: int, known: Sequence[str]) -> None:
        """Nothing is shared before `start`; what requests write until then is not.

        Args:
            options: of the shared log; None for none.
            retention_seconds: what is older is forgotten.
            known: histories that are followed before anybody asks for them.
        """
        self._options = options
        self._known = known
        self._retention = retention_seconds
        self._log: SharedLog | None = None
        self._engine: EngineClient | None = None
        self._written: dict[str, _Written] = {}
        self._tasks: set[asyncio.Task[None]] = set()
        self._replaying: asyncio.Task[None] | None = None

    @property
    def stats(self) -> LogStats | None:
        """Of the shared log; None where there is none."""
        return self._log.stats if self._log is not None else None

    @property
    def trouble(self) -> str | None:
        """Why nothing is shared now, though it should be; see `PodState.shared_cache_error`."""
        return self._log.trouble if self._log is not None else None

    async def start(self, engine: EngineClient, identity: str, vocab_size: int, warm_seconds: float) -> None:
        """Share from now on; wait for what those have shared that wrote last, at most so long.

        Args:
            engine: is ready.
            identity: see `model_identity`.
            vocab_size: of the model.
            warm_seconds: the longest wait.
        """
        self._engine = engine
        self._spawn(self._erase())
        if self._options is not None:
            self._log = SharedLog(
                self._options, identity, vocab_size, engine.learn, engine.purge, self._kept_tokens
            )
            for history in self._known:
                self._log.need(history)
            self._spawn(self._log.run())
            await self._log.warmed(warm_seconds)

    def tell_again(self) -> None:
        """The engine begins to keep what requests write: tell it what is remembered here."""
        if self._log is not None:
            if self._replaying is not None:
                self._replaying.cancel()
            self._replaying = self._spawn(self._replay(self._log))

    async def close(self, seconds: float) -> None:
        """Give the last outputs so long to be shared, where there is a Redis, then end."""
        if self._log is not None and self._log.stats.connected:
            await self._log.flushed(seconds)
        for task in self._tasks:
            task.cancel()

    def began(self, request_id: str, history: str, *, private: bool) -> None:
        """See `OutputListener`."""
        if self._log is None:
            return
        self._log.need(history)
        if not private:
            self._written[request_id] = _Written(history, self._log.generation(history))

    def wrote(self, request_id: str, tokens: Sequence[int]) -> None:
        """See `OutputListener`."""
        if (written := self._written.get(request_id)) is not None:
            written.tokens.extend(tokens)

    def ended(self, request_id: str) -> None:
        """See `OutputListener`."""
        written = self._written.pop(request_id, None)
        if written is not None and self._log is not None:
            self._log.publish(written.history, written.tokens, written.generation)

    def _spawn(self, work: Coroutine[Any, Any, None]) -> asyncio.Task[None]:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task

    def _kept_tokens(self) -> int:
        """How many tokens of a tenant the engine can keep, now or when a proposer comes that looks there."""
        assert self._engine is not None
        proposers = [arm.proposer for arm in self._engine.settings.arms.values()]
        return max((proposer.suffix or SuffixSettings()).history_tokens for proposer in proposers)

    async def _erase(self) -> None:
        while True:
            await asyncio.sleep(ERASE_SECONDS)
            assert self._engine is not None
            self._engine.erase(int(time.time()) - self._retention)

    async def _replay(self, log: SharedLog) -> None:
        """Tell the engine all that is remembered; the one that comes where this one has gone is told anew."""
        assert self._engine is not None
        for tenant, outputs, written, alive in log.replay():
            if not await self._engine.learn(tenant, outputs, written, alive):
                break


def model_identity(revision: str, tokenizer: Any) -> str:
    """What two pods must have in common to share token ids: weights, and what the ids stand for.

    Args:
        revision: commit or digest of the model.
        tokenizer: of transformers. To hash a large one takes a second.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    text = json.dumps(tokenizer.get_vocab(), sort_keys=True) if backend is None else backend.to_str()
    return identity_of(revision, hashlib.sha256(text.encode()).hexdigest())
