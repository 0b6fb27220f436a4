"""One thread, shared fairly by tenants; of each the smallest call first; a bounded waiting room."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
import weakref
from collections.abc import Iterator

import pytest

from outrider_serving.api.turns import Turns
from outrider_serving.engine.schedule.fairness import ANONYMOUS
from outrider_serving.engine.types import QueueFullError

Started = asyncio.Task[None]


class Room:
    """Turns whose thread is held up until the gate opens; remembers who had a turn."""

    def __init__(self, max_waiting: int) -> None:
        self.turns = Turns("test", max_waiting)
        self.gate = threading.Event()
        self.had: list[object] = []
        self.clock = 0
        """Nanoseconds, for tests that set the time that calls take."""

    async def fill(self, *sizes: int) -> list[Started]:
        """Calls of these sizes behind one that holds the thread; that one comes first."""
        began = threading.Event()
        holding = asyncio.create_task(self.turns.run(ANONYMOUS, 0, self._hold, began))
        await asyncio.to_thread(began.wait, 5)
        calls = [
            asyncio.create_task(self.turns.run(ANONYMOUS, size, self.had.append, size)) for size in sizes
        ]
        await asyncio.sleep(0)
        return [holding, *calls]

    async def arrive(self, tenant: str, size: int, microseconds: int = 0) -> Started:
        """One more call, of which a refusal is raised here; by the clock it takes so long."""
        call = asyncio.create_task(self.turns.run(tenant, size, self._work, (tenant, size), microseconds))
        await asyncio.sleep(0)
        if call.done():
            call.result()
        return call

    def _work(self, turn: object, microseconds: int) -> None:
        self.clock += microseconds * 1000
        self.had.append(turn)

    def _hold(self, began: threading.Event) -> None:
        began.set()
        self.gate.wait(5)


@pytest.fixture
def room() -> Iterator[Room]:
    made = Room(max_waiting=3)
    yield made
    made.gate.set()
    made.turns.close()


async def test_the_smallest_has_the_next_turn(room: Room) -> None:
    calls = await room.fill(30, 10, 20)
    room.gate.set()
    await asyncio.gather(*calls)
    assert room.had == [10, 20, 30]


async def test_one_too_many_is_refused_and_there_is_room_again_later(room: Room) -> None:
    calls = await room.fill(1, 2, 3)
    with pytest.raises(QueueFullError, match=r"3 requests are waiting, which is the limit \(3\)"):
        await room.turns.run(ANONYMOUS, 0, room.had.append, 0)
    room.gate.set()
    await asyncio.gather(*calls)
    await room.turns.run(ANONYMOUS, 4, room.had.append, 4)
    assert room.had == [1, 2, 3, 4]


@pytest.mark.parametrize(("size_of_quick", "size_of_slow"), [(400, 1900), (1900, 400), (0, 0)])
async def test_tenants_get_equal_time_of_the_thread_while_they_wait_whatever_the_size(
    monkeypatch: pytest.MonkeyPatch, size_of_quick: int, size_of_slow: int
) -> None:
    room = Room(max_waiting=100)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: room.clock)
    holding = await room.fill()
    quick, slow = ("quick", size_of_quick), ("slow", size_of_slow)
    calls = [await room.arrive(*quick, microseconds=400) for _ in range(40)]
    calls += [await room.arrive(*slow, microseconds=1900) for _ in range(4)]
    room.gate.set()
    await asyncio.gather(*holding, *calls)
    while_both_wait = room.had[: 1 + max(i for i, turn in enumerate(room.had) if turn == slow)]
    assert room.had.count(quick) == 40
    # A call costs its time and a hundred: four quick ones for a slow one.
    assert 12 <= while_both_wait.count(quick) <= 16
    room.turns.close()


async def test_a_call_that_fails_is_charged_too(monkeypatch: pytest.MonkeyPatch) -> None:
    room = Room(max_waiting=100)
    monkeypatch.setattr(time, "perf_counter_ns", lambda: room.clock)
    holding = await room.fill()

    def fail() -> None:
        room.clock += 10_000_000
        raise ZeroDivisionError

    failing = asyncio.create_task(room.turns.run("failing", 0, fail))
    await asyncio.sleep(0)
    calls = [await room.arrive(tenant, 0, microseconds=500) for tenant in ("failing", "other", "other")]
    room.gate.set()
    await asyncio.wait([*holding, failing, *calls])
    assert room.had == [("other", 0), ("other", 0), ("failing", 0)]
    room.turns.close()


async def test_a_tenant_has_no_more_places_than_it_leaves_to_others() -> None:
    room = Room(max_waiting=8)
    holding = await room.fill()
    calls = [await room.arrive("flood", 1) for _ in range(4)]
    with pytest.raises(QueueFullError, match=r"4 requests are waiting, which is the limit \(4\)"):
        await room.arrive("flood", 1)
    calls += [await room.arrive("second", 9) for _ in range(2)]
    calls.append(await room.arrive("third", 9))
    room.gate.set()
    await asyncio.gather(*holding, *calls)
    assert len(room.had) == 7
    room.turns.close()


async def test_who_no_longer_waits_has_no_turn_takes_no_place_and_is_not_kept(room: Room) -> None:
    class Prompt:
        """Something whose end can be seen."""

    holding, *calls = await room.fill(1, 2)
    prompt = Prompt()
    kept = weakref.ref(prompt)
    left = asyncio.create_task(room.turns.run(ANONYMOUS, 3, lambda _: room.had.append(3), prompt))
    await asyncio.sleep(0)
    left.cancel()
    del prompt
    await asyncio.wait([left])
    del left
    gc.collect()
    assert kept() is None
    last = asyncio.create_task(room.turns.run(ANONYMOUS, 4, room.had.append, 4))
    await asyncio.sleep(0)
    room.gate.set()
    await asyncio.gather(holding, *calls, last)
    assert room.had == [1, 2, 4]


async def test_the_end_of_the_thread_ends_every_wait_for_it(room: Room) -> None:
    _, *calls = await room.fill(1, 2)
    room.turns.close()
    done, _ = await asyncio.wait(calls, timeout=5)
    assert [call.cancelled() for call in done] == [True, True]
    assert room.had == []


async def test_what_the_work_raises_is_raised_and_the_thread_goes_on(room: Room) -> None:
    with pytest.raises(ZeroDivisionError):
        await room.turns.run(ANONYMOUS, 1, lambda: 1 // 0)
    assert await room.turns.run(ANONYMOUS, 1, lambda: "next") == "next"
