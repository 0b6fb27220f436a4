"""Deleted text is gone: here, in every copy, and wherever it would come back from."""

from __future__ import annotations

import asyncio
import time
from array import array
from collections.abc import Callable
from typing import Any

import pytest
from redis.exceptions import OutOfMemoryError

from outrider_serving.suffix.shared.admin import Admin
from outrider_serving.suffix.shared.connection import connected
from outrider_serving.suffix.shared.options import LogOptions
from serving.suffix.pods import KEYS, Pod, eventually, running, settled, stored
from serving.suffix.redis_server import RedisServer, Servers
from serving.suffix.relay import Relay
from serving.suffix.test_backlogs import fill


async def purge(server: RedisServer, tenant: str) -> int:
    options = LogOptions(url=server.url)
    async with connected(options, KEYS.tenants) as link:
        return (await Admin(link, KEYS, options).purge(tenant))[0]


async def test_connected_pods_apply_it_within_five_seconds_and_others_keep_theirs(
    server: RedisServer,
) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader, tenants=("a", "b")):
        writer.publish(1, tenant="a")
        writer.publish(2, tenant="b")
        await eventually(lambda: len(reader.delivered) == 2)
        began = time.monotonic()
        tombstone = await purge(server, "a")
        assert stored(server) == 0
        await eventually(lambda: (writer.purged, reader.purged) == (["a"], ["a"]))
        assert time.monotonic() - began < 5.0
        assert writer.log.generation("a") == reader.log.generation("a") == tombstone
        assert abs(tombstone / 1000 - time.time()) < 60
        assert writer.remembered() == reader.remembered() == [2]
        # What is finished from now on is shared as before.
        writer.publish(3, tenant="a")
        await eventually(lambda: reader.numbers("a") == [3])
        assert reader.numbers("b") == [2]
        assert (writer.purged, writer.log.stats.purges) == (["a"], 1)
        again = await purge(server, "a")
        assert again > tombstone
        await eventually(lambda: reader.log.generation("a") == again)
        await eventually(lambda: reader.numbers("a") == [])


async def test_what_was_in_flight_is_not_stored(server: RedisServer) -> None:
    pod = Pod(server)
    async with running(pod):
        await pod.connected()
        arrived = pod.log.generation("a")
        await purge(server, "a")
        await eventually(lambda: pod.purged == ["a"])
        pod.publish(1, generation=arrived)
        assert pod.log.stats.dropped == {"purged": 1}
        pod.publish(2)
        await settled(pod)
        assert pod.remembered() == [2]


async def test_redis_refuses_what_a_pod_does_not_know_to_be_purged(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.LOOK_SECONDS", 60.0)
    pod = Pod(server)
    async with running(pod):
        await pod.connected()
        tombstone = await purge(server, "a")
        pod.publish(1)
        await settled(pod)
        assert stored(server) == 0
        assert pod.log.stats.dropped == {"purged": 1}
        assert (pod.purged, pod.log.generation("a")) == (["a"], tombstone)


async def test_a_pod_that_was_cut_off_applies_it_before_it_shares_again(some: Servers) -> None:
    server = some.redis()
    async with Relay(server.port).running() as relay:
        pod, other = Pod(relay.url), Pod(server)
        async with running(pod, other):
            pod.publish(1)
            await eventually(lambda: other.numbers() == [1])
            relay.to(None)
            await eventually(lambda: not pod.log.stats.connected)
            await purge(server, "a")
            await eventually(lambda: other.purged == ["a"])
            pod.publish(2)
            with server.client() as client:
                client.config_resetstat()
            relay.to(server.port)
            await eventually(lambda: pod.purged == ["a"])
            await settled(pod)
            assert pod.log.stats.dropped == {"purged": 1}
            with server.client() as client:
                assert "cmdstat_xadd" not in client.info("commandstats")
            assert (pod.remembered(), other.numbers()) == ([], [])


async def test_cut_off_while_redis_was_emptied_it_brings_no_purged_text_back(some: Servers) -> None:
    server = some.redis()
    async with Relay(server.port).running() as relay:
        cut, other = Pod(relay.url), Pod(server)
        async with running(cut, other):
            cut.publish(1)
            await eventually(lambda: other.numbers() == [1])
            relay.to(None)
            await eventually(lambda: not cut.log.stats.connected)
            tombstone = await purge(server, "a")
            await eventually(lambda: other.purged == ["a"])
            server.kill()
            await asyncio.to_thread(server.start)
            # The one that knows puts the tombstone back, so that the other one learns of it there.
            await eventually(lambda: other.log.stats.epochs == 1)
            relay.to(server.port)
            await eventually(lambda: cut.log.generation("a") == tombstone)
            await asyncio.sleep(1.2)
            assert (stored(server), cut.remembered(), other.numbers()) == (0, [], [])


async def test_a_tombstone_that_a_failover_lost_is_put_back_and_the_text_removed(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client() as client:
            raw = client.xrange(KEYS.log("a"))[0][1][b"r"]
            tombstone = await purge(server, "a")
            await eventually(lambda: (writer.purged, reader.purged) == (["a"], ["a"]))
            with client.pipeline() as pipe:
                pipe.delete(KEYS.tombstones).xadd(KEYS.log("a"), {"r": raw}).execute()
            await eventually(lambda: client.hget(KEYS.tombstones, "a") == str(tombstone).encode())
            assert stored(server) == 0
            await asyncio.sleep(0.6)
            assert reader.numbers() == []


async def test_a_redis_that_is_full_can_be_purged(server: RedisServer) -> None:
    pod = Pod(server)
    async with running(pod):
        pod.publish(1)
        await settled(pod)
        with server.client() as client:
            client.config_set("maxmemory", "100kb")
            with pytest.raises(OutOfMemoryError):
                client.set("something", "more")
            await purge(server, "a")
            await purge(server, "not-there")
            assert stored(server) == 0
            assert {b"a", b"not-there"} <= set(client.hkeys(KEYS.tombstones))
        await eventually(lambda: sorted(pod.purged) == ["a", "not-there"])


async def test_dead_records_are_not_delivered(server: RedisServer) -> None:
    writer, reader = Pod(server), Pod(server)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client() as client:
            raw = client.xrange(KEYS.log("a"))[0][1][b"r"]
            await purge(server, "a")
            await eventually(lambda: reader.purged == ["a"])
            client.xadd(KEYS.log("a"), {"r": raw})
        await eventually(lambda: reader.log.stats.skipped == {"purged": 1})
        assert reader.numbers() == []


@pytest.mark.parametrize("followed", [True, False], ids=["followed", "let go"])
async def test_of_text_that_is_purged_while_it_is_delivered_no_more_is(
    server: RedisServer, followed: bool
) -> None:
    """Of different age, what was read together is not delivered together."""
    fill(server, "a", 3, hours=4)
    writer, reader = Pod(server), Pod(server)
    gate, began, ended = asyncio.Event(), list[int](), list[bool]()

    async def wait(
        tenant: str, outputs: tuple[array[int], ...], written: int, alive: Callable[[], bool]
    ) -> None:
        began.extend(output[0] for output in outputs)
        await gate.wait()
        ended.append(alive())

    reader.log._deliver = wait
    async with running(writer, reader):
        await eventually(lambda: began == [0])
        if not followed:
            del reader.log._state.followed["a"]
        await purge(server, "a")
        await eventually(lambda: (writer.purged, reader.purged) == (["a"], ["a"]))
        gate.set()
        writer.publish(9)
        reader.log.need("a")
        await eventually(lambda: len(ended) > 1)
    assert (began, ended) == ([0, 9], [False, True])


async def test_text_of_a_purge_that_comes_in_between_is_not_delivered(server: RedisServer) -> None:
    """Between the reading of a record and its delivery, which a task of its own does."""
    writer, reader = Pod(server), Pod(server)
    delivered: list[str] = []
    reader.log._deliver = lambda tenant, *_: delivered.append(tenant)
    receive = reader.log._state.receive

    def received(*arguments: Any) -> Any:
        found = receive(*arguments)
        if found:
            asyncio.get_running_loop().call_soon(reader.log._state.learn, {"a": 2**52})
        return found

    reader.log._state.receive = received  # type: ignore[method-assign]
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.purged == ["a"])
        await asyncio.sleep(0.1)
    assert delivered == []
    assert reader.log.stats.received_records == 1


async def test_what_is_told_again_ends_with_a_purge(server: RedisServer) -> None:
    writer = Pod(server)
    async with running(writer):
        writer.publish(1, 2)
        await settled(writer)
        told = writer.log.replay()
        _, _, _, alive = next(told)
        assert alive()
        writer.log._state.learn({"a": 2**52})
        assert not alive()
        assert list(writer.log.replay()) == []
