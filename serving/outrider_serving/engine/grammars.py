"""Compiles the grammars of requests beside the steps, which they would hold up for seconds at worst."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import replace

from outrider_serving.engine.schedule.fairness import check_room
from outrider_serving.engine.types import DeadlineError, EngineError, Request
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.grammar import GrammarError
from outrider_serving.sampling.matcher import GrammarCompiler, Matcher

_AT_ONCE = 4
"""How many are handed to the thread at once: it has something to do until the next step looks at it."""

Outcome = Matcher | EngineError


class Grammars:
    """Belongs to the thread of the steps, which a thread of its own does not hold up.

    Tenants take turns, and none may have more places than it leaves to others, as in the scheduler's queue.
    """

    def __init__(self, loaded: LoadedModel, limit: int) -> None:
        """Prepare the vocabulary, which takes seconds where it is large; `limit` requests may wait."""
        self._trouble: str | None = None
        self._compiler: GrammarCompiler | None = None
        try:
            self._compiler = GrammarCompiler(
                loaded.tokenizer, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids
            )
        except GrammarError as error:
            self._trouble = str(error)
        self._limit = limit
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-grammar")
        self._lines: dict[str, deque[Request]] = {}  # of each tenant; the first one has the next turn
        self._under_way: dict[str, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        """How many requests wait for their grammar."""
        return len(self._under_way) + sum(map(len, self._lines.values()))

    def __contains__(self, request_id: str) -> bool:
        return any(request.id == request_id for request in self._requests())

    def begin(self, request: Request) -> None:
        """Let a request's grammar be compiled.

        Raises:
            ValueError: no grammar can be followed with this model's tokenizer.
            QueueFullError: too many wait, altogether or of this tenant.
        """
        if self._compiler is None:
            raise ValueError(f"this model's output cannot be constrained: {self._trouble}")
        tenants = [waiting.tenant for waiting in self._requests()]
        own, waiting = tenants.count(request.tenant), len(tenants)
        check_room(request.tenant, self._limit, own=own, waiting=waiting, others=own < waiting)
        self._lines.setdefault(request.tenant, deque()).append(request)
        self._start()

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        if request_id in self._under_way:
            self._under_way.pop(request_id)[1].cancel()
        for tenant, line in self._lines.items():
            self._lines[tenant] = deque(request for request in line if request.id != request_id)
        self._tidy()

    def purge(self, history: str) -> None:
        """What requests are going to write that see a history is not to be in it: they are private now."""

        def void(request: Request) -> Request:
            return replace(request, private=True) if request.history == history else request

        self._under_way = {name: (void(one), matcher) for name, (one, matcher) in self._under_way.items()}
        self._lines = {tenant: deque(map(void, line)) for tenant, line in self._lines.items()}

    def ready(self, patience: float, now: float) -> Iterator[tuple[Request, Outcome]]:
        """Requests whose grammar is compiled, cannot be, or was waited for too long.

        Args:
            patience: seconds to wait for one where there is none.
            now: of the clock that deadlines are of.
        """
        late = [r for r in self._requests() if r.deadline is not None and r.deadline <= now]
        for request in late:
            self.cancel(request.id)
            yield request, DeadlineError("the deadline of the request has passed")
        wait([future for _, future in self._under_way.values()], patience, FIRST_COMPLETED)
        for request, future in [pair for pair in self._under_way.values() if pair[1].done()]:
            del self._under_way[request.id]
            try:
                yield request, future.result()
            except GrammarError as error:
                yield request, EngineError(f"the grammar cannot be followed: {error}")
        self._start()

    def close(self) -> None:
        """End the thread; what it is doing is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)

    def _requests(self) -> Iterator[Request]:
        for request, _ in self._under_way.values():
            yield request
        for line in self._lines.values():
            yield from line

    def _start(self) -> None:
        """Hand work to the thread, tenant by tenant."""
        assert self._compiler is not None
        while self._lines and len(self._under_way) < _AT_ONCE:
            tenant, line = next(iter(self._lines.items()))
            request = line.popleft()
            self._lines[tenant] = self._lines.pop(tenant)  # last in turn now
            self._tidy()
            grammar = request.params.grammar
            assert grammar is not None
            self._under_way[request.id] = (request, self._thread.submit(self._compiler.matcher, grammar))

    def _tidy(self) -> None:
        self._lines = {tenant: line for tenant, line in self._lines.items() if line}
