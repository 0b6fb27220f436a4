"""Redis restarted, emptied or failed over: what can be kept is, and nothing comes twice or comes back."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Awaitable, Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AsyncExitStack

import pytest

from outrider_serving.suffix.shared.connection import connected
from outrider_serving.suffix.shared.line import Line
from outrider_serving.suffix.shared.reading import Reader
from outrider_serving.suffix.shared.state import Epoch
from outrider_serving.suffix.shared.writing import FLUSH_SECONDS
from serving.suffix.pods import (
    KEYS,
    VOCABULARY,
    Pod,
    eventually,
    running,
    settled,
    stored,
    stored_raws,
)
from serving.suffix.redis_server import RedisServer, Servers
from serving.suffix.relay import Relay
from serving.suffix.test_purge import purge


@pytest.fixture
def thread() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(1) as made:
        yield made


_AT_RISK = FLUSH_SECONDS + 1.0 + 0.1
"""Seconds: what waits in the pod, what `everysec` leaves in memory, and a little for the test itself."""


def _load(writer: Pod) -> tuple[Callable[[float], Awaitable[None]], dict[int, float]]:
    """What publishes 200 outputs a second for so many seconds, and when each of them was published."""
    published: dict[int, float] = {}

    async def load(seconds: float) -> None:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            published[len(published)] = time.monotonic()
            writer.publish(len(published) - 1)
            await asyncio.sleep(0.005)

    return load, published


async def test_killed_under_load_and_restarted_with_aof_it_loses_at_most_the_last_second(
    some: Servers,
) -> None:
    server = some.redis("--appendonly", "yes", "--appendfsync", "everysec")
    writer, reader = Pod(server), Pod(server)
    load, published = _load(writer)
    async with running(writer, reader):
        await load(2.0)
        killed = time.monotonic()
        server.kill()
        await load(0.5)
        await asyncio.to_thread(server.start)
        await load(0.5)
        await settled(writer)
        async with running(late := Pod(server)):
            assert await late.log.warmed(5.0)
            kept = set(late.numbers())
            assert len(kept) == len(late.numbers())
        lost = published.keys() - kept
        assert all(killed - _AT_RISK < published[number] <= killed for number in lost)
        # Connected pods catch up, with each output once; what was lost between may be among what they had.
        await eventually(lambda: set(reader.numbers()) >= kept)
        assert len(reader.numbers()) == len(set(reader.numbers()))
        assert writer.log.stats.dropped == {}
        assert reader.log.stats.reconnects >= 1


async def test_everything_killed_and_restarted_with_aof_loses_at_most_the_last_second(some: Servers) -> None:
    server = some.redis("--appendonly", "yes", "--appendfsync", "everysec")
    writer = Pod(server)
    load, published = _load(writer)
    async with running(writer):
        await load(2.5)
        killed = time.monotonic()
        server.kill()
        writer.publish(len(published))
    await asyncio.to_thread(server.start)
    async with running(late := Pod(server)):
        assert await late.log.warmed(5.0)
        kept = late.numbers()
    assert len(published) not in kept
    assert len(kept) == len(set(kept))
    assert all(killed - _AT_RISK < published[number] for number in published.keys() - set(kept))


async def test_emptied_it_is_filled_again_each_record_once_and_purged_text_stays_gone(some: Servers) -> None:
    server = some.redis()
    one, two = Pod(server), Pod(server)
    async with running(one, two, tenants=("a", "b")):
        one.publish(1, 2, tenant="a")
        two.publish(3, tenant="a")
        one.publish(4, tenant="b")
        await eventually(lambda: (len(two.delivered), len(one.delivered)) == (3, 1))
        await purge(server, "b")
        await eventually(lambda: (one.purged, two.purged) == (["b"], ["b"]))
        server.kill()
        one.publish(5, tenant="a")
        await asyncio.to_thread(server.start)
        await eventually(lambda: two.numbers("a") == [1, 2, 5])
        await eventually(lambda: one.log.stats.refilled_records + two.log.stats.refilled_records == 2)
        await asyncio.sleep(1.2)
        with server.client() as client:
            raws = [fields[b"r"] for _, fields in client.xrange(KEYS.log("a"))]
            assert len(raws) == len(set(raws)) == 3
            assert client.exists(KEYS.log("b")) == 0
            assert client.hget(KEYS.tombstones, "b") is not None
        assert (one.numbers(), two.numbers()) == ([3], [1, 2, 5])
        assert one.log.stats.epochs == two.log.stats.epochs == 1
        async with running(late := Pod(server)):
            assert await late.log.warmed(5.0)
            assert (sorted(late.numbers("a")), late.numbers("b")) == ([1, 2, 3, 5], [])


async def test_what_was_filled_again_goes_when_it_is_too_old(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.TRIM_SECONDS", 0.2)
    monkeypatch.setattr("outrider_serving.suffix.shared.cursor.LATE_MS", 500)
    one = Pod(server, retention_seconds=4)
    async with running(one):
        one.publish(1)
        await settled(one)
        began = time.monotonic()
        await asyncio.sleep(2.0)
        with server.client() as client:
            client.flushall()
        await eventually(lambda: stored(server) == 1)
        await eventually(lambda: stored(server) == 0)
        # Counted from when it was finished, not from when it was written again.
        assert 3.5 < time.monotonic() - began < 5.5


async def test_pods_that_fill_it_again_at_the_same_time_write_each_record_once_and_none_that_is_dead(
    server: RedisServer, thread: ThreadPoolExecutor
) -> None:
    one, two = Pod(server), Pod(server)
    async with running(one, two, tenants=("a", "b")):
        for number in range(100):
            one.publish(number)
            two.publish(1000 + number)
            await asyncio.sleep(0.005)
        two.publish(1, tenant="b")
        await eventually(lambda: len(one.remembered()) == len(two.remembered()) == 201)
    records = set(stored_raws(server, "a"))
    with server.client() as client:
        client.flushall()
        # Purged by whom neither has heard of.
        client.hset(KEYS.tombstones, "b", 10**13)
    async with AsyncExitStack() as stack:
        readers = []
        for pod in (one, two):
            state = pod.log._state
            state.enter(Epoch("another", "run"))
            assert len(state.lost()) == len(records) + 1
            link = await stack.enter_async_context(connected(state.options, KEYS.tenants))
            line = Line(state, KEYS, link, thread, pod.log._telling)
            readers.append(Reader(line, VOCABULARY, pod.log._delivered, pod.log._idle, lambda: 10_000))
        await asyncio.gather(*(reader._refill() for reader in readers))
    assert sorted(stored_raws(server, "a")) == sorted(records)
    assert stored_raws(server, "b") == []
    assert one.log.stats.refilled_records + two.log.stats.refilled_records == len(records)


async def test_emptied_while_connected_it_is_filled_again(server: RedisServer) -> None:
    one, two = Pod(server), Pod(server)
    async with running(one, two):
        one.publish(1)
        await eventually(lambda: two.numbers() == [1])
        with server.client() as client:
            client.flushall()
        await eventually(lambda: stored(server) == 1)
        one.publish(2)
        await eventually(lambda: two.numbers() == [1, 2])
        await asyncio.sleep(1.2)
        assert stored(server) == 2


@pytest.mark.parametrize("ahead", [False, True], ids=["ids go on", "ids are lower"])
async def test_after_a_failover_what_is_new_comes_and_nothing_twice(some: Servers, ahead: bool) -> None:
    master = some.redis()
    async with Relay(master.port).running() as relay:
        writer, reader = Pod(relay.url), Pod(relay.url)
        async with running(writer, reader):
            writer.publish(1, 2)
            await eventually(lambda: reader.numbers() == [1, 2])
            replica = await asyncio.to_thread(some.replica, master)
            with replica.client() as client:
                client.execute_command("REPLICAOF", "NO", "ONE")
            if ahead:
                # The clock of the master is an hour ahead when it writes what the replica never gets.
                with master.client() as client:
                    raw = client.xrange(KEYS.log("a"))[0][1][b"r"]
                    later = 1000 * int(time.time() + 3600)
                    client.xadd(KEYS.log("a"), {"r": raw}, id=f"{later}-0")
                await eventually(lambda: reader.log.stats.duplicates == 1)
            else:
                writer.publish(3)
                await eventually(lambda: reader.numbers() == [1, 2, 3])
            before = reader.numbers()
            relay.to(replica.port)
            writer.publish(4)
            await eventually(lambda: reader.numbers() == [*before, 4])
            assert reader.log.stats.epochs == 1
            await asyncio.sleep(0.6)
            assert reader.numbers() == [*before, 4]


async def test_a_stream_that_began_again_with_lower_ids_is_read_again(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        writer.publish(2)
        await eventually(lambda: reader.numbers() == [1, 2])
        with server.client() as client:
            raws = [fields[b"r"] for _, fields in client.xrange(KEYS.log("a"))]
            await writer.stop()
            other = Pod(server, prefix="x:")
            async with running(other):
                other.publish(3)
                await settled(other)
            new = client.xrange(KEYS.log("a").replace("outrider:", "x:"))[0][1][b"r"]
            client.delete(KEYS.log("a"))
            for number, raw in enumerate([*raws, new], start=1):
                client.xadd(KEYS.log("a"), {"r": raw}, id=f"1-{number}")
        await eventually(lambda: reader.numbers() == [1, 2, 3])
        await writer.start()
