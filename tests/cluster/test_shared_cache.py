"""Pods that learn from each other through a real Redis, and what the resource says when it is away.

The tests are steps of one story, told of the same pods. Each pod is asked by itself, not through the Service.
How deep proposals go depends on times: how much a request takes over is never told, only that it does.
"""

from __future__ import annotations

import re
import subprocess
import sys
from collections.abc import Iterator

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from cluster.noderedis import NodeRedis, node_redis
from cluster.operated import Object, eventually
from cluster.operators import QUICK, Operators, operators
from cluster.tinymodel import tiny_model
from cluster_fixture import LocalCluster

NAMESPACE = "sharing-tests"
NAME = "sharing"
SECRET = "redis-user"
TOKENS = 60

FIRST, SECOND = "the quick brown fox jumps over", "one two three four five six"
MEANWHILE, ROTATED = "six five four", "ten nine"
"""Prompts whose continuations have no two tokens in a row in common, so that none teaches another's."""


class Pod:
    """One pod, asked through a forwarded port."""

    def __init__(self, cluster: LocalCluster, found: Object) -> None:
        self.name: str = found["metadata"]["name"]
        port = cluster.forward(found["status"]["podIP"], 8000)
        self._client = httpx.Client(base_url=f"http://127.0.0.1:{port}", trust_env=False, timeout=30)

    def ask(self, prompt: str, *, store: bool = True) -> str:
        """The text of a completion."""
        asked = {
            "model": "tiny",
            "prompt": prompt,
            "max_tokens": TOKENS,
            "temperature": 0,
            "ignore_eos": True,
        }
        answer = self._client.post("/v1/completions", json=asked if store else {**asked, "store": False})
        assert answer.status_code == 200, answer.text
        return str(answer.json()["choices"][0]["text"])

    def metric(self, sample: str, **labels: str) -> float:
        """The sum of a sample's series that have these labels."""
        return sum(
            found.value
            for family in text_string_to_metric_families(self._client.get("/metrics").text)
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        )

    @property
    def received(self) -> float:
        """Tokens that came from other pods."""
        return self.metric("outrider_shared_received_total")

    @property
    def found(self) -> float:
        """Proposals that came from what was written before."""
        return self.metric("outrider_suffix_proposals_total", scope="history")

    def takes_over(self, prompt: str) -> bool:
        """Whether a private request takes something from what was written before."""
        before = self.metric("outrider_suffix_accepted_total", scope="history")
        self.ask(prompt, store=False)
        return self.metric("outrider_suffix_accepted_total", scope="history") > before


@pytest.fixture(scope="module")
def redis(cluster: LocalCluster) -> Iterator[NodeRedis]:
    with node_redis(cluster) as server:
        yield server


@pytest.fixture(scope="module")
def operated(cluster: LocalCluster) -> Iterator[Operators]:
    """A cluster with an operator that looks at pods often."""
    with operators(cluster, NAMESPACE) as made:
        made.operator(NAME, made.proxy(), *QUICK, identity=f"{NAME}-0").start()
        yield made


@pytest.fixture(scope="module")
def pods(operated: Operators, redis: NodeRedis) -> list[Pod]:
    """Two pods that share, to which a test adds."""
    resource = tiny_model(operated, NAME, "weights-of-sharing")
    cache = {"url": redis.url, "authSecretRef": {"name": SECRET}, "tenantMode": "single"}
    resource["spec"] |= {"replicas": 2, "proposer": {"method": "suffix"}, "sharedCache": cache}
    operated.apply(secret(redis), resource)
    operated.await_ready(NAME)
    return [Pod(operated.cluster, found) for found in ready_pods(operated, 2)]


def secret(redis: NodeRedis) -> Object:
    """What lets pods in."""
    told = {"password": redis.password}
    return {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": SECRET}, "stringData": told}


def ready_pods(operated: Operators, count: int) -> list[Object]:
    """All pods, once so many are ready."""

    def ready() -> list[Object] | None:
        found = operated.pods(NAME)
        conditions = [c for pod in found for c in pod["status"].get("conditions", ())]
        states = [c["status"] for c in conditions if c["type"] == "Ready"]
        return found if states == ["True"] * count else None

    return eventually(ready, 120, lambda: operated.kubectl("describe", "specm,pods"))


def lives(operated: Operators) -> dict[str, int]:
    """The pods' uids, and how often each was restarted."""
    return {
        pod["metadata"]["uid"]: sum(status["restartCount"] for status in pod["status"]["containerStatuses"])
        for pod in operated.pods(NAME)
    }


def test_two_pods_learn_from_each_other_within_a_second(pods: list[Pod]) -> None:
    for teacher, pupil, prompt in ((pods[0], pods[1], FIRST), (pods[1], pods[0], SECOND)):
        cold = pupil.ask(prompt, store=False)
        assert not pupil.takes_over(prompt)  # only the other one is going to serve it
        before = pupil.received
        assert teacher.ask(prompt) == cold
        eventually(lambda pupil=pupil, before=before: pupil.received == before + TOKENS, 1)
        eventually(lambda pupil=pupil, prompt=prompt: pupil.takes_over(prompt), 10)
        assert pupil.ask(prompt, store=False) == cold


def test_a_third_pod_starts_warm(operated: Operators, pods: list[Pod]) -> None:
    operated.kubectl("scale", f"specm/{NAME}", "--replicas=3")
    known = {pod.name for pod in pods}
    (found,) = (pod for pod in ready_pods(operated, 3) if pod["metadata"]["name"] not in known)
    third = Pod(operated.cluster, found)
    assert third.received == 2 * TOKENS
    for prompt in (FIRST, SECOND):
        eventually(lambda prompt=prompt: third.takes_over(prompt), 10)
        assert third.ask(prompt, store=False) == pods[0].ask(prompt, store=False)
    pods.append(third)


def test_without_redis_pods_serve_and_the_resource_says_so(
    operated: Operators, pods: list[Pod], redis: NodeRedis
) -> None:
    before = lives(operated)
    texts = [pod.ask(FIRST, store=False) for pod in pods]
    assert not pods[1].takes_over(MEANWHILE)
    with redis.away():
        told = operated.await_reason(NAME, "LearnsAlone", kind="SharedCacheNotConnected")
        assert told["status"] == "True"
        form = r"pod (\S+): connection: .+; Redis is named by spec\.sharedCache\.url"
        words = re.fullmatch(form, told["message"])
        assert words is not None, told["message"]
        assert words[1] in {pod.name for pod in pods}
        assert operated.condition(NAME)["reason"] == "Serving"
        assert [pod.ask(FIRST, store=False) for pod in pods] == texts
        pods[0].ask(MEANWHILE)
    eventually(lambda: not operated.condition(NAME, "SharedCacheNotConnected"), 30)
    eventually(lambda: pods[1].takes_over(MEANWHILE), 10)
    assert lives(operated) == before


def test_a_password_is_rotated_under_running_pods(
    operated: Operators, pods: list[Pod], redis: NodeRedis
) -> None:
    def reconnects() -> list[float]:
        return [pod.metric("outrider_shared_reconnects_total") for pod in pods]

    lived, before = lives(operated), reconnects()
    assert not pods[0].takes_over(ROTATED)
    redis.rotate()
    operated.apply(secret(redis))
    # The kubelet brings a changed Secret when it next looks at a pod: at once, where the pod has changed.
    operated.kubectl("annotate", "pods", f"--selector=outrider.dev/model={NAME}", "outrider.test/look=now")

    def back() -> bool:
        return all(now > then for now, then in zip(reconnects(), before, strict=True))

    eventually(back, 60, lambda: operated.kubectl("describe", "specm", NAME))
    pods[1].ask(ROTATED)
    eventually(lambda: pods[0].takes_over(ROTATED), 10)
    assert lives(operated) == lived


def test_a_purge_on_the_host_reaches_every_pod_within_five_seconds(
    operated: Operators, pods: list[Pod], redis: NodeRedis
) -> None:
    command = [sys.executable, "-m", "outrider_serving", "suffix", "purge", "--tenant=", f"--url={redis.url}"]
    where = [f"--auth={redis.auth}", f"--prefix=outrider:{NAMESPACE}:{NAME}:"]
    done = subprocess.run(
        operated.cluster.in_network(*command, *where),
        env=operated.cluster.environment,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert re.search(r"\(single\): [1-9]\d* entries deleted", done.stdout), done.stdout
    eventually(lambda: all(pod.metric("outrider_shared_purges_total") == 1 for pod in pods), 5)
    for pod in pods:
        before = pod.found
        for prompt in (FIRST, SECOND, MEANWHILE, ROTATED):
            pod.ask(prompt, store=False)
        assert pod.found == before
