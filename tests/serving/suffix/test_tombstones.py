"""How long tombstones live, and that nobody reads many of them without need."""

from __future__ import annotations

import asyncio
from array import array
from pathlib import Path

import pytest

from outrider_serving.suffix.shared.admin import Admin, Text
from outrider_serving.suffix.shared.connection import connected
from outrider_serving.suffix.shared.log import SERVING_COMMANDS
from outrider_serving.suffix.shared.options import LogOptions
from serving.suffix.pods import KEYS, Pod, eventually, running, settled, stored
from serving.suffix.redis_server import RedisServer
from serving.suffix.test_connections import add_user, secret
from serving.suffix.test_purge import purge


async def test_the_tombstone_goes_after_the_retention_time(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.TRIM_SECONDS", 0.3)
    pod = Pod(server, retention_seconds=2)
    async with running(pod):
        await pod.connected()
        tombstone = await purge(server, "a")
        await eventually(lambda: pod.purged == ["a"])
        with server.client() as client:
            await eventually(lambda: not client.hexists(KEYS.tombstones, "a"))
            seconds, microseconds = client.time()
            assert 1000 * seconds + microseconds // 1000 >= tombstone + 2000
        await eventually(lambda: pod.log.generation("a") == 0)
        assert pod.purged == ["a"]


def lives(server: RedisServer) -> list[int]:
    """Seconds that tombstones, a stream, tenants and the epoch live still."""
    with server.client() as client:
        return [client.ttl(key) for key in (KEYS.tombstones, KEYS.log("b"), KEYS.tenants, KEYS.epoch)]


async def test_nobody_shortens_a_life(server: RedisServer) -> None:
    """Neither the command, which may not know how long pods keep text, nor a pod that keeps it for less."""
    year = 365 * 24 * 3600
    pod = Pod(server, retention_seconds=year)
    async with running(pod):
        pod.publish(1, tenant="b")
        await settled(pod)
        with server.client() as client:
            await eventually(lambda: client.hget(KEYS.tombstones, "=retention") == str(year).encode())
    assert min(lives(server)) > year - 60
    options = LogOptions(url=server.url)
    async with connected(options, KEYS.tenants) as link:
        admin = Admin(link, KEYS, options)
        # As a pod of a year's text, cut off for months, must meet it still.
        assert (await admin.purge("a"))[2] == year
        assert await admin.retention() == year
        with server.client() as client:
            created = 1000 * client.time()[0]
        assert await admin.put([Text("b", 0, created, array("i", [1, 2, 3, 4]))]) == ""
    other = Pod(server, retention_seconds=60)
    async with running(other):
        other.publish(2, tenant="b")
        await settled(other)
        await asyncio.sleep(0.1)
    assert min(lives(server)) > year - 60


async def test_a_retention_that_nobody_has_any_more_counts_for_as_long_again(server: RedisServer) -> None:
    pod = Pod(server, retention_seconds=60)
    with server.client() as client:
        client.hset(KEYS.tombstones, mapping={"=retention": 100, "=told": 1000 * (client.time()[0] - 50)})
        async with running(pod):
            await eventually(lambda: client.ttl(KEYS.tombstones) > 60)
        assert client.hget(KEYS.tombstones, "=retention") == b"100"
        client.hset(KEYS.tombstones, "=told", 1000 * (client.time()[0] - 150))
        async with running(pod):
            await eventually(lambda: client.hget(KEYS.tombstones, "=retention") == b"60")


async def test_a_pod_that_keeps_text_for_less_keeps_the_tombstones_of_others(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.TRIM_SECONDS", 0.1)
    long, short = Pod(server, retention_seconds=3600), Pod(server, retention_seconds=1)
    async with running(long, short):
        await long.connected()
        tombstone = await purge(server, "a")
        await eventually(lambda: long.purged == short.purged == ["a"])
        await asyncio.sleep(1.5)
        with server.client() as client:
            assert client.hget(KEYS.tombstones, "a") == str(tombstone).encode()
        short.publish(1)
        await settled(short)
        assert stored(server) == 1
        assert short.purged == ["a"]


async def test_many_tombstones_are_read_when_they_change_and_not_each_second(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.LOOK_SECONDS", 0.05)
    pod = Pod(server)
    with server.client() as client:

        def calls(name: str) -> int:
            return int(client.info("commandstats").get(f"cmdstat_{name}", {"calls": 0})["calls"])

        many = {f"tenant-{number}": 1000 * client.time()[0] for number in range(3000)}
        client.hset(KEYS.tombstones, mapping=many | {"=version": "some"})
        async with running(pod):
            await pod.connected()
            assert len(pod.purged) == 3000
            await asyncio.sleep(0.2)
            read, looked = calls("hscan"), calls("eval")
            assert read >= 3000 / 500
            await eventually(lambda: calls("eval") > looked + 5)
            assert calls("hscan") == read
            # Each change is met: a purge, a loss of all, and a loss of some.
            tombstone = await purge(server, "a")
            await eventually(lambda: pod.purged[3000:] == ["a"])
            client.delete(KEYS.tombstones)
            await eventually(lambda: client.hget(KEYS.tombstones, "a") == str(tombstone).encode())
            assert client.hlen(KEYS.tombstones) > 3000
            client.hdel(KEYS.tombstones, "a")
            client.hset(KEYS.tombstones, "=version", "of before")
            await eventually(lambda: client.hget(KEYS.tombstones, "a") == str(tombstone).encode())
            await asyncio.sleep(0.2)
            assert pod.purged[3000:] == ["a"]
            read = calls("hscan")
            await asyncio.sleep(0.3)
            assert calls("hscan") == read


async def test_what_cannot_be_put_back_is_tried_again(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.LOOK_SECONDS", 0.05)
    add_user(server, "pod", "word", *(set(SERVING_COMMANDS) - {"unlink"}))
    pod = Pod(server, auth=secret(tmp_path / "auth", username="pod", password="word"))
    async with running(pod):
        await pod.connected()
        tombstone = await purge(server, "a")
        await eventually(lambda: pod.purged == ["a"])
        with server.client() as client:
            client.hdel(KEYS.tombstones, "a")
            client.hset(KEYS.tombstones, "=version", "of before")
            await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
            async with running(other := Pod(server)):
                await other.connected()
                assert other.purged == []
                client.execute_command("ACL", "SETUSER", "pod", "+unlink")
                await eventually(lambda: client.hget(KEYS.tombstones, "a") == str(tombstone).encode())
                # And whoever had not heard of it does now.
                await eventually(lambda: other.purged == ["a"])
