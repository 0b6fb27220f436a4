"""Redis slow, down, paused, full or read-only: only freshness suffers."""

from __future__ import annotations

import asyncio
from array import array

import pytest

from serving.suffix.pods import (
    Pod,
    eventually,
    publish_unwaited,
    running,
    settled,
    stored,
)
from serving.suffix.redis_server import RedisServer, Servers
from serving.suffix.relay import Relay
from serving.suffix.test_backlogs import fill


@pytest.mark.usefixtures("impatient")
async def test_paused_it_is_not_waited_for(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(0)
        await eventually(lambda: reader.numbers() == [0])
        with server.client() as client:
            client.execute_command("CLIENT", "PAUSE", 1500, "ALL")
        await publish_unwaited(writer, 100)
        await eventually(lambda: writer.log.stats.faults.get("timeout", 0) >= 1)
        assert not writer.log.stats.connected
        # What was written without an answer is written again, and comes once.
        await eventually(lambda: sorted(set(reader.numbers())) == list(range(100)))
        await settled(writer)
        await asyncio.sleep(0.6)
        assert len(reader.numbers()) == 101  # 0 was published twice


async def test_full_it_is_read_and_what_waits_is_bounded(
    some: Servers, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.stats.TROUBLE_SECONDS", 0.0)
    server = some.redis("--maxmemory-policy", "noeviction")
    writer, reader = Pod(server, queue_bytes=20_000), Pod(server, warm_tenants=0)
    async with running(writer, tenants=()):
        writer.publish(1)
        await settled(writer)
        with server.client() as client:
            client.config_set("maxmemory", "100kb")
            await publish_unwaited(writer, 200)
            await eventually(lambda: writer.log.stats.faults.get("oom", 0) >= 2)
            stats = writer.log.stats
            assert (stats.connected, stats.published_records) == (True, 1)
            assert writer.log.trouble is not None
            assert writer.log.trouble.startswith("oom: command not allowed when used memory > 'maxmemory'")
            assert stats.dropped["full"] > 100
            assert stats.queue_bytes < 20_000 + 16_384
            async with running(reader):
                await eventually(lambda: reader.numbers() == [1])
                client.config_set("maxmemory", 0)
                await eventually(lambda: len(reader.numbers()) == 1 + 200 - stats.dropped["full"])
                assert reader.numbers()[-1] == 199
                await settled(writer)
                assert writer.log.trouble is None


async def test_a_replica_is_read_and_written_once_it_is_the_master(some: Servers) -> None:
    master = some.redis()
    writer = Pod(master)
    async with running(writer):
        writer.publish(1)
        await settled(writer)
        replica = await asyncio.to_thread(some.replica, master)
        pod = Pod(replica)
        async with running(pod):
            await eventually(lambda: pod.numbers() == [1])
            pod.publish(2)
            await eventually(lambda: pod.log.stats.faults.get("readonly", 0) >= 1)
            writer.publish(3)
            await eventually(lambda: pod.numbers() == [1, 3])
            assert pod.log.stats.queue_outputs == 1
            with replica.client() as client:
                client.execute_command("REPLICAOF", "NO", "ONE")
            await eventually(lambda: stored(replica) == 3)
            assert pod.numbers() == [1, 3]


async def test_a_replica_without_an_epoch_is_no_trouble(some: Servers) -> None:
    replica = await asyncio.to_thread(some.replica, some.redis())
    async with running(pod := Pod(replica)):
        await pod.connected()
        assert await pod.log.warmed(5.0)
        assert pod.log.stats.faults["readonly"] >= 1


async def test_slow_it_costs_freshness_only(server: RedisServer) -> None:
    async def slowly(data: bytes) -> bytes:
        await asyncio.sleep(0.3)
        return data

    async with Relay(server.port).running() as relay:
        relay.change = slowly
        writer, reader = Pod(relay.url), Pod(relay.url)
        async with running(writer, reader):
            await publish_unwaited(writer, 100)
            await eventually(lambda: reader.numbers() == list(range(100)))
            assert (writer.log.stats.faults, reader.log.stats.faults) == ({}, {})


async def test_down_from_the_start_it_is_tried_with_growing_pauses(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    pauses: list[tuple[float, float]] = []

    def uniform(low: float, high: float) -> float:
        pauses.append((low, high))
        return 0.001 if high <= 5.0 else high

    monkeypatch.setattr("outrider_serving.suffix.shared.line.random.uniform", uniform)
    async with Relay(server.port).running() as relay:
        relay.to(None)
        pod = Pod(relay.url)
        async with running(pod):
            await publish_unwaited(pod, 10)
            await eventually(lambda: len(pauses) > 12)
            assert pauses[:9] == [(0, min(5.0, 0.05 * 2**attempt)) for attempt in range(1, 10)]
            relay.to(server.port)
            await eventually(lambda: stored(server) == 1)  # ten outputs, one record


async def test_what_is_delivered_while_the_connection_ends_is_delivered_once(server: RedisServer) -> None:
    """With all that was read with it: of different age, it is delivered one after the other."""
    fill(server, "a", 3, hours=4)
    gate = asyncio.Event()
    began: list[int] = []
    delivered: list[int] = []

    async def wait(tenant: str, outputs: tuple[array[int], ...], written: int, alive: object) -> None:
        began.extend(output[0] for output in outputs)
        await gate.wait()
        delivered.extend(output[0] for output in outputs)

    async with Relay(server.port).running() as relay:
        writer, reader = Pod(server), Pod(relay.url)
        reader.log._deliver = wait
        async with running(writer, reader):
            await eventually(lambda: began == [0])
            relay.to(server.port)
            await eventually(lambda: reader.log.stats.reconnects == 1)
            writer.publish(3)
            await settled(writer)
            await asyncio.sleep(0.6)
            assert began == [0]
            gate.set()
            await eventually(lambda: delivered == [0, 1, 2, 3])
            assert began == [0, 1, 2, 3]


async def test_faults_are_told_seldom(
    server: RedisServer, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.line.LONGEST_BACKOFF", 0.05)
    caplog.set_level("INFO")
    async with Relay(server.port).running() as relay:
        relay.to(None)
        pod = Pod(relay.url)
        async with running(pod):
            await eventually(lambda: sum(pod.log.stats.faults.values()) >= 6)
            told = [record for record in caplog.records if "not connected" in record.getMessage()]
            assert [record.fields["times"] for record in told] == [1, 2, 4]  # type: ignore[attr-defined]
            relay.to(server.port)
            await pod.connected()
        assert "the shared log is connected" in caplog.text
