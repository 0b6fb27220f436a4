"""The Redis for trials that the chart can bring: who reaches it, what it keeps, and that a real one runs."""

from __future__ import annotations

import re
import subprocess
import time
from base64 import b64decode
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from outrider_operator import names
from outrider_serving.suffix.shared.log import ADMIN_COMMANDS
from unit.chart.test_chart import documents, one, rendered, template

Object = dict[str, Any]


def test_there_is_none_unless_asked_for() -> None:
    found = [each["metadata"]["name"] for each in documents(rendered("everything"))]
    assert not [name for name in found if "redis" in name]


def test_only_pods_of_speculative_models_may_reach_it_and_it_nobody() -> None:
    policy = one(rendered("redis"), "NetworkPolicy", "outrider-redis")["spec"]
    serving = {
        "namespaceSelector": {},
        "podSelector": {"matchLabels": {names.NAME_LABEL: names.SINGULAR}},
    }
    port = {"port": "redis", "protocol": "TCP"}
    assert policy["ingress"] == [{"from": [serving], "ports": [port]}]
    assert (policy["policyTypes"], policy["egress"]) == (["Ingress", "Egress"], [])


def test_what_it_holds_lies_on_a_claim_only_if_asked_for() -> None:
    def data(text: str) -> Object:
        pod = one(text, "Deployment", "outrider-redis")["spec"]["template"]["spec"]
        (volume,) = (volume for volume in pod["volumes"] if volume["name"] == "data")
        return dict(volume)

    plain = template("--set=redis.enabled=true")
    assert data(plain) == {"name": "data", "emptyDir": {}}
    assert not [each for each in documents(plain) if each["kind"] == "PersistentVolumeClaim"]
    claim = one(rendered("redis"), "PersistentVolumeClaim")
    assert claim["spec"]["storageClassName"] == "fast"
    assert data(rendered("redis"))["persistentVolumeClaim"] == {"claimName": claim["metadata"]["name"]}


def test_the_password_is_in_the_secret_alone() -> None:
    text = rendered("redis")
    secret = one(text, "Secret")["data"]
    password = b64decode(secret["password"]).decode()
    assert re.fullmatch("[A-Za-z0-9]{40}", password)
    assert text.count(password) == 0
    assert password not in b64decode(secret["users.acl"]).decode()
    assert one(rendered("redis"), "Secret")["data"]["password"] != secret["password"]


def test_a_real_one_takes_its_settings_and_lets_pods_do_what_they_must(tmp_path: Path) -> None:
    text = rendered("redis")
    secret = {key: b64decode(value) for key, value in one(text, "Secret")["data"].items()}
    users, socket = tmp_path / "users.acl", tmp_path / "redis.sock"
    users.write_bytes(secret["users.acl"] + b"user judge on nopass ~* &* +@all\n")
    config = one(text, "ConfigMap")["data"]["redis.conf"]
    for said, here in (
        ("aclfile /etc/redis-users/users.acl", f"aclfile {users}"),
        ("dir /data", f"dir {tmp_path}"),
        ("port 6379", f"port 0\nunixsocket {socket}"),
    ):
        assert said in config
        config = config.replace(said, here)
    (tmp_path / "redis.conf").write_text(config)
    with subprocess.Popen(
        ["redis-server", str(tmp_path / "redis.conf")], stdout=subprocess.DEVNULL
    ) as server:
        try:
            until(socket.exists)
            judge_redis(str(socket), secret["password"].decode())
        finally:
            server.terminate()


def judge_redis(socket: str, password: str) -> None:
    """What a Redis of the chart lets a pod do, and how it keeps what it is given."""
    once = Retry(NoBackoff(), 0)
    with (
        redis.Redis(unix_socket_path=socket, retry=once) as stranger,
        pytest.raises(redis.AuthenticationError),
    ):
        stranger.ping()
    with redis.Redis(unix_socket_path=socket, password=password, decode_responses=True) as pod:
        found = pod.info()
        assert (found["maxmemory"], found["maxmemory_policy"]) == (1 << 30, "noeviction")
        assert found["aof_enabled"] == 1
        for refused in ("CONFIG GET dir", "FLUSHALL", "SHUTDOWN", "ACL LIST"):
            with pytest.raises(redis.exceptions.NoPermissionError):
                pod.execute_command(*refused.split())
    with redis.Redis(unix_socket_path=socket, username="judge", password="", decode_responses=True) as judge:
        known = judge.command()
        for command in (*ADMIN_COMMANDS, "select"):
            words = command.split("|")
            more = max(abs(known[words[0]]["arity"]) - len(words), len(words) - 1)
            filled = [*words, *["0"] * more]
            assert judge.execute_command("ACL DRYRUN", "default", *filled) == "OK", command


def until(holds: Callable[[], bool]) -> None:
    """Wait until it holds; 20 seconds at most."""
    end = time.monotonic() + 20
    while not holds():
        assert time.monotonic() < end
        time.sleep(0.01)
