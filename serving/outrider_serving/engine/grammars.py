"""Compiles the grammars of requests beside the step loop, which they would hold up for seconds at worst."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait

from outrider_serving.engine.types import EngineError, Request
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.grammar import GrammarError
from outrider_serving.sampling.matcher import GrammarCompiler, Matcher


class Grammars:
    """Belongs to the thread of the step loop, which a thread of its own does not hold up."""

    def __init__(self, loaded: LoadedModel) -> None:
        """Prepare the vocabulary: takes seconds where it is large."""
        self._trouble: str | None = None
        self._compiler: GrammarCompiler | None = None
        try:
            self._compiler = GrammarCompiler(
                loaded.tokenizer, vocab_size=loaded.vocab_size, eos_token_ids=loaded.eos_token_ids
            )
        except GrammarError as error:
            self._trouble = str(error)
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-grammar")
        self._under_way: dict[str, tuple[Request, Future[Matcher]]] = {}

    def __len__(self) -> int:
        """How many requests wait for their grammar."""
        return len(self._under_way)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._under_way

    def begin(self, request: Request) -> None:
        """Compile a request's grammar.

        Raises:
            ValueError: no grammar can be followed with this model's tokenizer.
        """
        if self._compiler is None:
            raise ValueError(f"this model's output cannot be constrained: {self._trouble}")
        assert request.params.grammar is not None
        future = self._thread.submit(self._compiler.matcher, request.params.grammar)
        self._under_way[request.id] = (request, future)

    def cancel(self, request_id: str) -> None:
        """Forget a request."""
        _, future = self._under_way.pop(request_id)
        future.cancel()

    def ready(self, patience: float) -> Iterator[tuple[Request, Matcher | EngineError]]:
        """Requests whose grammar is compiled, or cannot be; where there is none, wait for one.

        `patience` is in seconds.
        """
        wait([future for _, future in self._under_way.values()], patience, FIRST_COMPLETED)
        for request, future in [pair for pair in self._under_way.values() if pair[1].done()]:
            del self._under_way[request.id]
            try:
                yield request, future.result()
            except GrammarError as error:
                yield request, EngineError(f"the grammar cannot be followed: {error}")

    def close(self) -> None:
        """End the thread; what it is doing is finished first."""
        self._thread.shutdown(wait=False, cancel_futures=True)
