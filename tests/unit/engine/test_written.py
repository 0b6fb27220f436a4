"""What was written elsewhere is told lesson by lesson, whoever is cancelled and whichever engine goes."""

from __future__ import annotations

import asyncio
from array import array
from collections.abc import Callable, Iterator, Sequence

import pytest

from outrider_serving.api.sharing import Sharing
from outrider_serving.engine.process.protocol import Learn, Learned
from outrider_serving.engine.process.written import Teacher
from outrider_serving.suffix.lookup import LESSON_TOKENS

LESSON = [array("i", range(LESSON_TOKENS))]


def always() -> bool:
    return True


class Line:
    """To an engine, which says nothing by itself."""

    def __init__(self) -> None:
        self.sent: list[str] = []
        self.there = True

    def send(self, lesson: Learn) -> bool:
        if self.there:
            self.sent.append(lesson.tenant)
        return self.there


async def turns() -> None:
    for _ in range(5):
        await asyncio.sleep(0)


@pytest.fixture
def line() -> Line:
    return Line()


async def test_a_lesson_whose_teller_was_cancelled_is_waited_for_all_the_same(line: Line) -> None:
    teacher = Teacher(line.send, always)
    first = asyncio.create_task(teacher.teach("a", LESSON, 0, always))
    await turns()
    first.cancel()
    second = asyncio.create_task(teacher.teach("b", LESSON * 2, 0, always))
    await turns()
    assert line.sent == ["a"]
    for told in (["a", "b"], ["a", "b", "b"]):
        teacher.took(Learned(0.0))
        await turns()
        assert line.sent == told
    assert not second.done()
    teacher.took(Learned(0.0))
    assert await second


async def test_without_an_engine_nothing_more_is_told(line: Line) -> None:
    teacher = Teacher(line.send, always)
    telling = asyncio.create_task(teacher.teach("a", LESSON * 3, 0, always))
    await turns()
    line.there = False
    teacher.lost()
    assert not await telling
    assert line.sent == ["a"]


async def test_what_is_void_is_not_told_and_no_sign_that_the_engine_has_gone(line: Line) -> None:
    assert await Teacher(line.send, always).teach("a", LESSON, 0, lambda: False)
    assert line.sent == []


async def test_what_is_remembered_is_told_on_only_while_there_is_an_engine() -> None:
    """Decoding all of it takes a second, in which the event loop would stand still."""

    class Engine:
        def __init__(self) -> None:
            self.told = 0

        async def learn(
            self, tenant: str, outputs: Sequence[array[int]], written: int, alive: Callable[[], bool]
        ) -> bool:
            self.told += 1
            return self.told < 3

    class Log:
        def replay(self) -> Iterator[tuple[str, Sequence[array[int]], int, Callable[[], bool]]]:
            for _ in range(9):
                yield "a", LESSON, 0, always

    sharing, engine = Sharing(None, 60, ()), Engine()
    sharing._engine = engine  # type: ignore[assignment]
    await sharing._replay(Log())  # type: ignore[arg-type]
    assert engine.told == 3
