"""Pods that learn from each other through a real Redis."""

from __future__ import annotations

import asyncio
import time
from functools import partial

import pytest

from outrider_serving.suffix.shared.keys import identity_of
from serving.suffix.pods import KEYS, VOCABULARY, Pod, eventually, running, settled, text
from serving.suffix.redis_server import RedisServer


async def test_two_learn_from_each_other_within_a_second_and_a_third_starts_warm(server: RedisServer) -> None:
    one, two, three = Pod(server), Pod(server), Pod(server)
    async with running(one, two):
        await one.connected()
        await two.connected()
        took = []
        for number in (1, 2, 3):  # of which one may meet a busy machine
            began = time.monotonic()
            one.publish(number)
            two.publish(10 + number)
            await eventually(lambda number=number: (len(two.numbers()), len(one.numbers())) == (number,) * 2)
            took.append(time.monotonic() - began)
        assert sorted(took)[1] < 1.0
        assert abs(two.written - time.time()) < 60
        written = two.written
        await asyncio.sleep(1.0)
        async with running(three, tenants=()):
            assert await three.log.warmed(5.0)
            assert sorted(three.numbers()) == [1, 2, 3, 11, 12, 13]
            assert three.written <= written  # not when they were read
        # What came once does not come again, and own text never.
        await asyncio.sleep(1.2)
        assert (two.numbers(), one.numbers()) == ([1, 2, 3], [11, 12, 13])
        stats = one.log.stats
        assert (stats.published_tokens, stats.received_tokens) == (36, 36)
        assert (stats.gaps, stats.lag_entries, dict(stats.skipped)) == (0, 0, {})
        await eventually(lambda: (one.log.stats.fresh_seconds or 9.0) < 1.0)


async def test_a_tenant_never_gets_anothers_text(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server, warm_tenants=0)
    async with running(writer, reader, tenants=("b",)):
        writer.publish(1, tenant="a")
        writer.publish(2, tenant="b")
        writer.publish(3, tenant="")
        await eventually(lambda: reader.numbers("b") == [2])
        await settled(writer)
        await asyncio.sleep(0.6)
        assert {tenant for tenant, _ in reader.delivered} == {"b"}
        reader.log.need("")
        await eventually(lambda: reader.numbers("") == [3])
        assert {tenant for tenant, _ in reader.delivered} == {"b", ""}


@pytest.mark.parametrize("difference", [{"identity": identity_of("another")}, {"prefix": "other:"}])
async def test_another_model_or_prefix_is_another_log(
    server: RedisServer, difference: dict[str, str]
) -> None:
    writer = Pod(server)
    other = Pod(server, **difference)
    async with running(writer, other):
        writer.publish(1)
        await settled(writer)
        await asyncio.sleep(0.7)
        assert other.delivered == []


async def test_the_first_use_of_a_tenant_brings_its_history_while_others_are_read(
    server: RedisServer,
) -> None:
    writer, reader = Pod(server), Pod(server, warm_tenants=0)
    async with running(writer, reader, tenants=("b",)):
        for number in range(300):
            writer.publish(number, tenant="a")
            await asyncio.sleep(0)
        await settled(writer)
        await eventually(lambda: reader.log.stats.fresh_seconds is not None)
        assert reader.numbers("a") == []
        began = time.monotonic()
        reader.log.need("a")
        await eventually(lambda: len(reader.numbers("a")) == 300)
        assert time.monotonic() - began < 5.0


async def test_the_hottest_are_read_first_until_there_are_enough_tokens(server: RedisServer) -> None:
    writer = Pod(server)
    async with running(writer, tenants=()):
        for number, tenant in enumerate(["cold", "mild", "hot"]):
            writer.publish(number, tenant=tenant)
            await settled(writer)
        async with running(reader := Pod(server, warm_tokens=13), tenants=()):
            assert await reader.log.warmed(5.0)
            assert [tenant for tenant, _ in reader.delivered] == ["hot", "mild"]
        async with running(reader := Pod(server, warm_tenants=1), tenants=()):
            assert await reader.log.warmed(5.0)
            assert [tenant for tenant, _ in reader.delivered] == ["hot"]


async def test_long_outputs_come_in_parts_that_overlap(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    tokens = [(number * 7919 * number) % VOCABULARY for number in range(60_000)]
    async with running(writer, reader):
        writer.log.publish("a", tokens, 0)
        await settled(writer)
        await eventually(lambda: len(reader.delivered) == writer.log.stats.published_records)
        parts = [list(output) for _, output in reader.delivered]
        assert len(parts) > 8
        joined = parts[0]
        for part in parts[1:]:
            assert joined[-32:] == part[:32]
            joined += part[32:]
        assert joined == tokens


async def test_what_is_not_worth_it_or_wrong_is_counted_and_not_written(server: RedisServer) -> None:
    pod = Pod(server)
    async with running(pod):
        await pod.connected()
        pod.log.publish("a", [1, 2, 3], 0)
        pod.log.publish("a", [1, 2, 3, VOCABULARY], 0)
        pod.log.publish("a", [1, 2, 3, -1], 0)
        pod.log.publish("a", [1, 2, 3, 2**40], 0)
        pod.log.publish("a", ["1", 2, 3, 4], 0)  # type: ignore[list-item]
        pod.log.publish("a", None, 0)  # type: ignore[arg-type]
        pod.log.publish("a b", [1, 2, 3, 4], 0)
        pod.log.publish(None, [1, 2, 3, 4], 0)  # type: ignore[arg-type]
        assert pod.log.stats.dropped == {"short": 1, "tokens": 5, "tenant": 2}
        with server.client() as client:
            assert client.keys(KEYS.logs) == []


async def test_foreign_and_broken_entries_are_skipped_by_reason(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client() as client:
            raw = client.xrange(KEYS.log("a"))[0][1][b"r"]
            client.xadd(KEYS.log("a"), {"r": b"something"})
            client.xadd(KEYS.log("a"), {"other": raw})
            client.xadd(KEYS.log("a"), {"r": raw, "more": b""})
            client.xadd(KEYS.log("a"), {"r": raw[:4] + b"\x02" + raw[5:]})
            client.xadd(KEYS.log("a"), {"r": raw[:-1] + bytes([raw[-1] ^ 1])})
            client.xadd(KEYS.log("a"), {"r": raw[:20]})
        writer.publish(2)
        await eventually(lambda: reader.numbers() == [1, 2])
        assert reader.log.stats.skipped == {"foreign": 3, "version": 1, "checksum": 1, "length": 1}


async def test_a_key_that_is_no_stream_harms_only_its_tenant(server: RedisServer) -> None:
    with server.client() as client:
        client.set(KEYS.log("bad"), "something")
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader, tenants=("bad", "a")):
        writer.publish(1, tenant="bad")
        writer.publish(2, tenant="a")
        await eventually(lambda: reader.numbers("a") == [2])
        await settled(writer)
        assert reader.log.stats.skipped["key"] >= 1
        assert writer.log.stats.dropped == {"refused": 1}


async def test_what_was_trimmed_before_it_was_read_is_a_gap(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        await reader.stop()
        for number in range(2, 6):
            writer.publish(number)
            await settled(writer)
        with server.client() as client:
            client.xtrim(KEYS.log("a"), maxlen=1, approximate=False)
        await reader.start()
        await eventually(lambda: reader.numbers() == [1, 5])
        assert reader.log.stats.gaps == 3


async def test_streams_are_bounded_by_size_and_age(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.TRIM_SECONDS", 0.2)
    writer = Pod(server, retention_bytes=16 * 1024 * 100, retention_seconds=2)
    async with running(writer):
        for number in range(400):
            writer.log.publish("a", text(number, 5000), 0)
        await settled(writer)
        with server.client() as client:
            assert 100 <= client.xlen(KEYS.log("a")) <= 250  # Redis trims whole nodes
            assert 0 < client.ttl(KEYS.log("a")) <= 2
            for _ in range(14):
                # Something keeps the stream alive: what is older goes all the same.
                writer.publish(1)
                await asyncio.sleep(0.2)
            assert client.xlen(KEYS.log("a")) < 30
        await asyncio.sleep(2.2)
        assert writer.remembered() == []


async def test_a_receiver_that_pushes_back_is_waited_for_and_one_that_raises_is_not(
    server: RedisServer,
) -> None:
    writer, slow, broken = Pod(server), Pod(server), Pod(server)
    gate, waiting = asyncio.Event(), 0

    async def wait(tenant: str, outputs: object, written: int, alive: object) -> None:
        nonlocal waiting
        waiting += 1
        await gate.wait()

    def fail(tenant: str, outputs: object, written: int, alive: object) -> None:
        raise RuntimeError("no")

    slow.log._deliver = wait  # type: ignore[assignment]
    broken.log._deliver = fail
    async with running(writer, slow, broken):
        writer.publish(1)
        await eventually(lambda: waiting == 1)
        writer.publish(2)
        await settled(writer)
        await asyncio.sleep(0.6)
        assert waiting == 1
        gate.set()
        await eventually(lambda: waiting == 2)
        await eventually(lambda: broken.log.stats.skipped == {"failed": 2})


async def test_what_is_remembered_can_be_told_again(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        reader.publish(2)
        await eventually(lambda: (writer.numbers(), reader.numbers()) == ([2], [1]))
        assert sorted(writer.remembered()) == sorted(reader.remembered()) == [1, 2]


async def test_the_end_can_wait_until_all_is_written(server: RedisServer) -> None:
    pod = Pod(server)
    pod.publish(1)
    assert not await pod.log.flushed(0.1)
    async with running(pod):
        assert await pod.log.flushed(5.0)
        assert pod.log.stats.published_records == 1


async def test_many_tenants_are_followed_at_once(server: RedisServer) -> None:
    tenants = tuple(f"tenant-{number}" for number in range(100))
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader, tenants=tenants):
        for first in (0, 1000):
            for number, tenant in enumerate(tenants):
                writer.publish(first + number, tenant=tenant)
            expected = len(reader.delivered) + 100
            await eventually(partial(lambda count: len(reader.delivered) == count, expected))
        for number, tenant in enumerate(tenants):
            assert reader.numbers(tenant) == [number, 1000 + number]
        assert reader.log.stats.lag_entries == 0


async def test_a_database_of_its_own(server: RedisServer) -> None:
    url = server.url.removesuffix("0") + "5"
    writer, reader = Pod(url), Pod(url)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client(db=5) as client:
            assert client.xlen(KEYS.log("a")) == 1
