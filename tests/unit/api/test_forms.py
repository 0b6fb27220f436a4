"""Forms are checked in one thread of their own, which is bounded and shared by tenants."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from typing import Any

import pytest

from outrider_serving.api import forms
from outrider_serving.api.errors import ApiError
from outrider_serving.api.forms import Forms
from outrider_serving.api.parse import parse_completion
from outrider_serving.api.schema import Body
from outrider_serving.engine.types import QueueFullError


def with_regex(pattern: str) -> Body:
    return parse_completion({"model": "m", "prompt": "a", "structured_outputs": {"regex": pattern}})


class Slow:
    """Holds up every check until the gate opens; remembers what was checked, by which threads."""

    def __init__(self) -> None:
        self.gate = threading.Event()
        self.checked: list[str] = []
        self.threads: set[str] = set()
        self._check = forms.grammar_of

    def __call__(self, body: Body) -> str:
        self.gate.wait(10)
        self.threads.add(threading.current_thread().name)
        assert body.structured_outputs is not None
        self.checked.append(str(body.structured_outputs.regex))
        return self._check(body)


@pytest.fixture
def slow(monkeypatch: pytest.MonkeyPatch) -> Iterator[Slow]:
    made = Slow()
    monkeypatch.setattr(forms, "grammar_of", made)
    yield made
    made.gate.set()


async def test_there_is_room_for_so_many_and_half_of_it_is_left_to_others(slow: Slow) -> None:
    made = Forms(max_waiting=4)

    async def arrive(tenant: str, pattern: str) -> asyncio.Task[Any]:
        task = asyncio.create_task(made.grammar_of(with_regex(pattern), tenant))
        await asyncio.sleep(0)
        if task.done():
            task.result()
        return task

    tasks = [await arrive("red", pattern) for pattern in ("r0", "r1", "r2")]
    with pytest.raises(QueueFullError, match=r"the limit \(2\)"):
        await arrive("red", "r3")
    tasks.append(await arrive("blue", "b0"))
    slow.gate.set()
    await asyncio.gather(*tasks)
    # Of one tenant they are taken as they came; another one's does not wait for all of them.
    assert [pattern for pattern in slow.checked if pattern != "b0"] == ["r0", "r1", "r2"]
    assert slow.checked.index("b0") < 3
    assert len(slow.threads) == 1
    made.close()


async def test_a_form_at_fault_is_named() -> None:
    made = Forms()
    with pytest.raises(ApiError, match=r"structured_outputs\.regex: "):
        await made.grammar_of(with_regex("("), "red")
    assert "start: /a/" in await made.grammar_of(with_regex("a"), "red")
    made.close()


async def test_closing_ends_every_wait(slow: Slow) -> None:
    made = Forms()
    _, waiting = [asyncio.create_task(made.grammar_of(with_regex("a"), "red")) for _ in range(2)]
    await asyncio.sleep(0)
    made.close()
    await asyncio.wait([waiting], timeout=5)
    assert waiting.cancelled()
