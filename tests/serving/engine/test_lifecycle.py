"""Requests that are cancelled, refused or fail; an engine that is closed, fed with settings, or broken."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from outrider_serving.engine.engine import Engine
from outrider_serving.engine.records import StepRecord
from outrider_serving.engine.runner import ModelRunner
from outrider_serving.engine.sequence import Sequence
from outrider_serving.engine.speculation import Speculation
from outrider_serving.engine.types import EngineClosedError, EngineError, QueueFullError
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Observed, Proposal, Query
from outrider_serving.sampling.randomness import GeneratorRandomness
from outrider_serving.settings import Arm, Method, NgramSettings, PodSettings, Proposer, default_settings
from serving.engine.support import NONE, Oracle, Silent, collect, engine_of, reference, request, run
from serving.tiny import make_tokenizer

PROMPT = [5, 6, 7, 8] * 4


def settings(method: Method, generation: int = 1) -> PodSettings:
    return PodSettings(
        generation=generation, arms={"stable": Arm(proposer=Proposer(method=method))}, in_force="stable"
    )


async def until(condition: Callable[[], object]) -> None:
    for _ in range(1000):
        if condition():
            return
        await asyncio.sleep(0.005)
    raise AssertionError("it never happened")


async def test_a_consumer_that_stops_cancels_its_request(tiny_llama: LoadedModel) -> None:
    expected = reference(tiny_llama, PROMPT, 32)
    with engine_of(tiny_llama) as engine:
        chunks = engine.generate(request(PROMPT, max_tokens=400, ignore_eos=True))
        await anext(chunks)
        await anext(chunks)
        assert engine.running == 1
        await chunks.aclose()
        await until(lambda: engine.running == 0)
        assert (await collect(engine, request(PROMPT))).tokens == expected


async def test_a_cancelled_task_cancels_its_request_even_while_it_waits(tiny_llama: LoadedModel) -> None:
    with engine_of(tiny_llama, max_running=1) as engine:
        first = asyncio.create_task(collect(engine, request(PROMPT, max_tokens=400, ignore_eos=True)))
        second = asyncio.create_task(collect(engine, request(PROMPT, max_tokens=400, ignore_eos=True)))
        await until(lambda: engine.waiting == 1)
        second.cancel()
        await until(lambda: engine.waiting == 0)
        assert engine.running == 1
        first.cancel()
        await until(lambda: engine.running == 0)


async def test_a_full_queue_refuses(tiny_llama: LoadedModel) -> None:
    """Those for whom there is a place at the next step do not wait; that step has not begun here."""
    engine = Engine(tiny_llama, default_settings(), max_waiting=2, max_running=3)
    tasks = [asyncio.create_task(collect(engine, request(PROMPT))) for _ in range(5)]
    await until(lambda: engine.waiting == 5)
    with pytest.raises(QueueFullError, match=r"^2 requests are waiting, which is the limit \(2\)"):
        await collect(engine, request(PROMPT))
    engine.start()
    assert len(await asyncio.gather(*tasks)) == 5
    engine.close()


async def test_requests_at_once_find_free_places(tiny_llama: LoadedModel) -> None:
    with engine_of(tiny_llama, max_waiting=1, max_running=16) as engine:
        wanted = (collect(engine, request(PROMPT, max_tokens=4)) for _ in range(16))
        assert len(await asyncio.gather(*wanted)) == 16


async def test_a_queue_is_full_while_requests_run(tiny_llama: LoadedModel) -> None:
    with engine_of(tiny_llama, max_waiting=1, max_running=1) as engine:
        long = [
            asyncio.create_task(collect(engine, request(PROMPT, max_tokens=400, ignore_eos=True)))
            for _ in range(2)
        ]
        await until(lambda: (engine.running, engine.waiting) == (1, 1))
        with pytest.raises(QueueFullError, match="1 requests are waiting"):
            await collect(engine, request(PROMPT))
        for task in long:
            task.cancel()


@pytest.mark.parametrize(
    ("prompt", "max_tokens", "message"),
    [
        ([], 4, "no tokens"),
        ([320], 4, "from 0 to 319"),
        ([-1], 4, "from 0 to 319"),
        ([1] * 500, 13, "500 tokens.*13.*512"),
        ([1], 0, "at least 1"),
    ],
)
def test_requests_that_make_no_sense(
    tiny_llama: LoadedModel, prompt: list[int], max_tokens: int, message: str
) -> None:
    with engine_of(tiny_llama) as engine, pytest.raises(ValueError, match=message):
        run(engine, request(prompt, max_tokens=max_tokens))


def test_closing_with_drain_lets_requests_end(tiny_llama: LoadedModel) -> None:
    engine = Engine(tiny_llama, default_settings(), max_running=1)

    async def scenario() -> list[int]:
        tasks = [
            asyncio.create_task(collect(engine, request(PROMPT, max_tokens=50, ignore_eos=True)))
            for _ in range(3)
        ]
        await until(lambda: engine.waiting == 3)
        engine.start()
        await asyncio.to_thread(engine.close)
        with pytest.raises(EngineClosedError):
            await collect(engine, request(PROMPT))
        return [len((await task).tokens) for task in tasks]

    assert asyncio.run(scenario()) == [50, 50, 50]


@pytest.mark.parametrize("timeout", [None, 0.0])
def test_closing_without_drain_fails_what_is_left(tiny_llama: LoadedModel, timeout: float | None) -> None:
    engine = Engine(tiny_llama, default_settings(), max_running=1)

    async def scenario() -> None:
        tasks = [
            asyncio.create_task(collect(engine, request([3], max_tokens=500, ignore_eos=True)))
            for _ in range(3)
        ]
        await until(lambda: engine.waiting == 3)
        engine.start()
        await until(lambda: engine.running == 1)
        await asyncio.to_thread(engine.close, timeout is not None, timeout)
        for task in tasks:
            with pytest.raises(EngineClosedError, match="shutting down"):
                await task

    asyncio.run(scenario())
    assert (engine.running, engine.waiting, engine.failure) == (0, 0, None)


def test_an_engine_that_was_never_started_can_be_closed(tiny_llama: LoadedModel) -> None:
    engine = Engine(tiny_llama, default_settings())
    engine.close()
    with pytest.raises(EngineClosedError):
        run(engine, request(PROMPT))


def test_warm_up_generates(tiny_llama: LoadedModel) -> None:
    records: list[StepRecord] = []
    with engine_of(tiny_llama, on_step=records.append) as engine:
        engine.warm_up()
    assert sum(record.committed for record in records) == 2


def test_warm_up_says_when_nothing_can_be_generated(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "run", failing(torch.OutOfMemoryError("no memory")))
    with engine_of(tiny_llama) as engine, pytest.raises(EngineError, match="OutOfMemoryError"):
        engine.warm_up()


def failing(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("odd"), MemoryError()])
def test_a_target_pass_that_fails_fails_its_request_alone(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    original = ModelRunner.run

    def sometimes(self: ModelRunner, tokens: list[int], *args: object, **how: object) -> torch.Tensor:
        if 99 in tokens:
            raise error
        return original(self, tokens, *args, **how)  # type: ignore[arg-type]

    monkeypatch.setattr(ModelRunner, "run", sometimes)
    records: list[StepRecord] = []

    async def scenario(engine: Engine) -> None:
        good, bad = await asyncio.gather(
            collect(engine, request(PROMPT)), collect(engine, request([99])), return_exceptions=True
        )
        assert isinstance(bad, EngineError)
        assert not isinstance(bad, EngineClosedError)
        assert not isinstance(good, BaseException)
        assert good.tokens == (await collect(engine, request(PROMPT))).tokens

    with engine_of(tiny_llama, on_step=records.append) as engine:
        asyncio.run(scenario(engine))
    assert [row.finished for record in records for row in record.rows if row.failed] == [True]


def test_a_broken_device_closes_the_engine(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "run", failing(torch.AcceleratorError("device-side assert")))
    with engine_of(tiny_llama) as engine:
        with pytest.raises(EngineClosedError, match="device-side assert"):
            run(engine, request(PROMPT))
        with pytest.raises(EngineClosedError):
            run(engine, request(PROMPT))
        assert engine.failure is not None


def test_an_observer_that_raises_is_no_harm(tiny_llama: LoadedModel) -> None:
    def on_step(_: StepRecord) -> None:
        raise ValueError("a bug in telemetry")

    with engine_of(tiny_llama, on_step=on_step) as engine:
        assert run(engine, request(PROMPT))[0].tokens == reference(tiny_llama, PROMPT, 32)


class Broken(Oracle):
    """Raises wherever it is told to, as long as it is told to."""

    def __init__(self, where: str) -> None:
        super().__init__([])
        self.where: str | None = where

    def propose(self, queries: list[Query]) -> list[Proposal]:  # type: ignore[override]
        if self.where == "propose":
            raise RuntimeError("a bug in a proposer")
        if self.where == "count":
            return []
        return super().propose(queries)

    def observe(self, events: list[Observed]) -> None:  # type: ignore[override]
        if self.where == "observe":
            raise RuntimeError("a bug in a proposer")
        super().observe(events)

    def forget(self, request_id: str) -> None:
        if self.where == "forget":
            raise RuntimeError("a bug in a proposer")
        super().forget(request_id)


@pytest.mark.parametrize("where", ["propose", "observe", "forget", "count", "build"])
def test_a_proposer_that_raises_fails_no_request(tiny_llama: LoadedModel, where: str) -> None:
    def build(settings: Proposer) -> Oracle | None:
        if settings.method is Method.NONE:
            return None
        if where == "build":
            raise RuntimeError("no such file")
        return Broken(where)

    records: list[StepRecord] = []
    with engine_of(tiny_llama, build=build, on_step=records.append) as engine:
        results = run(engine, request(PROMPT), request(PROMPT, speculation=NONE), request(PROMPT[1:]))
    assert results[0].tokens == results[1].tokens == reference(tiny_llama, PROMPT, 32)
    assert results[2].tokens == reference(tiny_llama, PROMPT[1:], 32)
    assert sum(record.proposer_failures for record in records) > 0


def test_a_proposer_that_cannot_be_loaded_is_tried_again_after_pauses_that_double() -> None:
    now, tries = 0.0, []
    broken = True

    def build(settings: Proposer) -> Oracle:
        tries.append(now)
        if broken:
            raise RuntimeError("no such file")
        return Oracle([])

    speculation = Speculation(build, lambda: now)
    sequence = Sequence(request(PROMPT), Silent(), make_tokenizer(), GeneratorRandomness())

    def steps(seconds: int, arm: Proposer) -> None:
        nonlocal now
        for _ in range(10 * seconds):
            speculation.propose([sequence], arm, [sequence])
            now += 0.1

    steps(200, Proposer())
    assert [round(at) for at in tries] == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert speculation.failures == len(tries)
    steps(1, Proposer(ngram=NgramSettings(max_match=9)))
    assert round(tries[9]) == 200  # other settings are tried at once
    broken = False
    steps(3, Proposer(ngram=NgramSettings(max_match=9)))
    assert len(tries) == 11
    assert speculation.failures == 10


def test_a_proposer_that_raises_on_events_is_loaded_anew_after_a_pause() -> None:
    now, built = 0.0, []

    def build(settings: Proposer) -> Broken:
        built.append(Broken(""))
        return built[-1]

    speculation = Speculation(build, lambda: now)
    sequence = Sequence(request(PROMPT), Silent(), make_tokenizer(), GeneratorRandomness())
    for _ in range(40):
        speculation.propose([sequence], Proposer(), [sequence])
        built[-1].where = "observe"
        speculation.observe([Observed(sequence.request.id, (3,))])
        now += 0.1
    assert len(built) == speculation.failures == 4


def test_a_proposer_is_switched_while_requests_run(tiny_gemma3: LoadedModel) -> None:
    """The proposer that is loaded in the middle knows the text so far; records say what was in force."""
    records: list[StepRecord] = []
    halfway = threading.Event()

    def on_step(record: StepRecord) -> None:
        records.append(record)
        if len(records) == 10:
            engine.set_settings(settings(Method.NGRAM, 7))
            halfway.set()

    prompt = [9, 10, 11] * 5
    with engine_of(tiny_gemma3, settings(Method.NONE), on_step=on_step) as engine:
        (result,) = run(engine, request(prompt, max_tokens=60, ignore_eos=True))
    assert halfway.is_set()
    assert result.tokens == reference(tiny_gemma3, prompt, 60, eos=False)
    generations = [record.generation for record in records]
    assert generations == sorted(generations)
    assert set(generations) == {1, 7}
    assert not any(row.proposed for record in records[:10] for row in record.rows)
    assert records[10].rows[0].proposed > 0
    assert sum(row.accepted for record in records[10:] for row in record.rows) > 0
    assert not any(record.proposer_failures for record in records)


def test_a_proposer_is_loaded_anew_for_other_settings_but_not_for_another_depth(
    tiny_llama: LoadedModel,
) -> None:
    built: list[Proposer] = []

    def build(settings: Proposer) -> Oracle:
        built.append(settings)
        return Oracle([])

    with engine_of(tiny_llama, Proposer(max_depth=2), build=build) as engine:
        for proposer in (Proposer(max_depth=9), Proposer(ngram=NgramSettings(max_match=9))):
            run(engine, request(PROMPT))
            engine.set_settings(default_settings(proposer))
        run(engine, request(PROMPT))
    assert [settings.ngram for settings in built] == [None, NgramSettings(max_match=9)]


def test_records_add_up_to_usage(tiny_gemma3: LoadedModel) -> None:
    records: list[StepRecord] = []
    with engine_of(tiny_gemma3, on_step=records.append) as engine:
        results = run(engine, *(request([n + 3, 4] * 150, max_tokens=20 + n) for n in range(5)))
    rows = [row for record in records for row in record.rows]
    assert sum(row.committed for row in rows) == sum(result.usage.completion_tokens for result in results)
    assert sum(row.proposed for row in rows) == sum(result.usage.proposed_tokens for result in results)
    assert sum(row.accepted for row in rows) == sum(result.usage.accepted_tokens for result in results)
    assert sum(row.finished for row in rows) == 5
    for record in records:
        assert sum(record.accepted_by_position) == sum(row.accepted for row in record.rows)
        assert sum(record.proposed_by_position) == sum(row.proposed for row in record.rows)
        assert record.tokens == sum(row.tokens for row in record.rows)
        assert record.busy_seconds > 0


def test_a_long_prompt_is_read_in_parts_between_the_steps_of_others(tiny_llama: LoadedModel) -> None:
    roomy = replace(tiny_llama, context_length=4096)
    records: list[StepRecord] = []

    async def scenario(engine: Engine) -> None:
        short = asyncio.create_task(
            collect(engine, request(PROMPT, max_tokens=300, ignore_eos=True, speculation=NONE))
        )
        await until(lambda: records)
        await collect(engine, request([3] * 1500, max_tokens=1, speculation=NONE))
        await short

    with engine_of(roomy, on_step=records.append) as engine:
        asyncio.run(scenario(engine))
    shared = [record for record in records if len(record.rows) == 2]
    assert len(shared) == 6
    assert all(record.committed >= 1 and max(row.tokens for row in record.rows) <= 256 for record in shared)
