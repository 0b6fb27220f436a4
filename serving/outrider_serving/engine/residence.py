"""One proposer's life in the engine: memory, loading, what it knows of each request, failures."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import count

from transformers import PreTrainedModel

from outrider_serving.engine.schedule.pages import PagePool
from outrider_serving.engine.schedule.sequence import Sequence as Running
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.memory import ProposerMemoryError, Reserve
from outrider_serving.proposers.base import Began, Event, Needs, Proposer, Surroundings
from outrider_serving.settings import Proposer as ProposerSettings

logger = logging.getLogger(__name__)

Build = Callable[[ProposerSettings], Proposer | None]

_FIRST_PAUSE, _LONGEST_PAUSE = 1.0, 64.0
"""Seconds from a failure to the next try to load; each further one doubles them, a long calm resets them."""

_LOADING_PAUSE = 0.1
"""Seconds from one look at a load that is under way to the next, where no step looks."""

_marks = count(1)


class Grant:
    """Gives proposers memory of the reserve, and layers of keys and values in the target's pages."""

    def __init__(self, target: PreTrainedModel, vocab_size: int, pool: PagePool, reserve: Reserve) -> None:
        """Take the target, its pages, and the reserve."""
        self._target = target
        self._vocab_size = vocab_size
        self._pool = pool
        self._reserve = reserve

    def take(self, holder: str, needs: Needs, weights: int, name: str) -> Surroundings:
        """What a proposer that needs this is loaded into.

        Args:
            holder: who has the memory, until `give_back`.
            needs: what it wants of the target.
            weights: bytes that it takes beside its layers of keys and values.
            name: what the message of an error calls it.

        Raises:
            ProposerMemoryError: weights and layers do not fit into what is left of the reserve.
            ValueError: it wants hidden states that the target does not have.
        """
        last = self._target.config.get_text_config().num_hidden_layers
        if unknown := [layer for layer in needs.hidden_layers if layer > last]:
            raise ValueError(f"it wants the hidden states {unknown}, but the target has 0 to {last}")
        shapes, dtype = dict(enumerate(needs.kv_layers)), self._target.dtype
        slots = self._pool.total * self._pool.page_size
        layers = slots * sum(shape.bytes_per_token(dtype) for shape in shapes.values())
        self._reserve.take(holder, weights + layers, name)
        device = self._target.device
        return Surroundings(
            target=self._target,
            vocab_size=self._vocab_size,
            device=device,
            dtype=dtype,
            page_size=self._pool.page_size,
            kv=KVStore(shapes, slots, dtype, device).pairs,
        )

    def unmark(self, mark: str) -> None:
        """The keys and values that pages are marked with are no longer there."""
        self._pool.drop_mark(mark)

    def give_back(self, holder: str) -> None:
        """The memory is free again."""
        self._reserve.give_back(holder)


class Residence:
    """Belongs to the thread of the step loop; a heavy proposer loads in a thread of its own meanwhile.

    Attributes:
        name: names the settings that it was made for.
        settings: these.
        proposer: the loaded proposer; None while there is none, and for the method that proposes nothing.
        needs: what the loaded proposer wants of the target.
        trouble: why it is not loaded; None while nothing is wrong.
    """

    def __init__(
        self, name: str, settings: ProposerSettings, build: Build, grant: Grant, clock: Callable[[], float]
    ) -> None:
        """Nothing is loaded before `advance`."""
        self.name = name
        self.settings = settings
        self.proposer: Proposer | None = None
        self.trouble: str | None = None
        self._build = build
        self._grant = grant
        self._clock = clock
        self._loading: tuple[Proposer, Needs, Future[None]] | None = None
        self._mark = ""
        self.needs = Needs()
        self._missing: dict[str, int] = {}
        self._pause = 0.0
        self._failed_at = -math.inf
        self._retry_at = -math.inf

    @property
    def marks(self) -> frozenset[str]:
        """What pages are marked with that hold the loaded proposer's own keys and values."""
        return frozenset([self._mark] if self.needs.kv_layers else [])

    @property
    def due_in(self) -> float | None:
        """Seconds until `advance` may have something to do; None where it has nothing more to do."""
        if self._loading is not None:
            return _LOADING_PAUSE
        if self.proposer is not None or self._retry_at == math.inf:
            return None
        return max(0.0, self._retry_at - self._clock())

    def knows(self, request_id: str) -> bool:
        """It may be asked about a request: it was told of it, and lacks no keys and values of its own."""
        return request_id in self._missing and not self.sits_out(request_id)

    def sits_out(self, request_id: str) -> bool:
        """It lacks keys and values of its own for a request, and does not get them any more."""
        return bool(self.needs.kv_layers) and self._missing.get(request_id, 0) > 0

    def advance(self, running: Iterable[Running]) -> None:
        """Load what is to be loaded by now; tell a proposer that is ready of the requests that run.

        Raises:
            ProposerMemoryError: it does not fit.
            Exception: whatever the proposer raised.
        """
        if self._loading is not None:
            proposer, needs, loading = self._loading
            if loading.done():
                self._loading = None
                self._enter(proposer, needs, running, loading.result)
        elif self.proposer is None and self._clock() >= self._retry_at:
            self._load(running)

    def beginning(self, sequence: Running) -> Began:
        """The event of a request that begins, with what is known of its pages."""
        missing = 0 if self.marks and self.marks <= sequence.hit_marks else sequence.computed
        self._missing[sequence.request.id] = missing
        return _began(sequence, missing)

    def observe(self, events: Sequence[Event]) -> None:
        """Tell the proposer."""
        if self.proposer is not None and events:
            self.proposer.observe(events)

    def forget(self, request_ids: Iterable[str]) -> None:
        """Tell the proposer of requests that have ended."""
        for request_id in request_ids:
            if self._missing.pop(request_id, None) is not None and self.proposer is not None:
                self.proposer.forget(request_id)

    def fail(self, error: Exception) -> None:
        """Unload after an exception; `advance` tries again after a pause."""
        now = self._clock()
        calm = now - self._failed_at > 2 * _LONGEST_PAUSE
        self._pause = _FIRST_PAUSE if calm else min(2 * self._pause, _LONGEST_PAUSE)
        self._failed_at, self._retry_at = now, now + self._pause
        named = isinstance(error, ProposerMemoryError)
        self.trouble = str(error) if named else f"proposer {self.settings.method} failed: {error}"
        self.close()

    def close(self) -> None:
        """Unload; the memory is given back, where it still loads as soon as that has ended.

        Raises:
            Exception: what the proposer's `close` raised; nothing is left of it even so.
        """
        proposer, mark, loading = self.proposer, self._mark, self._loading
        self.proposer, self.needs, self._loading, self._mark = None, Needs(), None, ""
        self._missing.clear()
        self._grant.unmark(mark)
        if loading is not None:
            abandoned, _, future = loading
            future.add_done_callback(lambda ended: self._abandon(abandoned, ended, mark))
        else:
            self._leave(proposer, mark)

    def _load(self, running: Iterable[Running]) -> None:
        proposer = self._build(self.settings)
        if proposer is None:
            self._retry_at = math.inf
            return
        needs, weights = _read(proposer)
        self._mark = f"{self.settings.method}-{next(_marks)}"
        surroundings = self._grant.take(self._mark, needs, weights, self.settings.method)
        if weights == 0:
            self._enter(proposer, needs, running, lambda: proposer.load(surroundings))
            return
        thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-proposer")
        self._loading = (proposer, needs, thread.submit(proposer.load, surroundings))
        thread.shutdown(wait=False)

    def _enter(
        self, proposer: Proposer, needs: Needs, running: Iterable[Running], load: Callable[[], None]
    ) -> None:
        """The proposer is loaded by `load`, told of what runs, and there."""
        load()
        self.proposer, self.needs, self.trouble = proposer, needs, None
        for sequence in running:
            self._missing[sequence.request.id] = sequence.computed
        self.observe([_began(sequence, sequence.computed) for sequence in running])

    def _abandon(self, proposer: Proposer, loading: Future[None], mark: str) -> None:
        """The end of a load that nobody waits for any more, in the thread that loads."""
        try:
            self._leave(None if loading.exception() else proposer, mark)
        except Exception:
            logger.exception("proposer %s failed in closing after a load in vain", self.settings.method)

    def _leave(self, proposer: Proposer | None, mark: str) -> None:
        try:
            if proposer is not None:
                proposer.close()
        finally:
            self._grant.give_back(mark)


def _began(sequence: Running, missing: int) -> Began:
    request = sequence.request
    return Began(request.id, tuple(sequence.tokens), missing, sequence.computed, request.history)


def _read(proposer: Proposer) -> tuple[Needs, int]:
    """What a proposer needs, and the bytes that it takes beside: a copy, which it cannot change any more.

    Raises:
        ValueError: something is no number, or out of range; the message names it.
    """
    needs, weights = proposer.needs, proposer.memory_bytes
    if not isinstance(needs, Needs):
        raise ValueError(f"its needs are {needs!r}, which are not Needs")
    copy = Needs(
        hidden_layers=tuple(_whole("hidden layer", layer, 0) for layer in needs.hidden_layers),
        kv_layers=tuple(_read_shape(shape) for shape in needs.kv_layers),
        width=_whole("width", needs.width, 1),
    )
    return copy, _whole("memory_bytes", weights, 0)


def _read_shape(shape: object) -> KVShape:
    if not isinstance(shape, KVShape):
        raise ValueError(f"it has a layer of keys and values of shape {shape!r}, which is no KVShape")
    return KVShape(
        heads=_whole("number of heads", shape.heads, 1),
        key_size=_whole("size of keys", shape.key_size, 1),
        value_size=_whole("size of values", shape.value_size, 1),
    )


def _whole(what: str, value: object, least: int) -> int:
    """A number as it is; what merely counts as one (True, 1.0, one of numpy or torch) is refused."""
    if type(value) is not int or value < least:
        raise ValueError(f"its {what} is {value!r}, but must be a whole number of at least {least}")
    return value
