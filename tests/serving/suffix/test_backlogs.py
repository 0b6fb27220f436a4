"""Streams that hold much already: what is read of them, and what does not wait for it."""

from __future__ import annotations

import asyncio
import time
from array import array

import pytest

from outrider_serving.suffix.shared import backlog
from outrider_serving.suffix.shared.cursor import Cursor
from outrider_serving.suffix.shared.record import compress, seal
from serving.suffix.pods import KEYS, Pod, eventually, running, settled, text
from serving.suffix.redis_server import RedisServer


def fill(server: RedisServer, tenant: str, count: int, tokens: int = 12, hours: int = 0) -> None:
    """Outputs 0, 1, ... of one writer, each in a record of its own, finished so many hours apart."""
    now = int(1000 * time.time())
    with server.client() as client:
        pipe = client.pipeline()
        for number in range(count):
            [payload] = compress([array("i", text(number, tokens))])
            at = now - 3_600_000 * hours * (count - 1 - number)
            raw = seal(payload, origin=b"somebody", number=number + 1, generation=0, created=at)
            pipe.xadd(KEYS.log(tenant), {"r": raw})
        pipe.execute()


async def test_news_do_not_wait_for_what_others_wrote_long_ago(server: RedisServer) -> None:
    """Nor does the history of one that is new wait for that of another."""
    fill(server, "long", 400, tokens=1000)
    fill(server, "short", 2)
    writer, reader = Pod(server), Pod(server, warm_tenants=0)
    came: dict[tuple[str, int], float] = {}

    async def take(tenant: str, outputs: tuple[array[int], ...], written: int, alive: object) -> None:
        for output in outputs:
            came[tenant, output[0]] = time.monotonic()
            await asyncio.sleep(len(output) * 4e-5)  # as an engine takes it while requests run

    reader.log._deliver = take
    ages = []
    async with running(writer, reader, tenants=("news",)):
        await reader.connected()
        reader.log.need("long")
        await eventually(lambda: ("long", 0) in came)
        began = time.monotonic()
        reader.log.need("short")
        for number in range(4):
            writer.publish(number, tenant="news")
            at = time.monotonic()
            await eventually(lambda number=number: ("news", number) in came)
            ages.append(came["news", number] - at)
        await eventually(lambda: ("short", 1) in came)
        assert came["short", 1] - began < 1.0
        assert ("long", 399) not in came
    assert max(ages) < 0.7


async def test_what_could_not_be_kept_is_not_read_and_is_no_gap(server: RedisServer) -> None:
    fill(server, "a", 40, tokens=100)
    with server.client() as client:
        client.xadd(KEYS.log("a"), {"something": "else"})
        client.xadd(KEYS.log("a"), {"r": "short"})
    fill(server, "b", 3, tokens=100)
    reader, writer = Pod(server, kept_tokens=1000), Pod(server)
    async with running(reader, tenants=("a", "b", "empty")):
        await eventually(lambda: len(reader.delivered) == 13)
        assert (reader.numbers("a"), reader.numbers("b")) == (list(range(30, 40)), [0, 1, 2])
        async with running(writer, tenants=()):
            writer.publish(40)
            await eventually(lambda: reader.numbers("a")[-1] == 40)
        await asyncio.sleep(1.1)
        stats = reader.log.stats
        assert (stats.gaps, stats.lag_entries, stats.skipped) == (0, 0, {"foreign": 2})
        # It was trimmed since, and what is written now is all there is to read.
        with server.client() as client:
            client.xtrim(KEYS.log("a"), maxlen=20, approximate=False)
        await asyncio.sleep(1.1)
        assert reader.log.stats.lag_entries == 0


async def test_the_beginning_is_looked_for_in_small_steps(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(backlog, "_LOOKED_ENTRIES", 20)
    fill(server, "a", 100, tokens=100)
    async with running(reader := Pod(server, kept_tokens=6000)):
        await eventually(lambda: len(reader.delivered) == 60)
        assert reader.numbers() == list(range(40, 100))


async def test_one_that_is_needed_again_is_read_on_and_what_it_had_read_does_not_lag(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.state.MAX_FOLLOWED", 1)
    fill(server, "a", 10)
    reader, writer = Pod(server, warm_tenants=0), Pod(server)
    async with running(reader):
        await eventually(lambda: len(reader.delivered) == 10)
        reader.log.need("b")
        async with running(writer, tenants=()):
            writer.publish(10)
            await settled(writer)
        reader.log.need("a")
        await eventually(lambda: reader.numbers() == list(range(11)))
        await asyncio.sleep(1.1)
        assert reader.log.stats.lag_entries == 0


async def test_streams_with_much_news_are_read_in_turn(server: RedisServer) -> None:
    """After a connection has been away, or where others write much."""
    writer, reader = Pod(server), Pod(server)
    many = [f"many-{number}" for number in range(4)]
    order: list[str] = []

    async def take(tenant: str, outputs: tuple[array[int], ...], written: int, alive: object) -> None:
        order.append(tenant)
        await asyncio.sleep(0.06)

    async with running(writer, reader, tenants=(*many, "one")):
        await eventually(lambda: reader.log.stats.fresh_seconds is not None)
        await reader.stop()
        reader.log._deliver = take
        for tenant in many:
            fill(server, tenant, 30, tokens=2000)
        await reader.start()
        await eventually(lambda: len(order) >= 10)
        writer.publish(1, tenant="one")
        await settled(writer)
        before = len(order)
        await eventually(lambda: "one" in order)
        assert order.index("one") - before <= 4
        await eventually(lambda: len(order) >= before + 12)
        assert {*many} < set(order[before:])


def test_what_is_left_out_is_neither_missing_nor_lagging() -> None:
    cursor = Cursor("a", 100)
    cursor.begin_after(10, 10)
    cursor.passed(11, 1)
    cursor.numbered(b"a" * 8, 11)
    cursor.passed(13, 2)
    cursor.numbered(b"a" * 8, 13)
    cursor.looked_at(14, 1, 15, position=13, lap=cursor.lap)
    assert (cursor.gaps, cursor.lag) == (1, 2)
    # Read again from further on: the gap stays one, and what was never read is none.
    cursor.again()
    cursor.begin_after(20, 20)
    cursor.passed(21, 3)
    cursor.numbered(b"a" * 8, 30)
    cursor.looked_at(5, 17, 21, position=21, lap=cursor.lap)
    assert (cursor.gaps, cursor.lag) == (1, 0)
    cursor.looked_at(2, 22, 23, position=21, lap=cursor.lap)
    assert cursor.lag == 2


def test_what_is_trimmed_of_what_was_left_out_hides_no_lag() -> None:
    cursor = Cursor("a", 100)
    cursor.begin_after(10, 10)
    for entry in (11, 12):
        cursor.passed(entry, entry)
    cursor.looked_at(8, 5, 12, position=12, lap=cursor.lap)
    cursor.looked_at(9, 5, 13, position=12, lap=cursor.lap)
    assert cursor.lag == 1
