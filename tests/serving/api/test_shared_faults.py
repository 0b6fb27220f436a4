"""Real servers under load whose Redis is paused, killed, full, silent or mad: no request notices."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NamedTuple, TypeAlias

import httpx
import pytest
import redis.asyncio
from redis.exceptions import RedisError

from outrider_serving.settings import Method, Proposer, default_settings
from serving.api.process import ServerProcess, eventually
from serving.suffix.redis_server import RedisServer, servers
from serving.suffix.relay import Relay

PROMPTS = ("the quick brown fox", "one two three four", "def add(left, right):")
ASKED = {"model": "tiny", "max_tokens": 24, "temperature": 0, "stream": True, "ignore_eos": True}
PAUSE_MILLISECONDS = 3000


class Place(NamedTuple):
    """A Redis, and what the pods reach it through."""

    server: RedisServer
    relay: Relay


Fault: TypeAlias = Callable[[Place], AbstractAsyncContextManager[None]]


@asynccontextmanager
async def paused(place: Place) -> AsyncIterator[None]:
    with place.server.client() as client:
        client.execute_command("CLIENT", "PAUSE", PAUSE_MILLISECONDS, "ALL")
    yield


@asynccontextmanager
async def killed(place: Place) -> AsyncIterator[None]:
    place.server.kill()
    yield
    await asyncio.to_thread(place.server.start)


@asynccontextmanager
async def full(place: Place) -> AsyncIterator[None]:
    with place.server.client() as client:
        client.config_set("maxmemory", 1)
        yield
        client.config_set("maxmemory", 0)


@asynccontextmanager
async def silent(place: Place) -> AsyncIterator[None]:
    over = asyncio.Event()

    async def hold(data: bytes) -> bytes:
        await over.wait()
        return data

    place.relay.change = hold
    yield
    place.relay.change = None
    over.set()


@asynccontextmanager
async def mad(place: Place) -> AsyncIterator[None]:
    async def change(_data: bytes) -> bytes:
        return b"\xff\xfe\x00 what\r\n"

    place.relay.change = change
    yield
    place.relay.change = None


FAULTS: dict[Fault, str] = {
    paused: "timeout",
    killed: "connection",
    full: "oom",
    silent: "timeout",
    mad: "nonsense",
}
"""And what pods call them."""


async def well(place: Place) -> None:
    """Wait until Redis, as pods reach it, takes what is written."""
    while True:
        with suppress(RedisError, OSError):
            async with redis.asyncio.Redis(port=place.relay.port, retry=None, protocol=2) as client:
                await client.set("well", 1)
                return
        await asyncio.sleep(0.02)


@dataclass
class Load:
    """A server, and who asks it one thing after the other, without an end."""

    server: ServerProcess
    client: httpx.AsyncClient
    texts: dict[str, set[str]] = field(default_factory=lambda: {prompt: set() for prompt in PROMPTS})
    """What was answered to each prompt so far."""
    answers: int = 0

    async def run(self) -> None:
        while True:
            for prompt, texts in self.texts.items():
                texts.add(await self._ask(prompt))
                self.answers += 1
                await asyncio.sleep(0.03)

    async def goes_on(self) -> None:
        """Wait for an answer to each prompt that was asked for from now on."""
        until = self.answers + 1 + len(PROMPTS)  # one is on its way
        await _until(lambda: self.answers >= until)

    async def fails(self, reason: str, before: float) -> None:
        """Wait until the fault was noticed."""
        await _until(lambda: self.faults(reason) > before)

    async def learns(self, before: float) -> None:
        """Wait until the server is connected, and has more of what the other one writes."""
        await _until(lambda: self.server.metric("outrider_shared_connected") == 1)
        await _until(lambda: self.received() > before)

    def faults(self, reason: str) -> float:
        return self.server.metric("outrider_shared_faults_total", reason=reason)

    def received(self) -> float:
        return self.server.metric("outrider_shared_received_total")

    async def _ask(self, prompt: str) -> str:
        url = f"{self.server.url}/v1/completions"
        async with self.client.stream("POST", url, json=ASKED | {"prompt": prompt}) as answer:
            assert answer.status_code == 200, await answer.aread()
            lines = [line.removeprefix("data: ") async for line in answer.aiter_lines() if line]
        assert lines.pop() == "[DONE]", lines
        return "".join(json.loads(line)["choices"][0]["text"] for line in lines)


async def _until(condition: Callable[[], bool]) -> None:
    await asyncio.to_thread(eventually, condition, 20.0)


@pytest.fixture
async def place(tmp_path: Path) -> AsyncIterator[Place]:
    with servers(tmp_path / "redis") as some:
        server = some.redis("--maxmemory-policy", "noeviction")
        async with Relay(server.port).running() as relay:
            yield Place(server, relay)


@pytest.fixture
async def loads(tiny: Path, place: Place, tmp_path: Path) -> AsyncIterator[list[Load]]:
    """Two servers that share, both loaded until the end."""
    settings = tmp_path / "settings.json"
    made = default_settings(Proposer(method=Method.SUFFIX, max_depth=8))
    settings.write_text(made.model_dump_json(by_alias=True))
    shared = ("--settings", str(settings), "--shared-cache", place.relay.url)
    started = [ServerProcess(str(tiny), *shared) for _ in range(2)]
    try:
        await asyncio.gather(*(asyncio.to_thread(server.ready) for server in started))
        async with httpx.AsyncClient(timeout=30) as client:
            yield [Load(server, client) for server in started]
    finally:
        for server in started:
            server.end()


async def test_no_request_waits_for_a_fault_and_afterwards_both_learn_again(
    loads: list[Load], place: Place
) -> None:
    async with asyncio.timeout(90), asyncio.TaskGroup() as tasks:
        running = [tasks.create_task(load.run()) for load in loads]
        for load in loads:
            await load.goes_on()
            await load.learns(0)
        for fault, reason in FAULTS.items():
            before = [load.faults(reason) for load in loads]
            async with fault(place):
                over = tasks.create_task(well(place))
                await asyncio.gather(*(load.goes_on() for load in loads))
                assert not over.done(), f"{fault.__name__}: it was over before the answers came"
                known = [load.received() for load in loads]
                for load, count in zip(loads, before, strict=True):
                    await load.fails(reason, count)
            await over
            for load, count in zip(loads, known, strict=True):
                await load.learns(count)
        for task in running:
            task.cancel()
    one, other = (load.texts for load in loads)
    assert one == other
    assert all(len(texts) == 1 for texts in one.values())
