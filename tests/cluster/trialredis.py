"""The Redis for trials that the chart can bring, as a pod: this machine's Redis in an image of its own."""

from __future__ import annotations

import base64
import os
import re
import subprocess
import tempfile
from pathlib import Path

import pytest
import redis
from redis.backoff import NoBackoff
from redis.retry import Retry

from cluster_fixture import LocalCluster
from outrider_local import images, ociimage, pyruntime
from outrider_local.ociimage import Configuration, Entry, Image
from outrider_local.shell import require

NAME = "outrider-redis"
"""What the chart calls it and its Secret in a release named outrider."""


def redis_image(cluster: LocalCluster) -> str:
    """Give the node an image of Redis, without a registry; its name."""
    program = Path(require("redis-server"))
    entries = [
        *pyruntime.merged_folders(),
        Entry("usr/bin/redis-server", source=program.resolve(), mode=0o755),
        *pyruntime.libraries([program]),
    ]
    with tempfile.TemporaryDirectory(dir=cluster.settings.cache) as folder:
        layer = ociimage.write_layer(entries, Path(folder) / "layer")
        image = Image((layer,), Configuration((), {"PATH": "/usr/bin"}))
        name = images.reference("redis", image)
        images.give(cluster.settings, image, name, Path(folder) / "redis.tar")
    return name


def take_password(cluster: LocalCluster, notes: str, namespace: str) -> str:
    """Do what a release's notes say for a namespace that wants the password; what it has then."""
    command = re.search(r"kubectl create secret generic .*?\n\n", notes, re.DOTALL)
    assert command is not None, notes
    tools = Path(cluster.programs.path("kubectl")).parent
    environment = {**cluster.environment, "PATH": f"{tools}{os.pathsep}{os.environ['PATH']}"}
    words = command[0].replace("NAMESPACE", namespace)
    subprocess.run(["bash", "-euc", words], env=environment, check=True)
    return password(cluster, namespace)


def password(cluster: LocalCluster, namespace: str) -> str:
    """What the Secret of that namespace holds."""
    secret = cluster.get("secret", NAME, namespace)
    return base64.b64decode(secret["data"]["password"]).decode()


def assert_it_serves(cluster: LocalCluster, namespace: str, key: str) -> None:
    """By its Service, to who has the password, and writing its file."""
    port = cluster.forward(cluster.get("service", NAME, namespace)["spec"]["clusterIP"], 6379)
    once = Retry(NoBackoff(), 0)
    with redis.Redis(port=port, retry=once) as stranger, pytest.raises(redis.AuthenticationError):
        stranger.ping()
    with redis.Redis(port=port, password=key, retry=once, decode_responses=True) as pod:
        pod.xadd("outrider:tests:x:log", {"record": "1"})
        assert pod.xlen("outrider:tests:x:log") == 1
        found = pod.info()
    assert (found["maxmemory"], found["aof_enabled"], found["aof_last_write_status"]) == (256 << 20, 1, "ok")
