"""How documents and names are put on the wire."""

from __future__ import annotations

import asyncio
import threading

import pytest
import yaml

from outrider_operator.client import ApiError, Client, FencedError, as_yaml

DOCUMENT = {
    "emoji": "\U0001f99c says \\U0001f99c",
    "umlaut": "für \u0416",
    "control": "a\tb\n\x7f\x85\u2028\ufeff\uffff",
    "quotes": "\"\\u0041'",
}


def test_any_text_survives_a_yaml_decoder() -> None:
    body = as_yaml(DOCUMENT)
    assert yaml.safe_load(body) == DOCUMENT
    assert "\U0001f99c" in body.decode()


async def test_an_object_without_a_name_is_not_the_list_of_all() -> None:
    with pytest.raises(ValueError, match="without a name"):
        await Client(None).get("Pod", "ns", "")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("status", "passes"),
    [(0, True), (403, False), (409, False), (422, False), (429, True), (500, False), (503, True)],
)
def test_some_refusals_pass(status: int, passes: bool) -> None:
    assert ApiError(status, "").passes is passes


class Dynamic:
    """Takes requests, and holds each until it is let go."""

    def __init__(self) -> None:
        self.asked: list[str] = []
        self.started = threading.Event()
        self.let_go = threading.Event()

    def request(self, verb: str, path: str, **_: object) -> object:
        self.asked.append(verb)
        self.started.set()
        self.let_go.wait(5)
        return type("Answer", (), {"status": 200, "data": b"{}"})()


async def test_past_the_fence_nothing_is_written_but_all_is_read() -> None:
    dynamic, called = Dynamic(), []
    dynamic.let_go.set()
    client = Client(
        dynamic,  # type: ignore[arg-type]
        may_write=lambda: False,
        report=lambda verb, kind, status, seconds: called.append((verb, kind, status)),
    )
    child = {"kind": "Service", "metadata": {"namespace": "ns", "name": "x"}}
    for write in (
        client.apply(child),
        client.replace(child),
        client.create(child),
        client.merge("Service", "ns", "x", {}),
        client.delete("Service", "ns", "x", "uid"),
    ):
        with pytest.raises(FencedError, match="Lease may have run out"):
            await write
    await client.get("Service", "ns", "x")
    assert dynamic.asked == ["get"]
    assert called == [("get", "Service", 200)]


async def test_writes_under_way_are_waited_for() -> None:
    dynamic = Dynamic()
    client = Client(dynamic)  # type: ignore[arg-type]
    writing = asyncio.create_task(client.merge("Service", "ns", "x", {}))
    await asyncio.to_thread(dynamic.started.wait, 5)
    writing.cancel()  # whoever asked is gone, the request is not
    assert not await client.drain(0.05)
    dynamic.let_go.set()
    assert await client.drain(5)
