"""Ways to Redis: TLS, users with few rights, passwords that change, Sentinels, a Cluster."""

from __future__ import annotations

import asyncio
import socket
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Event
from typing import Any

import pytest

from outrider_serving.suffix.shared.log import SERVING_COMMANDS
from serving.suffix.pods import KEYS, Pod, eventually, running, settled
from serving.suffix.redis_server import Certificates, RedisServer, Servers


def secret(folder: Path, **files: str) -> Path:
    """A directory as a mounted Secret is one."""
    folder.mkdir(exist_ok=True)
    for name, content in files.items():
        (folder / name).write_text(content)
    return folder


def add_user(server: RedisServer, name: str, password: str, *commands: str) -> None:
    with server.client() as client:
        rights = [f"+{command}" for command in commands]
        client.execute_command("ACL", "SETUSER", name, "reset", "on", f">{password}", "~outrider:*", *rights)


async def test_tls_and_a_user_who_may_only_what_is_needed(
    some: Servers, certificates: Certificates, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.watching.TRIM_SECONDS", 0.2)
    server = some.redis(tls=certificates)
    add_user(server, "pod", "pass word", *SERVING_COMMANDS)
    auth = secret(tmp_path / "auth", username="pod\n", password="pass word\n")
    options = {"auth": auth, "ca": certificates.authority}
    writer, reader = Pod(server, **options), Pod(server, **options)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with server.client() as client:
            # Each way through the module was taken, and nothing was forbidden.
            client.flushall()
            await eventually(lambda: client.xlen(KEYS.log("a")) == 1)
            client.hset(KEYS.tombstones, "a", 10**13)
            await eventually(lambda: writer.purged == reader.purged == ["a"])
            client.delete(KEYS.tombstones)
            await eventually(lambda: client.hexists(KEYS.tombstones, "a"))
            assert client.acl_log() == []
        assert (writer.log.stats.faults, reader.log.stats.faults) == ({}, {})


async def test_without_info_each_connection_reads_again_and_nothing_comes_twice(
    some: Servers, tmp_path: Path
) -> None:
    server = some.redis()
    add_user(server, "pod", "word", *(set(SERVING_COMMANDS) - {"info"}))
    pod = Pod(server, auth=secret(tmp_path / "auth", username="pod", password="word"))
    other = Pod(server)
    async with running(pod, other):
        other.publish(1)
        await eventually(lambda: pod.numbers() == [1])
        with server.client() as client:
            client.client_kill_filter(_type="normal", skipme=True)
        await eventually(lambda: pod.log.stats.epochs == 1)
        other.publish(2)
        await eventually(lambda: pod.numbers() == [1, 2])


async def test_a_right_to_read_that_is_missing_is_told_while_it_is(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Although each connection looks before it fails, and no pause is as long as trouble must last."""
    monkeypatch.setattr("outrider_serving.suffix.shared.stats.TROUBLE_SECONDS", 0.4)
    monkeypatch.setattr("outrider_serving.suffix.shared.line.LONGEST_BACKOFF", 0.2)
    add_user(server, "pod", "word", *(set(SERVING_COMMANDS) - {"xread"}))
    pod = Pod(server, auth=secret(tmp_path / "auth", username="pod", password="word"))
    async with running(pod):
        await eventually(lambda: pod.log.trouble, 3.0)
        words, connections = pod.log.trouble, pod.log.stats.reconnects
        assert words is not None
        assert words.startswith("noperm: ")
        assert "'xread'" in words
        while pod.log.stats.reconnects < connections + 3:
            assert pod.log.trouble == words
            await asyncio.sleep(0)
        with server.client() as client:
            client.execute_command("ACL", "SETUSER", "pod", "+xread")
        await eventually(lambda: pod.log.trouble is None, 3.0)
        assert pod.log.stats.connected


async def test_certificates_of_another_authority_are_refused(
    some: Servers, certificates: Certificates
) -> None:
    pod = Pod(some.redis(tls=certificates))
    async with running(pod):
        await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
        assert not pod.log.stats.connected


async def test_a_server_must_have_the_name_by_which_it_is_called(
    some: Servers, certificates: Certificates
) -> None:
    """Although only the address that the name has is connected to, which its certificate does name."""
    server = some.redis(tls=certificates)
    pod = Pod(server.url.replace("127.0.0.1", "localhost"), ca=certificates.authority)
    async with running(pod):
        await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
        assert not pod.log.stats.connected


@pytest.mark.usefixtures("impatient")
async def test_a_resolver_that_does_not_answer_takes_one_thread_and_none_of_the_api(
    server: RedisServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, asked = Event(), []

    def look_up(host: str, *arguments: Any, **options: Any) -> list[Any]:
        asked.append(host)
        answered.wait(20.0)
        return [
            (socket.AF_INET, socket.SOCK_STREAM, 6, "", (address, 0))
            for address in ("127.0.0.2", "127.0.0.1")
        ]

    monkeypatch.setattr(socket, "getaddrinfo", look_up)
    asyncio.get_running_loop().set_default_executor(ThreadPoolExecutor(1))
    pod = Pod(server.url.replace("127.0.0.1", "redis.test"))
    try:
        async with running(pod):
            await eventually(lambda: pod.log.stats.faults.get("timeout", 0) >= 2)
            async with asyncio.timeout(5.0):
                await asyncio.to_thread(bool)
            assert asked == ["redis.test"]
            answered.set()
            # The first of its addresses has no server.
            await pod.connected()
    finally:
        answered.set()


@pytest.mark.usefixtures("impatient")
async def test_a_server_without_tls_gets_no_password(server: RedisServer, tmp_path: Path) -> None:
    with server.client() as client:
        client.config_set("requirepass", "word")
    pod = Pod(server.url.replace("redis:", "rediss:"), auth=secret(tmp_path / "auth", password="word"))
    async with running(pod):
        await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
        assert not pod.log.stats.connected


async def test_a_wrong_password_is_told_and_the_right_one_is_read_when_it_comes(
    server: RedisServer, tmp_path: Path, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.stats.TROUBLE_SECONDS", 0.0)
    with server.client() as client:
        client.config_set("requirepass", "right")
    auth = secret(tmp_path / "auth", password="wrong")
    pod = Pod(server, auth=auth)
    async with running(pod):
        pod.publish(1)
        await eventually(lambda: pod.log.stats.faults.get("auth", 0) >= 2)
        assert pod.log.trouble == "auth: invalid username-password pair or user is disabled."
        secret(auth, password="right\n")
        await pod.connected()
        await eventually(lambda: pod.log.trouble is None)
        await settled(pod)
        assert pod.log.stats.published_records == 1
        with server.client(password="right") as client:
            client.config_set("requirepass", "another")
            secret(auth, password="another")
            client.client_kill_filter(_type="normal", skipme=True)
        await eventually(lambda: pod.log.stats.reconnects >= 1)
        pod.publish(2)
        await settled(pod)
    for word in ("wrong", "right", "another"):
        assert word not in caplog.text
        assert word not in repr(pod.log.stats)


async def test_a_password_that_cannot_be_read_is_a_fault_like_others(
    server: RedisServer, tmp_path: Path
) -> None:
    auth = tmp_path / "auth"
    auth.mkdir()
    (auth / "password").write_bytes(b"\xff\xfe")
    pod = Pod(server, auth=auth)
    async with running(pod):
        await eventually(lambda: sum(pod.log.stats.faults.values()) >= 2)
        (auth / "password").unlink()
        await pod.connected()


async def test_sentinels_say_who_the_master_is_and_who_it_is_now(some: Servers) -> None:
    master = some.redis()
    replica = some.replica(master)
    sentinel = some.sentinel(master)
    with sentinel.client() as client:
        # It knows of the replica as soon as it has asked the master.
        await eventually(lambda: client.sentinel_slaves("outrider"), 15)
    # A Sentinel that is down is passed over.
    url = sentinel.url.replace("//", "//127.0.0.1:1,")
    writer, reader = Pod(url), Pod(url)
    async with running(writer, reader):
        writer.publish(1)
        await eventually(lambda: reader.numbers() == [1])
        with replica.client() as client:
            await eventually(lambda: client.xlen(KEYS.log("a")) == 1)
            master.kill()
            writer.publish(2)
            await eventually(lambda: reader.numbers() == [1, 2], 30)
            assert client.info("replication")["role"] == "master"
            assert client.xlen(KEYS.log("a")) == 2
        assert reader.log.stats.epochs == 1


async def test_a_cluster_is_asked_who_has_the_keys(some: Servers) -> None:
    nodes = some.cluster()
    url = "redis-cluster://" + ",".join(f"127.0.0.1:{node.port}" for node in nodes)
    one, two = Pod(url), Pod(url.replace("//", "//127.0.0.1:1,"))
    async with running(one, two, tenants=("a", "b")):
        one.publish(1, tenant="a")
        two.publish(2, tenant="b")
        await eventually(lambda: (two.numbers("a"), one.numbers("b")) == ([1], [2]))
        assert (one.log.stats.faults, two.log.stats.faults) == ({}, {})
        counts = []
        for node in nodes:
            with node.client() as client:
                counts.append(client.dbsize())
        # All of it has one place.
        assert sorted(counts)[:2] == [0, 0]
        assert sorted(counts)[2] >= 4


async def test_a_slot_that_moves_is_followed(some: Servers) -> None:
    nodes = some.cluster(2)
    pod, other = (Pod(f"redis-cluster://127.0.0.1:{nodes[0].port}") for _ in range(2))
    async with running(pod, other):
        pod.publish(1)
        await eventually(lambda: other.numbers() == [1])
        with nodes[0].client() as first, nodes[1].client() as second:
            slot = first.execute_command("CLUSTER", "KEYSLOT", KEYS.tenants)
            here, there = (first, second) if first.dbsize() else (second, first)
            target = there.execute_command("CLUSTER", "MYID").decode()
            source = here.execute_command("CLUSTER", "MYID").decode()
            port = there.connection_pool.connection_kwargs["port"]
            there.execute_command("CLUSTER", "SETSLOT", slot, "IMPORTING", source)
            here.execute_command("CLUSTER", "SETSLOT", slot, "MIGRATING", target)
            while keys := here.execute_command("CLUSTER", "GETKEYSINSLOT", slot, 100):
                here.execute_command("MIGRATE", "127.0.0.1", port, "", 0, 5000, "KEYS", *keys)
            for client in (there, here):
                client.execute_command("CLUSTER", "SETSLOT", slot, "NODE", target)
            pod.publish(2)
            await eventually(lambda: other.numbers() == [1, 2])
            assert there.xlen(KEYS.log("a")) == 2
