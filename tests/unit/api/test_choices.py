"""Several streams become one, and none of them outlives it."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator
from contextlib import aclosing

import pytest

from outrider_serving.api.choices import Choices, merged
from outrider_serving.api.errors import ApiError
from outrider_serving.api.prepare import Call
from outrider_serving.api.tokens import Vocabulary
from outrider_serving.engine.types import (
    Delta,
    EngineError,
    FinishReason,
    Labels,
    QueueFullError,
    Request,
    SamplingClass,
    SamplingParams,
)
from unit.api.vocabularies import BYTES


class Streams:
    """Streams of numbers that remember which of them have ended, and how."""

    def __init__(self) -> None:
        self.ended: list[str] = []

    async def stream(self, name: str, count: int, failure: Exception | None = None) -> AsyncGenerator[str]:
        try:
            for number in range(count):
                await asyncio.sleep(0)
                yield f"{name}{number}"
            if failure:
                raise failure
        finally:
            self.ended.append(name)

    async def endless(self, name: str) -> AsyncGenerator[str]:
        try:
            await asyncio.Event().wait()
            yield name
        finally:
            self.ended.append(name)


async def test_every_item_comes_once_and_in_its_streams_order() -> None:
    streams = Streams()
    items = [item async for item in merged([streams.stream("a", 3), streams.stream("b", 5)])]
    assert [item for item in items if item[0] == "a"] == ["a0", "a1", "a2"]
    assert [item for item in items if item[0] == "b"] == ["b0", "b1", "b2", "b3", "b4"]
    assert sorted(streams.ended) == ["a", "b"]


async def test_one_that_fails_ends_all() -> None:
    streams = Streams()
    both = merged([streams.stream("a", 1, EngineError("broken")), streams.endless("b")])
    assert await anext(both) == "a0"
    with pytest.raises(EngineError, match="broken"):
        await anext(both)
    assert sorted(streams.ended) == ["a", "b"]
    assert len(asyncio.all_tasks()) == 1


async def test_an_early_end_closes_all() -> None:
    streams = Streams()
    three = [streams.stream("a", 9), streams.stream("b", 9), streams.endless("c")]
    async with aclosing(merged(three)) as items:
        await anext(items)
    assert sorted(streams.ended) == ["a", "b", "c"]
    assert len(asyncio.all_tasks()) == 1


async def test_cancellation_closes_all() -> None:
    streams = Streams()

    async def read() -> None:
        async with aclosing(merged([streams.endless("a"), streams.endless("b")])) as both:
            async for _ in both:
                pass

    reading = asyncio.create_task(read())
    await asyncio.sleep(0.01)
    reading.cancel()
    await asyncio.wait([reading])
    assert reading.cancelled()
    assert sorted(streams.ended) == ["a", "b"]


def call(count: int, stops: tuple[str, ...] = ()) -> Call:
    labels = Labels("other", "completions", SamplingClass.GREEDY, "stable", 0)
    return Call(
        tuple(
            Request(f"id-{choice}", (2, 3), SamplingParams(max_tokens=9, choice=choice), labels)
            for choice in range(count)
        ),
        Vocabulary(BYTES),
        stops,
    )


class Engine:
    """Commits the letters of a text one by one, the first choice's once, the second's twice, ..."""

    def __init__(self, text: str = "abc", failure: Exception | None = None) -> None:
        self.tokens = BYTES(text).input_ids
        self.failure = failure
        self.committed: dict[str, int] = {}
        self.closed: list[str] = []

    async def generate(self, request: Request) -> AsyncGenerator[Delta]:
        if self.failure and request.params.choice:
            raise self.failure
        tokens = self.tokens * (request.params.choice + 1)
        try:
            for place, token in enumerate(tokens, start=1):
                await asyncio.sleep(0)
                self.committed[request.id] = place
                reason = FinishReason.LENGTH if place == len(tokens) else None
                yield Delta(request.id, (token,), 0.0, reused=2 - request.params.choice, finish_reason=reason)
        finally:
            self.closed.append(request.id)


@pytest.mark.parametrize("count", [1, 2, 3])
async def test_each_choice_is_whole(count: int) -> None:
    choices = Choices(Engine().generate, call(count))
    text = [""] * count
    reasons: list[int] = []
    async for piece in choices.pieces():
        text[piece.index] += piece.text
        reasons += [piece.index] if piece.finish_reason else []
    assert text == ["abc" * (choice + 1) for choice in range(count)]
    assert sorted(reasons) == list(range(count))
    assert choices.usage.prompt_tokens == 2
    assert choices.usage.completion_tokens == sum(3 * (choice + 1) for choice in range(count))


async def test_a_stop_string_ends_its_choice_in_the_engine_too() -> None:
    engine = Engine("abcdefgh")
    pieces = [piece async for piece in Choices(engine.generate, call(1, ("cd",))).pieces()]
    assert "".join(piece.text for piece in pieces) == "ab"
    assert engine.committed == {"id-0": 4}
    assert engine.closed == ["id-0"]


@pytest.mark.parametrize(
    ("failure", "raised"),
    [(QueueFullError(1, 1), QueueFullError), (ValueError("it needs more pages than there are"), ApiError)],
)
async def test_a_choice_that_fails_fails_the_call(failure: Exception, raised: type[Exception]) -> None:
    engine = Engine(failure=failure)
    with pytest.raises(raised) as found:
        [piece async for piece in Choices(engine.generate, call(3)).pieces()]
    assert engine.closed == ["id-0"]
    if raised is ApiError:
        assert "The request cannot be served: it needs more pages" in str(found.value)


async def test_nothing_is_spent_before_the_engine_has_begun() -> None:
    choices = Choices(Engine().generate, call(2))
    assert choices.usage.prompt_tokens == 0
