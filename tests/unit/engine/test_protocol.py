"""What crosses between the two processes comes out as it went in."""

import asyncio
import dataclasses
import socket
import threading

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process import protocol
from outrider_serving.engine.records import GraphCounts, PageCounts, RowRecord, StepRecord
from outrider_serving.engine.types import (
    DeadlineError,
    Delta,
    EngineClosedError,
    EngineError,
    FinishReason,
    Labels,
    QueueFullError,
    Request,
    SamplingClass,
    SamplingParams,
    TokenLogprobs,
)
from outrider_serving.settings import default_settings

LABELS = Labels("other", "completions", SamplingClass.GREEDY, "stable", 3)
REQUEST = Request("r", (1, 2, 3), SamplingParams(max_tokens=4, logit_bias=((5, -1.5),)), LABELS, tenant="red")
ROW = RowRecord("r", LABELS, tokens=3, context=0, proposed=2, depth=2, accepted=1, committed=2, reused=1)
RECORD = StepRecord("stable", 3, 1.5, (ROW,), 7, 0.1, 0.2, 0.3, 0.4, preemptions=1)
DELTA = Delta(
    "r", (4, 5), 2.5, logprobs=(TokenLogprobs(-0.5, ((4, -1.0),)),), finish_reason=FinishReason.STOP
)
MODEL = protocol.ModelInfo(b"tokenizer", "sha256:0", "float32", 64, frozenset({1}), 320, 9, 16)

TO_ENGINE: tuple[protocol.ToEngine, ...] = (
    protocol.Start("module:function", EngineOptions("m"), default_settings(), "info"),
    protocol.Submit(REQUEST),
    protocol.Cancel("r"),
    protocol.SetSettings(default_settings()),
)
TO_API: tuple[protocol.ToApi, ...] = (
    protocol.Ready(MODEL),
    protocol.Broken("it broke"),
    protocol.Stepped(RECORD, (DELTA,), (), 3, PageCounts(9, 4, 2), None, GraphCounts(15, 1)),
    protocol.Beat(occupied=True),
)


def received(*frames: bytes) -> list[protocol.ToEngine]:
    """What the engine's side makes of the bytes, written by another thread as the socket takes them."""
    near, far = socket.socketpair()

    def write() -> None:
        with far:
            for frame in frames:
                far.sendall(frame)

    writer = threading.Thread(target=write)
    writer.start()
    messages = []
    with near:
        try:
            while True:
                messages.append(protocol.receive(near))
        except EOFError:
            writer.join()
            return messages


async def read(data: bytes, pieces: int) -> list[protocol.ToApi]:
    """What the API's side makes of the bytes, which come in pieces of this size."""
    stream = asyncio.StreamReader()
    messages = []

    async def feed() -> None:
        for begin in range(0, len(data), pieces):
            stream.feed_data(data[begin : begin + pieces])
            await asyncio.sleep(0)
        stream.feed_eof()

    feeding = asyncio.create_task(feed())
    try:
        while True:
            messages.append(await protocol.read(stream))
    except EOFError:
        await feeding
        return messages


def test_messages_to_the_engine_come_in_order_and_equal() -> None:
    assert received(*map(protocol.encode, TO_ENGINE)) == list(TO_ENGINE)


@pytest.mark.parametrize("pieces", [1, 7, 100_000])
async def test_messages_to_the_api_come_in_order_and_equal(pieces: int) -> None:
    data = b"".join(map(protocol.encode, TO_API))
    assert await read(data, pieces) == list(TO_API)


@given(cut=st.integers(1, len(protocol.encode(TO_API[2])) - 1))
def test_a_message_that_is_cut_off_is_none(cut: int) -> None:
    whole = protocol.encode(protocol.Cancel("r"))
    assert received(whole, whole[: min(cut, len(whole) - 1)]) == [protocol.Cancel("r")]
    data = protocol.encode(TO_API[2])
    assert asyncio.run(read(data + data[:cut], 50)) == [TO_API[2]]


def test_a_message_larger_than_any_buffer() -> None:
    long = dataclasses.replace(REQUEST, prompt=tuple(range(200_000)))
    assert received(protocol.encode(protocol.Submit(long))) == [protocol.Submit(long)]


@pytest.mark.parametrize(
    "error",
    [
        QueueFullError(9, 8, retry_after=7),
        DeadlineError("too late"),
        EngineClosedError("closing"),
        EngineError("it broke"),
        ValueError("the prompt has no tokens"),
    ],
)
async def test_errors_cross_by_type(error: Exception) -> None:
    refused = protocol.Refused("r", error)
    failures = (("r", error),) if isinstance(error, EngineError) else ()
    stepped = protocol.Stepped(None, (), failures, 0, PageCounts())
    first, second = await read(protocol.encode(refused) + protocol.encode(stepped), 1000)
    assert isinstance(first, protocol.Refused)
    assert isinstance(second, protocol.Stepped)
    for crossed in (first.error, *(failed for _, failed in second.failures)):
        assert type(crossed) is type(error)
        assert str(crossed) == str(error)
        assert vars(crossed) == vars(error)
