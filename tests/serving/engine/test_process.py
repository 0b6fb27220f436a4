"""The engine's process: what crosses to it and back, and what happens when it dies, hangs or is left."""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import subprocess
import sys
import time
from array import array
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process import child, client
from outrider_serving.engine.process.child import Ending, Patience
from outrider_serving.engine.process.client import EngineClient
from outrider_serving.engine.process.protocol import Learn
from outrider_serving.engine.records import GraphCounts, PageCounts, StepRecord
from outrider_serving.engine.types import (
    DeadlineError,
    Delta,
    EngineClosedError,
    EngineError,
    Labels,
    QueueFullError,
    Request,
    SamplingClass,
    SamplingParams,
)
from outrider_serving.models.errors import ModelError
from outrider_serving.settings import Method, PodSettings, Proposer, default_settings
from serving.engine import scripted
from serving.engine.scripted import Act

ROOT = Path(__file__).parents[3]
LABELS = Labels("other", "completions", SamplingClass.GREEDY, "stable", 0)
ENDLESS = 10**9

Make = Callable[..., Awaitable["Engine"]]


class Engine(EngineClient):
    """A client of a scripted core that remembers what it was told."""

    def __init__(self, **how: Any) -> None:
        self.steps: list[StepRecord] = []
        self.endings: list[Ending] = []
        super().__init__(
            EngineOptions("m"),
            generation(0),
            factory=scripted.FACTORY,
            on_step=self.steps.append,
            on_end=self.endings.append,
            **how,
        )


class Told:
    """A listener to what requests write."""

    def __init__(self) -> None:
        self.histories: dict[str, str] = {}
        self.private: set[str] = set()
        self.ended_with: dict[str, list[int]] = {}
        self._written: dict[str, list[int]] = {}

    def began(self, request_id: str, history: str, *, private: bool) -> None:
        self.histories[request_id] = history
        self.private |= {request_id} if private else set()

    def wrote(self, request_id: str, tokens: Sequence[int]) -> None:
        assert request_id not in self.ended_with
        self._written.setdefault(request_id, []).extend(tokens)

    def ended(self, request_id: str) -> None:
        self.ended_with[request_id] = self._written.pop(request_id, [])


def generation(number: int) -> PodSettings:
    return default_settings().model_copy(update={"generation": number})


def request(name: str, act: Act = Act.GENERATE, max_tokens: int = 4) -> Request:
    return Request(name, (act,), SamplingParams(max_tokens=max_tokens), LABELS)


async def collect(engine: EngineClient, wanted: Request) -> list[Delta]:
    return [delta async for delta in engine.generate(wanted)]


async def begin(engine: EngineClient, wanted: Request) -> asyncio.Task[list[Delta]]:
    """A reader of a request that runs."""
    reading = asyncio.create_task(collect(engine, wanted))
    await until(lambda: engine.running > 0 or reading.done())
    return reading


async def until(condition: Callable[[], object], seconds: float = 10.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        await asyncio.sleep(0.01)


def block(seconds: float) -> None:
    """The event loop does not run meanwhile."""
    time.sleep(seconds)


def alive(pid: int) -> bool:
    """Whether a process exists and is not only waiting to be reaped."""
    with contextlib.suppress(OSError):
        return "(zombie)" not in Path(f"/proc/{pid}/status").read_text()
    return False


@pytest.fixture(autouse=True)
def importable(monkeypatch: pytest.MonkeyPatch) -> None:
    """The child finds the scripted core."""
    monkeypatch.setenv("PYTHONPATH", f"{ROOT / 'serving'}:{ROOT / 'tests'}")


@pytest.fixture
def script(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], None]:
    """Sets what the next starts do."""
    monkeypatch.setenv(scripted.SCRIPT, str(tmp_path / "script"))
    return lambda words: (tmp_path / "script").write_text(words) and None


@pytest.fixture
async def make() -> AsyncIterator[Make]:
    """Makes engines that are ready; their processes end with the test."""
    made: list[Engine] = []

    async def make_one(**how: Any) -> Engine:
        made.append(Engine(**how))
        await made[-1].start()
        return made[-1]

    yield make_one
    for engine in made:
        pid = engine.pid
        await engine.close()
        assert pid is None or not alive(pid)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """A dead process is replaced at once."""
    monkeypatch.setattr(client, "FIRST_DELAY_SECONDS", 0.05)


class TestRequests:
    async def test_a_completion_and_its_records(self, make: Make) -> None:
        engine = await make()
        deltas = await collect(engine, request("a"))
        assert [delta.tokens for delta in deltas] == [(0,)] * 4
        assert [step.rows[0].request_id for step in engine.steps] == ["a"] * 4
        await until(lambda: (engine.running, engine.waiting) == (0, 0))

    @pytest.mark.parametrize(
        ("act", "kind", "says"),
        [
            (Act.REFUSE, ValueError, "the prompt is refused"),
            (Act.FULL, QueueFullError, "5 requests are waiting"),
            (Act.FAIL, EngineError, "it broke"),
            (Act.EXPIRE, DeadlineError, "its time is over"),
        ],
    )
    async def test_errors_cross_by_type_and_end_one_request(
        self, make: Make, act: Act, kind: type[Exception], says: str
    ) -> None:
        engine = await make()
        neighbour = await begin(engine, request("neighbour", max_tokens=50))
        with pytest.raises(kind, match=says) as raised:
            await collect(engine, request("a", act))
        assert type(raised.value) is kind
        assert len(await neighbour) == 50
        assert engine.unready is None

    async def test_an_id_that_is_in_use_is_refused_and_harms_nobody(self, make: Make) -> None:
        engine = await make()
        first = await begin(engine, request("a", max_tokens=50))
        with pytest.raises(ValueError, match="'a' is in use"):
            await collect(engine, request("a"))
        assert len(await first) == 50
        assert len(await collect(engine, request("a"))) == 4

    async def test_settings_cross_in_order(self, make: Make) -> None:
        engine = await make()
        reading = await begin(engine, request("a", max_tokens=200))
        for number in range(1, 20):
            engine.set_settings(generation(number))
            await asyncio.sleep(0.002)
            assert (await collect(engine, request("b", max_tokens=1)))[0].tokens == (number,)
        seen = [delta.tokens[0] for delta in await reading]
        assert seen == sorted(seen)
        assert len(set(seen)) > 5

    async def test_trouble_with_a_proposer_and_its_end_are_told_without_a_request(self, make: Make) -> None:
        engine = await make()
        assert engine.proposer_trouble is None
        engine.set_settings(generation(scripted.UNLUCKY))
        await until(lambda: engine.proposer_trouble == "it is unlucky")
        engine.set_settings(generation(scripted.UNLUCKY + 1))
        await until(lambda: engine.proposer_trouble is None)
        assert engine.steps == []

    async def test_a_slow_reader_holds_nobody_up(self, make: Make) -> None:
        """More than any socket buffer holds waits for a reader that does not read."""
        engine = await make()
        slow = engine.generate(request("slow", Act.FLOOD, max_tokens=300))
        await anext(slow)
        assert len(await collect(engine, request("fast", max_tokens=400))) == 400
        unread = [delta async for delta in slow]
        assert sum(len(delta.tokens) for delta in unread) == 299 * 10_000

    async def test_a_reader_that_is_too_slow_loses_its_request(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """What waited for it is still read, and then says so; the engine does not go on for nobody."""
        monkeypatch.setattr(client, "MAX_UNREAD", 20)
        engine = await make()
        slow = engine.generate(request("slow", max_tokens=ENDLESS))
        await anext(slow)
        await until(lambda: engine.running == engine.waiting == 0)
        for _ in range(20):
            await anext(slow)
        with pytest.raises(EngineError, match="reader is too slow: 20 deltas"):
            await anext(slow)
        (last,) = await collect(engine, request("last", max_tokens=1))
        assert (last.proposed, last.depth) == (1, 1), "requests that the core knows, cancels that it has seen"

    async def test_an_answer_that_fits_may_be_read_at_its_end(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "MAX_UNREAD", 20)
        engine = await make()
        late = engine.generate(request("late", max_tokens=22))
        await anext(late)
        await until(lambda: engine.running == engine.waiting == 0)
        assert len([delta async for delta in late]) == 21

    async def test_pages_and_graphs_are_told_of_also_where_no_request_took_part(self, make: Make) -> None:
        engine = await make()
        assert (engine.pages, engine.graphs) == (PageCounts(total=100), GraphCounts(10, 2))
        reader = await begin(engine, request("a", max_tokens=50))
        assert (engine.pages, engine.graphs) == (PageCounts(100, 1, 1), GraphCounts(11, 2))
        await reader
        with pytest.raises(DeadlineError):
            await collect(engine, request("b", Act.EXPIRE))
        assert (engine.pages, engine.graphs) == (PageCounts(100, 0, 1), GraphCounts(10, 2))

    async def test_what_was_written_elsewhere_is_learned_and_purged(self, make: Make) -> None:
        engine = await make()
        await engine.learn("a", [array("i", range(5000)), array("i", [1, 2, 3])], 0, lambda: True)
        await engine.learn("b", [array("i", [7] * 10)], 0, lambda: True)
        await collect(engine, request("r", max_tokens=1))
        assert (engine.history.tenants, engine.history.tokens) == (2, 5013 + 2 * 64)
        engine.purge("a")
        await collect(engine, request("s", max_tokens=1))
        assert (engine.history.tenants, engine.history.tokens) == (1, 10)
        engine.erase(10)
        await collect(engine, request("t", max_tokens=1))
        assert engine.history.tenants == 0

    async def test_what_is_remembered_is_told_without_requests_too(self, make: Make) -> None:
        engine = await make()
        await engine.learn("a", [array("i", range(20))], 0, lambda: True)
        await until(lambda: engine.history.tokens == 20)
        engine.purge("a")
        await until(lambda: engine.history.tokens == 0)

    @pytest.mark.usefixtures("quick")
    async def test_each_process_that_begins_to_keep_what_requests_write_is_told_of_once(
        self, make: Make
    ) -> None:
        kept: list[int | None] = []
        engine = await make(on_history=lambda: kept.append(engine.pid))
        suffix = default_settings(Proposer(method=Method.SUFFIX))
        for number, settings in enumerate((generation(2), suffix, generation(3), suffix)):
            engine.set_settings(settings)
            await collect(engine, request(str(number), max_tokens=1))
            assert engine.history.kept == (number > 0)
        assert engine.pid is not None
        assert kept == [engine.pid]
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: len(kept) == 2)
        assert kept[1] == engine.pid

    async def test_what_is_purged_meanwhile_is_not_told_on(self, make: Make) -> None:
        """However long the text is: before each part it is asked whether it is alive."""
        engine = await make()
        asked = iter([True, True, False])
        await engine.learn("a", [array("i", range(2000))] * 5, 0, lambda: next(asked))
        await collect(engine, request("r", max_tokens=1))
        assert engine.history.tokens == 4000

    async def test_no_request_waits_behind_what_was_written_elsewhere(self, make: Make) -> None:
        """One lesson at a time is on its way: the engine says that it has taken each."""
        engine = await make()
        sent: list[object] = []
        assert engine._child is not None
        send = engine._child.send
        engine._child.send = lambda message: (sent.append(message), send(message))  # type: ignore[method-assign,assignment,return-value]
        teaching = asyncio.create_task(engine.learn("a", [array("i", range(2000))] * 50, 0, lambda: True))
        await asyncio.sleep(0)
        block(0.1)  # the engine has taken it, which is not heard yet
        assert len(sent) == 1
        assert len(await collect(engine, request("r", max_tokens=1))) == 1
        await teaching
        assert len([message for message in sent if isinstance(message, Learn)]) == 50

    async def test_what_requests_write_is_told_if_it_may_be_remembered(self, make: Make) -> None:
        told = Told()
        engine = await make(outputs=told)
        history = {"tenant": "a", "history": "h"}
        whole = await collect(engine, replace(request("whole"), **history))
        await collect(engine, request("without"))
        await collect(engine, replace(request("private"), private=True, **history))
        with pytest.raises(EngineError):
            await collect(engine, replace(request("failed", Act.EXPIRE), **history))
        deltas = engine.generate(replace(request("left", max_tokens=ENDLESS), **history))
        first = await anext(deltas)
        await deltas.aclose()
        assert set(told.ended_with) == {"whole", "without", "private", "failed", "left"}
        assert told.histories == {"whole": "h", "private": "h", "failed": "h", "left": "h"}
        assert told.private == {"private"}
        assert told.ended_with["whole"] == [token for delta in whole for token in delta.tokens]
        assert told.ended_with["left"][:1] == list(first.tokens)[:1]

    async def test_a_listener_that_raises_harms_no_request(self, make: Make) -> None:
        engine = await make()
        engine._on_step = lambda _: 1 / 0
        assert len(await collect(engine, request("a"))) == 4
        assert engine.endings == []

    async def test_thousands_of_requests_leave_nothing(self, make: Make) -> None:
        engine = await make()
        tasks = len(asyncio.all_tasks())

        async def come_and_go(number: int) -> None:
            wanted = request(f"r{number}", max_tokens=ENDLESS if number % 2 else 1)
            deltas = engine.generate(wanted)
            if number % 3:
                await anext(deltas)
            await deltas.aclose()
            with contextlib.suppress(TimeoutError):  # cancelled at any moment of its life
                async with asyncio.timeout(number % 7 / 1000):
                    await collect(engine, request(f"t{number}", max_tokens=ENDLESS))

        for block in range(0, 3000, 100):
            await asyncio.gather(*map(come_and_go, range(block, block + 100)))
        (last,) = await collect(engine, request("last", max_tokens=1))
        assert last.proposed == 1, "requests that the core still knows, with this one"
        assert last.depth > 1000, "cancels that it has seen"
        assert engine._streams == {}
        assert len(asyncio.all_tasks()) == tasks


class TestDeath:
    @pytest.mark.usefixtures("quick")
    async def test_killed_under_load(self, make: Make) -> None:
        engine = await make()
        readers = [await begin(engine, request(f"r{n}", max_tokens=ENDLESS)) for n in range(8)]
        engine.set_settings(generation(7))
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGKILL)
        for reader in readers:
            with pytest.raises(EngineClosedError, match=r"ended by signal 9 \(Killed\).*restarted"):
                await reader
        assert "signal 9" in str(engine.unready)
        assert (engine.running, engine.waiting, engine.failure) == (0, 0, None)
        assert (engine.pages, engine.graphs) == (PageCounts(), GraphCounts())
        assert engine.history.tokens == 0
        await engine.learn("a", [array("i", [1])], 0, lambda: True)  # there is nobody to tell
        with pytest.raises(EngineClosedError, match="signal 9"):
            await collect(engine, request("refused"))
        await until(lambda: engine.unready is None)
        assert engine.pid != first
        (delta,) = await collect(engine, request("again", max_tokens=1))
        assert delta.tokens == (7,), "the settings in force"
        assert [ending.reason for ending in engine.endings] == ["died"]

    @pytest.mark.usefixtures("quick")
    async def test_a_step_that_raises(self, make: Make) -> None:
        engine = await make()
        with pytest.raises(EngineClosedError, match="has failed: RuntimeError: the device is gone"):
            await collect(engine, request("a", Act.BREAK))
        await until(lambda: engine.unready is None)
        assert [ending.reason for ending in engine.endings] == ["failed"]

    @pytest.mark.usefixtures("quick")
    async def test_stopped_under_load(self, make: Make) -> None:
        engine = await make(patience=Patience(silence=3))
        reader = await begin(engine, request("a", max_tokens=ENDLESS))
        first = engine.pid
        assert first is not None
        os.kill(first, signal.SIGSTOP)
        stopped = time.monotonic()
        with pytest.raises(EngineClosedError, match="no sign of life for 3 s"):
            await reader
        assert 2 < time.monotonic() - stopped < 6
        assert not alive(first)
        await until(lambda: engine.unready is None)
        assert [ending.reason for ending in engine.endings] == ["stalled"]

    @pytest.mark.usefixtures("quick")
    async def test_a_step_that_does_not_end(self, make: Make) -> None:
        engine = await make(patience=Patience(silence=10, step=3))
        began = time.monotonic()
        with pytest.raises(EngineClosedError, match="has not ended a step for 3 s"):
            await collect(engine, request("a", Act.HANG))
        assert 2 < time.monotonic() - began < 7
        await until(lambda: engine.unready is None)
        assert [ending.reason for ending in engine.endings] == ["stalled"]

    async def test_neither_idle_nor_busy_processes_are_taken_for_dead(self, make: Make) -> None:
        engine = await make(patience=Patience(silence=3, step=2))
        await asyncio.sleep(4)
        reader = await begin(engine, request("a", max_tokens=2500))
        assert len(await reader) == 2500
        assert engine.endings == []

    async def test_an_event_loop_that_slept_kills_nobody(self, make: Make) -> None:
        """As after SIGSTOP of the whole pod: all clocks jump, and no beat was missed by anybody awake."""
        engine = await make(patience=Patience(silence=2, step=2))
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        block(4)
        os.kill(pid, signal.SIGCONT)
        assert len(await collect(engine, request("a"))) == 4
        await asyncio.sleep(1.5)
        assert engine.endings == []

    @pytest.mark.usefixtures("quick")
    async def test_requests_come_and_go_while_it_dies_again_and_again(self, make: Make) -> None:
        engine = await make()

        async def ask(number: int) -> str:
            try:
                await collect(engine, request(f"r{number}", max_tokens=number % 40 + 1))
            except EngineClosedError:
                return "refused"
            return "completed"

        outcomes: list[str] = []
        for life in range(4):
            await until(lambda: engine.unready is None)
            asking = [asyncio.create_task(ask(life * 100 + number)) for number in range(100)]
            await asyncio.sleep(0.01 * life)
            assert engine.pid is not None
            os.kill(engine.pid, signal.SIGKILL)
            async with asyncio.timeout(10):
                outcomes += await asyncio.gather(*asking)
        assert len(outcomes) == 400
        assert engine._streams == {}


class TestStart:
    async def test_a_model_that_cannot_be_served(self, script: Callable[[str], None]) -> None:
        script("refused")
        engine = Engine()
        with pytest.raises(ModelError, match=r"^model m has no weights$"):
            await engine.start()
        await engine.close()

    @pytest.mark.parametrize(
        ("word", "says"),
        [("broken", "has failed: MemoryError: no memory"), ("killed", r"was ended by signal 9 \(Killed\)")],
    )
    async def test_the_first_process_dies_while_it_loads(
        self, script: Callable[[str], None], word: str, says: str
    ) -> None:
        script(word)
        engine = Engine()
        with pytest.raises(EngineError, match=says):
            await engine.start()
        assert engine.endings == [], "nothing was restarted"
        await engine.close()

    async def test_closed_while_it_loads(self, script: Callable[[str], None]) -> None:
        script("slow")
        engine = Engine()
        starting = asyncio.create_task(engine.start())
        await until(lambda: engine.pid)
        pid = engine.pid
        assert pid is not None
        await engine.close()
        assert not alive(pid)
        with pytest.raises(asyncio.CancelledError):
            await starting

    @pytest.mark.usefixtures("quick")
    async def test_later_processes_serve_the_same_revision(
        self, make: Make, script: Callable[[str], None]
    ) -> None:
        script("good changed")
        engine = await make()
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.endings)
        await until(lambda: engine.unready is None)
        assert len(engine.endings) == 1

    async def test_starts_that_fail_are_repeated_more_and_more_slowly(
        self, make: Make, script: Callable[[str], None], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(client, "FIRST_DELAY_SECONDS", 0.05)
        monkeypatch.setattr(client, "MAX_DELAY_SECONDS", 0.4)
        script("good broken refused killed broken broken good")
        engine = await make()
        waits: list[float] = []
        bury = engine._bury
        monkeypatch.setattr(engine, "_bury", lambda ending: waits.append(bury(ending)) or waits[-1])
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: len(engine.endings) == 4, 20)
        assert engine.failure is None
        await until(lambda: engine.failure, 20)
        await until(lambda: engine.unready is None, 20)
        assert engine.failure is None, "it serves again"
        assert waits == [0.05, 0.1, 0.2, 0.4, 0.4, 0.4]
        reasons = [ending.reason for ending in engine.endings]
        assert reasons == ["died", "failed", "failed", "died", "failed", "failed"]

    @pytest.mark.usefixtures("quick")
    async def test_a_process_that_was_healthy_puts_the_wait_back(
        self, make: Make, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        engine = await make()
        engine._short_lives = 4
        monkeypatch.setattr(client, "HEALTHY_SECONDS", 0.0)
        assert engine.pid is not None
        os.kill(engine.pid, signal.SIGKILL)
        await until(lambda: engine.endings)
        assert engine._short_lives == 0

    async def test_a_process_that_cannot_be_ended(self, make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
        """The kernel holds it, and with it its device: only another machine helps."""
        monkeypatch.setattr(child, "KILL_SECONDS", 0.1)
        engine = await make(patience=Patience(silence=2))
        pid = engine.pid
        assert pid is not None
        os.kill(pid, signal.SIGSTOP)
        with monkeypatch.context() as held:
            held.setattr(asyncio.subprocess.Process, "kill", lambda process: None)
            await until(lambda: engine.failure)
        assert "does not end although it was killed" in str(engine.failure)
        os.kill(pid, signal.SIGKILL)
        await until(lambda: not alive(pid))


class TestEnd:
    async def test_closing_ends_the_process_and_what_is_in_flight(self, make: Make) -> None:
        engine = await make()
        reader = await begin(engine, request("a", max_tokens=ENDLESS))
        pid = engine.pid
        assert pid is not None
        await engine.close()
        with pytest.raises(EngineClosedError, match="shutting down"):
            await reader
        with pytest.raises(EngineClosedError, match="shutting down"):
            await collect(engine, request("b"))
        assert not alive(pid)
        assert engine.endings == []

    @pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
    async def test_a_stop_that_signals_every_process_ends_no_request(
        self, make: Make, number: signal.Signals
    ) -> None:
        engine = await make()
        reader = await begin(engine, request("a", max_tokens=200))
        assert engine.pid is not None
        os.kill(engine.pid, number)
        assert len(await reader) == 200
        assert engine.endings == []

    @pytest.mark.parametrize("stop", [False, True])
    async def test_it_dies_with_its_parent(self, stop: bool) -> None:
        """Even when it is stopped, and so cannot see that its socket is closed."""
        code = (
            "import asyncio\n"
            "from serving.engine.test_process import Engine\n"
            "async def main():\n"
            "    engine = Engine()\n"
            "    await engine.start()\n"
            "    print(engine.pid, flush=True)\n"
            "    await asyncio.sleep(60)\n"
            "asyncio.run(main())\n"
        )
        parent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=subprocess.PIPE)
        try:
            assert parent.stdout is not None
            pid = int(await parent.stdout.readline())
            assert alive(pid)
            if stop:
                os.kill(pid, signal.SIGSTOP)
        finally:
            parent.kill()
            await parent.wait()
        await until(lambda: not alive(pid))
