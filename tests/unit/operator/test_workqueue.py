"""Each key by one worker at a time, never forgotten, and not more often than asked for."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter

import pytest

from outrider_operator.workqueue import WorkQueue


async def settle() -> None:
    for _ in range(20):
        await asyncio.sleep(0)


async def test_a_key_is_handled_once_for_many_requests() -> None:
    handled: Counter[str] = Counter()

    async def handler(namespace: str, name: str) -> None:
        handled[name] += 1

    queue = WorkQueue(handler)
    for _ in range(5):
        queue.add("ns", "a")
    queue.add("ns", "b")
    running = asyncio.create_task(queue.run(2))
    await settle()
    running.cancel()
    assert handled == {"a": 1, "b": 1}


async def test_never_twice_at_once_but_again_afterwards() -> None:
    release = asyncio.Event()
    concurrent = most = count = 0

    async def handler(namespace: str, name: str) -> None:
        nonlocal concurrent, most, count
        concurrent += 1
        count += 1
        most = max(most, concurrent)
        await release.wait()
        concurrent -= 1

    queue = WorkQueue(handler)
    running = asyncio.create_task(queue.run(4))
    queue.add("ns", "a")
    await settle()
    queue.add("ns", "a")
    queue.add("ns", "a")
    await settle()
    assert count == 1
    release.set()
    await settle()
    running.cancel()
    assert (count, most) == (2, 1)


async def test_it_comes_back_when_the_handler_said_and_not_after_none() -> None:
    handled: Counter[str] = Counter()

    async def handler(namespace: str, name: str) -> float | None:
        handled[name] += 1
        return 0.01 if name == "again" else None

    queue = WorkQueue(handler)
    running = asyncio.create_task(queue.run(2))
    queue.add("ns", "again")
    queue.add("ns", "gone")
    await asyncio.sleep(0.1)
    running.cancel()
    assert handled["gone"] == 1
    assert 3 <= handled["again"] <= 11


async def test_asking_replaces_the_timer() -> None:
    handled: Counter[str] = Counter()

    async def handler(namespace: str, name: str) -> float:
        handled[name] += 1
        return 30.0

    queue = WorkQueue(handler)
    running = asyncio.create_task(queue.run(1))
    for _ in range(3):
        queue.add("ns", "a")
        await settle()
    running.cancel()
    assert handled["a"] == 3


async def test_an_error_is_logged_and_retried_with_growing_delays(caplog: pytest.LogCaptureFixture) -> None:
    moments: list[float] = []

    async def handler(namespace: str, name: str) -> None:
        moments.append(asyncio.get_running_loop().time())
        if len(moments) < 4:
            raise ValueError("the server is away")

    queue = WorkQueue(handler, first_delay=0.02, longest_delay=0.04)
    running = asyncio.create_task(queue.run(1))
    queue.add("ns", "a")
    await asyncio.sleep(0.3)
    running.cancel()
    assert len(moments) == 4
    first, second, third = (after - before for before, after in itertools.pairwise(moments))
    assert first >= 0.019
    assert second >= 0.038
    assert third < 0.2
    assert "ns/a: the server is away; again in 0 s" in caplog.text


async def test_a_worker_that_waits_does_not_hold_up_others() -> None:
    handled: list[str] = []
    never = asyncio.Event()

    async def handler(namespace: str, name: str) -> None:
        handled.append(name)
        if name == "stuck":
            await never.wait()

    queue = WorkQueue(handler)
    running = asyncio.create_task(queue.run(2))
    queue.add("ns", "stuck")
    queue.add("ns", "free")
    await settle()
    running.cancel()
    assert handled == ["stuck", "free"]


async def test_one_that_fails_without_end_never_ends_the_queue() -> None:
    async def handler(namespace: str, name: str) -> None:
        raise ValueError("again")

    queue = WorkQueue(handler)
    queue._failures["ns", "a"] = 5_000
    queue.add("ns", "a")
    running = asyncio.create_task(queue.run(1))
    await settle()
    assert not running.done()
    assert queue._failures["ns", "a"] == 5_001
    running.cancel()
