"""What pods answer on their admin port, and that silence is a fact and not an error."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest

from outrider_operator.observation import Observation, PodReport, is_pod_of
from outrider_operator.observe import observe, pod_reports
from outrider_serving.settings import ADMIN_PORT
from unit.operator.builders import NOW, pod, report, resource

LOCAL = f"127.94.{os.getpid() // 250 % 250}.{os.getpid() % 250 + 1}"
"""An address of this machine that nothing else listens at, another process of these tests included."""


async def ask(transport: httpx.AsyncBaseTransport | None, *pods: dict[str, object]) -> dict[str, PodReport]:
    async with httpx.AsyncClient(transport=transport, trust_env=False) as admin:
        return await pod_reports(admin, pods)


def answer_with(text: str) -> httpx.Response:
    """An answer that is yet to be read, as it is off the network."""
    return httpx.Response(200, stream=httpx.ByteStream(text.encode()))


async def test_each_ready_pod_is_asked_at_its_own_address() -> None:
    state = report(7).state
    assert state is not None
    text = state.model_dump_json(by_alias=True)
    asked = []

    def answer(request: httpx.Request) -> httpx.Response:
        asked.append(str(request.url))
        return answer_with(text)

    found = await ask(
        httpx.MockTransport(answer),
        pod("a", podIP="10.0.0.1"),
        pod("b", podIP="fd00::1"),
        pod("c", ready=False),
        pod("d", podIP=None),
    )
    assert asked == ["http://10.0.0.1:9464/admin/state", "http://[fd00::1]:9464/admin/state"]
    assert found == {"a": PodReport(state=state), "b": PodReport(state=state)}


async def test_silence_and_nonsense_are_told() -> None:
    def answer(request: httpx.Request) -> httpx.Response:
        match request.url.host:
            case "10.0.0.1":
                raise httpx.ConnectTimeout("no answer")
            case "10.0.0.2":
                return httpx.Response(503)
            case "10.0.0.3":
                return answer_with("hello")
            case _:
                return answer_with('{"ready": true}')

    pods = [pod(f"p{number}", podIP=f"10.0.0.{number}") for number in range(1, 5)]
    found = await ask(httpx.MockTransport(answer), *pods)
    assert {name: report.error for name, report in found.items()} == {
        "p1": "its admin port does not answer: ConnectTimeout",
        "p2": "its admin port does not answer: HTTPStatusError",
        "p3": "its admin port answers what this operator does not understand",
        "p4": "its admin port answers what this operator does not understand",
    }
    assert all(report.state is None for report in found.values())


@asynccontextmanager
async def sends(head: bytes, part: bytes, pause: float) -> AsyncIterator[list[int]]:
    """A server at LOCAL that never ends its answer; how many bytes it got rid of."""
    sent = [0]

    async def serve(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            writer.write(head)
            while sent[0] < 64 * 1024 * 1024:
                writer.write(part)
                await writer.drain()
                sent[0] += len(part)
                await asyncio.sleep(pause)
        except ConnectionError:
            pass
        finally:
            writer.close()

    async with await asyncio.start_server(serve, LOCAL, ADMIN_PORT):
        yield sent


@pytest.mark.parametrize(
    ("head", "part", "pause", "error"),
    [
        (b"HTTP/1.1 200 OK\r\n\r\n", b" " * 65536, 0, "answers what this operator does not understand"),
        (b"HTTP/1.1 200 OK\r\n\r\n", b" ", 0.1, "does not answer: TimeoutError"),
        (b"HTTP/1.1 200 OK\r\n", b"A: b\r\n", 0.1, "does not answer: TimeoutError"),
    ],
    ids=["endless", "dripping", "dripping head"],
)
async def test_a_pod_that_never_ends_its_answer(
    head: bytes, part: bytes, pause: float, error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_operator.observe._ADMIN_SECONDS", 0.5)
    async with sends(head, part, pause) as sent:
        start = time.monotonic()
        found = await ask(None, pod("p", podIP=LOCAL))
        assert time.monotonic() - start < 2
    assert found == {"p": PodReport(error=f"its admin port {error}")}
    assert sent[0] < 32 * 1024 * 1024  # the rest was not waited for


def controlled(name: str, kind: str = "ReplicaSet", **more: Any) -> dict[str, Any]:
    owner = {"kind": kind, "name": name, "controller": True} | more
    labels = {"pod-template-hash": "5d"}
    return {"metadata": {"name": "p", "labels": labels, "ownerReferences": [owner]}}


def test_a_pod_is_ours_by_its_owner_and_not_by_its_labels() -> None:
    assert is_pod_of(controlled("m-1-5d"), {"m-1", "m-2"})
    for foreign in (
        pod(),
        controlled("m-3-5d"),
        controlled("m-1-5e"),
        controlled("m-1-5d", controller=False),
        controlled("m-1-5d", kind="StatefulSet"),
    ):
        assert not is_pod_of(foreign, {"m-1", "m-2"})


class Events:
    """The part of Client that tells of events."""

    def __init__(self, *events: tuple[str, str, str]) -> None:
        self.events = [
            {"reason": reason, "message": message, "lastTimestamp": moment}
            for reason, message, moment in events
        ]
        self.asked: list[str] = []

    async def list_all(self, kind: str, namespace: str, *, fields: str) -> list[dict[str, str]]:
        assert (kind, namespace) == ("Event", "ns")
        self.asked.append(fields)
        return self.events


async def warned(events: Events) -> str | None:
    creating = [{"state": {"waiting": {"reason": "ContainerCreating"}}}]
    running = [{"state": {"running": {}}}]
    pods = (pod("m-1", ready=False, containerStatuses=creating), pod("m-2", containerStatuses=running))
    seen = Observation(resource=resource(), now=NOW, pods=pods)
    async with httpx.AsyncClient(transport=httpx.MockTransport(lambda _: httpx.Response(503))) as admin:
        found = await observe(events, admin, seen, ())  # type: ignore[arg-type]
    return found.warnings.get("m-1")


async def test_a_pod_that_is_not_made_has_the_newest_warning_of_the_kubelet() -> None:
    mount = ("FailedMount", 'secret "keys" not found', "2030-01-02T03:04:05Z")
    older = ("FailedMount", "timed out", "2030-01-02T03:04:01Z")
    pull = ("Failed", "Failed to pull image", "2030-01-02T03:04:09Z")
    scheduling = ("FailedScheduling", "0/1 nodes are available", "2030-01-02T03:04:08Z")
    events = Events(older, mount, pull, scheduling)
    assert await warned(events) == 'secret "keys" not found'
    assert events.asked == ["involvedObject.uid=uid-m-1,type=Warning"]
    assert await warned(Events(pull, scheduling)) is None
