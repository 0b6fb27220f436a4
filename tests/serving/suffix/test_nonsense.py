"""What listens where Redis should, and answers anything or nothing."""

from __future__ import annotations

import asyncio
import os
import random

import pytest

from outrider_serving.suffix.shared.wire import AnswerReader
from serving.suffix.pods import (
    KEYS,
    Pod,
    eventually,
    publish_unwaited,
    running,
    settled,
    text,
)
from serving.suffix.redis_server import RedisServer
from serving.suffix.relay import Relay, listening

LONG = os.environ.get("OUTRIDER_TEST_LONG") == "1"


NONSENSE = [
    b"+OK\r\n",
    b":7\r\n",
    b"$-1\r\n",
    b"*-1\r\n",
    b"*0\r\n",
    b"*1\r\n*2\r\n$1\r\na\r\n*1\r\n:1\r\n",
    b"*4\r\n:1\r\n:2\r\n:3\r\n:4\r\n",
    b"-ERR no\r\n",
    b"-LOADING Redis is loading the dataset in memory\r\n",
    b"-MOVED 1 127.0.0.1:1\r\n",
    b"HTTP/1.1 400 Bad Request\r\n\r\n",
    b"$20\r\nrun_id:x\r\n",
    b"\xff\xfe\x00\r\n\r\n",
    b"*1000000000\r\n",
    b"",
]


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("answer", NONSENSE, ids=repr)
async def test_nonsense_is_borne(answer: bytes) -> None:
    asked = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal asked
        while await reader.read(65536):
            asked += 1
            writer.write(answer)
            await writer.drain()
            if not answer:
                return

    async with listening(serve) as port:
        pod = Pod(f"redis://127.0.0.1:{port}", queue_bytes=20_000)
        async with running(pod):
            await publish_unwaited(pod, 200)
            await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
            assert asked >= 2
            stats = pod.log.stats
            assert (stats.connected, stats.published_records) == (False, 0)
            assert stats.queue_bytes <= 20_000
            assert stats.dropped["full"] + stats.queue_outputs == 200
            assert pod.delivered == []
    # Words that repeat nothing of what came, but for a server's own words of refusal.
    assert answer.startswith(b"-") or set(stats.faults) <= {"nonsense", "connection", "timeout"}


@pytest.mark.parametrize(
    ("size", "what"), [(b"$100000000000", bytes(1 << 16)), (b"*1000000000", b":1\r\n" * 10_000)]
)
async def test_an_answer_without_end_is_not_read(size: bytes, what: bytes) -> None:
    sent: list[int] = []

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.read(65536)
        sent.append(0)
        at = len(sent) - 1
        writer.write(size + b"\r\n")
        while True:
            writer.write(what)
            await writer.drain()
            sent[at] += len(what)

    async with listening(serve) as port:
        pod = Pod(f"redis://127.0.0.1:{port}")
        async with running(pod):
            await eventually(lambda: pod.log.stats.faults.get("nonsense", 0) >= 2)
            assert set(pod.log.stats.faults) == {"nonsense"}
    assert max(sent) < 16 << 20  # what lies between the two, in the system's buffers


async def test_a_long_answer_lets_others_run() -> None:
    reader, turns = AnswerReader(), 0
    reader.feed_data(b":1\r\n" * 20_000)

    async def count() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    others = asyncio.create_task(count())
    for _ in range(20_000):
        assert await reader.readline() == b":1\r\n"
    others.cancel()
    assert turns >= 70


async def test_what_somebody_puts_into_a_stream_is_never_too_large(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither among news nor among what lies there already."""
    monkeypatch.setattr("outrider_serving.suffix.shared.wire.ANSWER_BYTES", 200_000)
    writer, reader, late = Pod(server), Pod(server), Pod(server)
    async with running(writer, reader, tenants=("a", "b")):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client() as client:
            client.xadd(KEYS.log("a"), {"r": bytes(300_000)})
            client.xadd(KEYS.log("a"), {"r": "", "more": bytes(300_000)})
        await settled(writer)
        writer.publish(2)
        writer.publish(3, tenant="b")
        await eventually(lambda: (reader.numbers(), reader.numbers("b")) == ([1, 2], [3]))
        assert (reader.log.stats.skipped, reader.log.stats.faults) == ({"foreign": 2}, {"nonsense": 1})
        async with running(late, tenants=("a", "b")):
            await eventually(lambda: (late.numbers(), late.numbers("b")) == ([1, 2], [3]))
            assert (late.log.stats.skipped, late.log.stats.faults) == ({"foreign": 2}, {})


@pytest.mark.usefixtures("impatient")
@pytest.mark.parametrize("seed", range(20 if LONG else 3))
async def test_answers_with_wrong_bytes_deliver_nothing_that_was_not_published(
    server: RedisServer, seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.line.LONGEST_BACKOFF", 0.1)
    chance = random.Random(seed)
    wrong = 0

    async def change(data: bytes) -> bytes:
        nonlocal wrong
        if chance.random() < 0.2:
            wrong += 1
            at = chance.randrange(len(data))
            return data[:at] + bytes([data[at] ^ 1 << chance.randrange(8)]) + data[at + 1 :]
        return data

    async with Relay(server.port).running() as relay:
        writer, reader = Pod(server), Pod(relay.url)
        relay.change = change
        async with running(writer, reader):
            for number in range(100):
                writer.publish(number)
                reader.publish(1000 + number)
                await asyncio.sleep(0.02)
            assert wrong > 0
            # Nothing of it lasts.
            relay.change = None
            await asyncio.sleep(1.2)
            writer.publish(100)
            await eventually(lambda: 100 in reader.numbers())
        assert {tuple(text(number)) for number in range(101)} >= {output for _, output in reader.delivered}


@pytest.mark.usefixtures("impatient")
async def test_a_server_that_says_nothing_is_given_up() -> None:
    came = 0

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal came
        came += 1
        await reader.read(-1)

    async with listening(serve) as port:
        pod = Pod(f"redis://127.0.0.1:{port}")
        async with running(pod):
            assert not await pod.log.warmed(0.05)
            await publish_unwaited(pod, 10)
            await eventually(lambda: pod.log.stats.faults == {"timeout": 1})
            await eventually(lambda: came >= 2)
            assert pod.log.stats.queue_outputs == 10
