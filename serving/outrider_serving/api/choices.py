"""The choices of one call, generated side by side: pieces of all of them in the order in which they come."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import aclosing
from functools import reduce
from operator import add
from typing import TypeVar

from outrider_serving.api.completion import Completion, Piece
from outrider_serving.api.errors import invalid
from outrider_serving.api.evening import Metronome, read_ahead
from outrider_serving.api.prepare import Call
from outrider_serving.api.records import Usage
from outrider_serving.engine.types import Delta, EngineError, Request

Item = TypeVar("Item")

Generate = Callable[[Request], AsyncGenerator[Delta, None]]
"""An engine's `generate`."""


class Choices:
    """What the engine generates for one call."""

    def __init__(self, generate: Generate, call: Call, token_seconds: float | None = None) -> None:
        """Nothing happens before the first piece is asked for.

        Args:
            generate: of the engine.
            call: what to generate.
            token_seconds: each token of a choice comes by itself, and at least so long after the one before;
                None lets them come as they are committed.
        """
        self._generate = generate
        self._token_seconds = token_seconds
        self._echoes_scores = call.echo is not None and call.echo.offsets is not None
        self._scored = asyncio.Event()
        self._requests = call.requests
        self._completions = [
            Completion(
                call.vocabulary,
                request.prompt,
                index=request.params.choice,
                stops=call.stops,
                min_tokens=request.params.min_tokens,
                echo=call.echo,
            )
            for request in call.requests
        ]

    @property
    def usage(self) -> Usage:
        """What all choices have cost so far."""
        spent = [completion.usage for completion in self._completions if completion.usage.prompt_tokens]
        return reduce(add, spent, spent.pop(0)) if spent else Usage()

    def pieces(self) -> AsyncGenerator[Piece, None]:
        """The pieces; each choice ends with one that has a finish reason.

        What ends the iteration early (a failure of one choice, cancellation, `aclose`) cancels every choice.

        Raises:
            ApiError: (400) the engine cannot do what the call asks.
            EngineError: see the engine; also where it ended a choice without a reason.
        """
        streams = [self._one(*pair) for pair in zip(self._requests, self._completions, strict=True)]
        return streams[0] if len(streams) == 1 else merged(streams)

    async def _one(self, request: Request, completion: Completion) -> AsyncGenerator[Piece, None]:
        metronome = None if self._token_seconds is None else Metronome(self._token_seconds)
        deltas = self._deltas(request)
        async with aclosing(deltas if metronome is None else read_ahead(deltas)) as deltas:
            async for delta in deltas:
                for piece in await self._push(delta, completion, singly=metronome is not None):
                    if metronome is not None and piece.tokens:
                        await metronome.beat()
                    yield piece
                    if piece.finish_reason is not None:
                        return
        raise EngineError("the engine ended a completion without a reason")

    async def _push(self, delta: Delta, completion: Completion, *, singly: bool) -> list[Piece]:
        """The pieces of a delta. An echoed prompt is scored for the first choice only: others wait for it."""
        first = self._completions[0]
        if completion is first:
            # The scores of a whole prompt take long enough to stall every stream.
            large = bool(delta.prompt_logprobs)
            pieces = (
                await asyncio.to_thread(_pieces, first, delta, singly)
                if large
                else _pieces(first, delta, singly)
            )
            self._scored.set()
            return pieces
        if self._echoes_scores:
            await self._scored.wait()
            completion.echoed = first.echoed
        return _pieces(completion, delta, singly)

    async def _deltas(self, request: Request) -> AsyncGenerator[Delta, None]:
        async with aclosing(self._generate(request)) as deltas:
            try:
                async for delta in deltas:
                    yield delta
            except ValueError as error:
                raise invalid(f"The request cannot be served: {error}.") from error


def _pieces(completion: Completion, delta: Delta, singly: bool) -> list[Piece]:
    return completion.push_singly(delta) if singly else [completion.push(delta)]


async def merged(streams: Sequence[AsyncGenerator[Item, None]]) -> AsyncGenerator[Item, None]:
    """The items of all streams as they come; one that fails, or an early end, closes all of them."""
    waits = {asyncio.ensure_future(_next(stream)): stream for stream in streams}
    try:
        while waits:
            done, _ = await asyncio.wait(waits, return_when=asyncio.FIRST_COMPLETED)
            for wait in done:
                stream = waits.pop(wait)
                try:
                    item = wait.result()
                except StopAsyncIteration:
                    continue
                waits[asyncio.ensure_future(_next(stream))] = stream
                yield item
    finally:
        for wait in waits:
            wait.cancel()
        await asyncio.gather(*waits, return_exceptions=True)
        for stream in streams:
            await stream.aclose()


async def _next(stream: AsyncGenerator[Item, None]) -> Item:
    return await anext(stream)
