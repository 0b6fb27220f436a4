"""An engine without requests: it loads, unloads and retries proposers all the same, and tells of it."""

from __future__ import annotations

import contextlib
import queue
import threading
from collections.abc import Callable, Iterator

import pytest

from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.main import Loop
from outrider_serving.engine.process.protocol import SetSettings, Start, Stepped, ToApi, ToEngine
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Surroundings
from outrider_serving.settings import Method, NgramSettings, PodSettings, Proposer, default_settings
from serving.engine import proposers
from serving.engine.support import Bench, bench, building, request

PROMPT = [5, 6, 7, 8] * 4

OFF, ON, OTHER = (
    default_settings(proposer)
    for proposer in (
        Proposer(method=Method.NONE),
        Proposer(),
        Proposer(ngram=NgramSettings(max_match=9)),
    )
)


class Heavy(proposers.Oracle):
    """Loads beside the steps: each time until it is told how that ends."""

    def __init__(self) -> None:
        super().__init__([])
        self.memory_bytes = 1000
        self.endings: queue.SimpleQueue[Exception | None] = queue.SimpleQueue()

    def load(self, surroundings: Surroundings) -> None:
        error = self.endings.get(timeout=60)
        if error is not None:
            raise error


class Unloadable:
    """Builds a proposer that cannot be loaded so many times."""

    def __init__(self, times: int) -> None:
        self.times = times
        self.tries = 0

    def __call__(self, settings: Proposer) -> proposers.Oracle | None:
        if settings.method is Method.NONE:
            return None
        self.tries += 1
        if self.tries <= self.times:
            raise RuntimeError("no such file")
        return proposers.Oracle([])


def test_an_engine_without_requests_loads_retries_and_unloads(tiny_llama: LoadedModel) -> None:
    now, build = 0.0, Unloadable(2)
    core = bench(tiny_llama, OFF, build=build, clock=lambda: now).core
    core.tend()
    assert core.tend_in is None, "there is nothing to load"
    core.set_settings(ON)
    assert (core.tend_in, core.busy) == (0.0, False)
    core.tend()
    assert (build.tries, core.proposer_trouble) == (1, "proposer ngram failed: no such file")
    assert core.tend_in == 1.0
    core.tend()
    assert build.tries == 1, "before the pause is over"
    now = 1.0
    assert core.tend_in == 0.0
    core.tend()
    assert (build.tries, core.tend_in) == (2, 2.0)
    now = 3.0
    core.tend()
    assert (build.tries, core.proposer_trouble, core.tend_in) == (3, None, None)
    core.set_settings(OFF)
    assert core.tend_in == 0.0
    core.tend()
    assert (core.tend_in, core.busy) == (None, False)


def test_trouble_ends_with_the_settings_that_made_it(tiny_llama: LoadedModel) -> None:
    core = bench(tiny_llama, ON, build=Unloadable(9)).core
    core.tend()
    assert core.proposer_trouble is not None
    core.set_settings(OFF)
    core.tend()
    assert (core.proposer_trouble, core.tend_in) == (None, None)


def test_failures_without_a_step_are_counted_with_the_next_one(tiny_llama: LoadedModel) -> None:
    now = 0.0
    engine = bench(tiny_llama, ON, build=Unloadable(2), clock=lambda: now)
    engine.core.tend()
    now = 1.0
    engine.core.tend()
    now = 3.0
    engine.run(request(PROMPT, max_tokens=4))
    assert [record.proposer_failures for record in engine.records][:2] == [2, 0]


def test_a_load_that_is_under_way_is_looked_at_now_and_then(tiny_llama: LoadedModel) -> None:
    heavy = Heavy()
    core = bench(tiny_llama, ON, build=building(heavy), proposer_bytes=1000).core
    core.tend()
    pause = core.tend_in
    assert pause is not None
    assert 0.01 <= pause <= 1
    assert core.proposer_free == 0
    heavy.endings.put(None)
    core.close()


class Running:
    """A loop in a thread, and what it says."""

    def __init__(self, engine: Bench) -> None:
        self._inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
        self._said: queue.SimpleQueue[ToApi] = queue.SimpleQueue()
        self._loop = Loop(engine.core, self._inbox, self._said.put)
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def put_in_force(self, settings: PodSettings) -> None:
        self._inbox.put(SetSettings(settings))

    def trouble(self) -> str | None:
        """What the loop says next, which has to be of trouble only."""
        said = self._said.get(timeout=60)
        assert isinstance(said, Stepped)
        assert (said.record, said.deltas, said.failures, said.running) == (None, (), (), 0)
        return said.proposer_trouble

    def end(self) -> None:
        """End the loop; nothing was said but what was asked for."""
        self._inbox.put(Start("", EngineOptions("m"), OFF, "info"))  # which a loop that runs cannot take
        self._thread.join(60)
        assert not self._thread.is_alive()
        assert self._said.empty()

    def _run(self) -> None:
        with contextlib.suppress(ValueError):
            self._loop.run()


@pytest.fixture
def start(tiny_llama: LoadedModel) -> Iterator[Callable[..., Running]]:
    """Starts loops over engines, which end with the test."""
    running: list[tuple[Running, Bench]] = []

    def start_one(settings: PodSettings, **how: object) -> Running:
        engine = bench(tiny_llama, settings, **how)  # type: ignore[arg-type]
        engine.core.warm_up()
        running.append((Running(engine), engine))
        return running[-1][0]

    yield start_one
    for loop, engine in running:
        loop.end()
        engine.core.close()


Starts = Callable[..., Running]


def test_the_loop_tells_of_trouble_and_of_its_end(start: Starts) -> None:
    loop = start(OFF, build=Unloadable(10))
    loop.put_in_force(ON)
    assert loop.trouble() == "proposer ngram failed: no such file"
    loop.put_in_force(OFF)
    assert loop.trouble() is None


def test_the_loop_tries_again_without_a_message(start: Starts) -> None:
    """And tells of the trouble that there was before it began."""
    loop = start(ON, build=Unloadable(2))
    assert loop.trouble() == "proposer ngram failed: no such file"
    assert loop.trouble() is None


def test_the_loop_sees_the_end_of_a_load(start: Starts) -> None:
    heavy = Heavy()
    loop = start(OFF, build=building(heavy), proposer_bytes=1000)
    loop.put_in_force(ON)
    heavy.endings.put(RuntimeError("a bad file"))
    assert loop.trouble() == "proposer ngram failed: a bad file"
    heavy.endings.put(None)
    assert loop.trouble() is None
    loop.put_in_force(OTHER)
    heavy.endings.put(RuntimeError("another one"))
    assert loop.trouble() == "proposer ngram failed: another one"
    loop.put_in_force(OFF)
    assert loop.trouble() is None
