"""What is done while a pass is under way, and that it changes nothing but when it is done."""

from __future__ import annotations

import queue
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace

import pytest
import torch

from outrider_serving.depth import FullDepth, Outcome
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.main import Loop
from outrider_serving.engine.process.protocol import (
    Cancel,
    SetSettings,
    Start,
    Stepped,
    Submit,
    ToApi,
    ToEngine,
)
from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.types import EngineError, FinishReason, Request
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.grammar import regex_grammar
from outrider_serving.settings import Proposer, default_settings
from serving.engine import proposers
from serving.engine.late import Late, make_late
from serving.engine.support import NONE, Bench, Result, bench, building, reference, request

PROMPT = [5, 6, 7, 8] * 4
OTHER = [9, 8, 7] * 3
LONG = [*range(20, 120)]
STOP = Start("", EngineOptions("m"), default_settings(), "info")
"""Which a loop that runs cannot take."""


@pytest.fixture
def late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Passes are late in the engines of the test."""
    return make_late(monkeypatch)


def holds_99(batch: Batch) -> bool:
    return bool((batch.ids == 99).any())


def failing(error: Exception, where: Callable[[Batch], bool]) -> Callable[[Batch], None]:
    def fail(batch: Batch) -> None:
        if where(batch):
            raise error

    return fail


def generated(engine: Bench, wanted: list[Request], *, under_way: bool) -> list[Result]:
    """One comes with each step, before it or while it is under way; until all have ended."""
    results: list[Result] = []

    def come() -> None:
        if len(results) < len(wanted):
            results.extend(engine.submit(wanted[len(results)]))

    come()
    while engine.core.busy:
        if under_way:
            engine.step(come)
        else:
            come()
            engine.step()
    return results


def test_outputs_are_those_of_an_engine_that_waits(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Trees with hidden states, seeds, logprobs, a grammar, preemptions; requests come in the middle."""
    texts = [[*p, *reference(tiny_llama, p, 32, eos=False)] for p in (PROMPT, OTHER)]

    def wanted() -> list[Request]:
        return [
            request(PROMPT, ignore_eos=True),
            request(OTHER, ignore_eos=True, logprobs=2, prompt_logprobs=1),
            request(PROMPT, temperature=1.0, seed=3),
            request(OTHER, temperature=0.7, top_p=0.9, seed=4, frequency_penalty=0.5),
            request(PROMPT, speculation=NONE, private=True),
            request([3], grammar=regex_grammar("[ab]{3}")),
        ]

    def run(under_way: bool) -> list[Result]:
        reader = proposers.HiddenReader(texts, (2,))
        engine = bench(tiny_llama, Proposer(max_depth=4), build=building(reader), pages=30)
        results = generated(engine, wanted(), under_way=under_way)
        assert engine.core.pages.held == 0
        assert results[0].accepted > 0
        assert sum(record.preemptions for record in engine.records) > 0
        return results

    plain = run(under_way=False)
    events = make_late(monkeypatch).events
    for overlapped in (run(under_way=False), run(under_way=True)):
        assert [result.tokens for result in overlapped] == [result.tokens for result in plain]
        assert [result.finish_reason for result in overlapped] == [result.finish_reason for result in plain]
        assert [len(result.logprobs) for result in overlapped] == [len(result.logprobs) for result in plain]
    assert events == ["launch", "land"] * (len(events) // 2)


def test_while_a_pass_is_under_way_requests_enter_and_their_pages_are_named(
    tiny_llama: LoadedModel, late: Late
) -> None:
    engine = bench(tiny_llama)
    coming = request(LONG)

    def see(_: Batch) -> None:
        names = [len(sequence.names) for sequence in engine.core._scheduler._queue]
        late.events.append(f"{engine.core.waiting} wait, pages named: {names}")

    late.landing = see
    engine.submit(request(PROMPT, max_tokens=2))

    def come() -> None:
        late.events.append("come")
        engine.submit(coming)

    engine.step(come)
    assert late.events == ["launch", "come", "land", "1 wait, pages named: [24]"]
    engine.step()
    assert [row.request_id for row in engine.records[1].rows][1:] == [coming.id], "of the next plan on"


def test_a_step_has_the_settings_of_its_beginning(tiny_llama: LoadedModel, late: Late) -> None:
    engine = bench(tiny_llama, default_settings(Proposer(max_depth=3)))
    later = default_settings(Proposer(max_depth=1)).model_copy(update={"generation": 7})
    (result,) = engine.submit(request(PROMPT, max_tokens=60, ignore_eos=True))
    for _ in range(10):
        engine.step()
    engine.step(lambda: engine.core.set_settings(later))
    while engine.core.busy:
        engine.step()
    assert {record.generation for record in engine.records[:11]} == {0}
    assert {record.generation for record in engine.records[11:]} == {7}
    assert max(row.depth for record in engine.records[:11] for row in record.rows) == 3
    assert max(row.depth for record in engine.records[11:] for row in record.rows) == 1
    assert result.tokens == reference(tiny_llama, PROMPT, 60, eos=False)


def test_a_refused_request_may_come_again_under_way(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)
    refused = request([3], grammar=regex_grammar("[ab]{3}"), deadline=time.monotonic() - 1)
    engine.core.submit(refused)
    end = engine.core.begin_step()
    again = request(PROMPT, max_tokens=3, ignore_eos=True)
    (result,) = engine.submit(replace(again, id=refused.id))
    assert [request_id for request_id, _ in end().failures] == [refused.id]
    while engine.core.busy:
        engine.step()
    assert result.tokens == reference(tiny_llama, PROMPT, 3, eos=False)


def test_a_request_that_is_cancelled_under_way_ends_with_the_next_step(
    tiny_llama: LoadedModel, late: Late
) -> None:
    engine = bench(tiny_llama)
    gone, ending = request(PROMPT, ignore_eos=True, speculation=NONE), request(OTHER, max_tokens=1)
    results = engine.submit(gone, ending)

    def cancel() -> None:
        for one in (gone, ending):
            engine.core.cancel(one.id)
        assert engine.core.pages.held > 0, "its keys and values are being written"

    engine.step(cancel)
    assert [len(result.tokens) for result in results] == [1, 1]
    assert results[1].finish_reason is FinishReason.LENGTH
    engine.step()
    assert not engine.core.busy
    assert engine.core.pages.held == 0


def test_the_pass_has_the_time_from_its_launch_until_it_is_there(tiny_llama: LoadedModel, late: Late) -> None:
    late.landing = lambda _: time.sleep(0.05)
    engine = bench(tiny_llama)
    engine.submit(request(PROMPT, max_tokens=1))
    began = time.monotonic()
    engine.step(lambda: time.sleep(0.05))
    (record,) = engine.records
    assert 0.1 < record.target_seconds < record.busy_seconds <= time.monotonic() - began


@pytest.mark.parametrize("error", [RuntimeError("odd"), torch.OutOfMemoryError("no memory")])
def test_a_pass_that_fails_under_way_fails_its_request_alone(
    tiny_llama: LoadedModel, late: Late, error: Exception
) -> None:
    late.landing = failing(error, holds_99)
    known = [[*p, *reference(tiny_llama, p, 32, eos=False)] for p in (PROMPT, OTHER)]
    reader = proposers.HiddenReader(known, (2,))
    engine = bench(tiny_llama, Proposer(max_depth=3), build=building(reader))
    good, bad, other = engine.run(
        request(PROMPT, ignore_eos=True), request([99, 3]), request(OTHER, ignore_eos=True)
    )
    assert type(bad.error) is EngineError
    assert [[*PROMPT, *good.tokens], [*OTHER, *other.tokens]] == known
    assert late.events[:8] == ["launch", "land"] * 4, "together, then each alone, one after the other"
    assert good.accepted > 0
    assert (engine.core.running, engine.core.pages.held) == (0, 0)


@dataclass
class Noting(FullDepth):
    """Notes the tokens of each step that it is told the time of, and of how many it is told the outcomes."""

    tokens: list[int] = field(default_factory=list)
    steps: int = 0

    def observe(self, _outcomes: Iterable[Outcome], /) -> None:
        self.steps += 1

    def time(self, tokens: int, _seconds: float, /) -> None:
        self.tokens.append(tokens)


def test_a_step_that_failed_or_read_a_text_is_no_measure_of_steps(
    tiny_llama: LoadedModel, late: Late
) -> None:
    rule = Noting()
    engine = bench(tiny_llama, depths=rule)
    engine.submit(request(PROMPT, ignore_eos=True), request(OTHER, ignore_eos=True))
    engine.step()
    assert (rule.tokens, rule.steps) == ([], 1), "it read two texts"
    engine.step()
    assert rule.tokens == [2]
    late.landing = failing(RuntimeError("odd"), lambda batch: len(batch.segments) > 1)
    engine.step()
    assert [len(record.rows) for record in engine.records] == [2, 2, 2], "each went on alone"
    assert rule.tokens == [2]
    late.landing = lambda _: None
    engine.step()
    assert (rule.tokens, rule.steps) == ([2, 2], 3)


def test_a_pass_that_cannot_be_launched_is_run_request_by_request(
    tiny_llama: LoadedModel, late: Late
) -> None:
    late.launching = failing(MemoryError(), lambda batch: len(batch.segments) > 1)
    results = bench(tiny_llama).run(request(PROMPT), request(OTHER))
    assert [result.tokens for result in results] == [reference(tiny_llama, p, 32) for p in (PROMPT, OTHER)]


@pytest.mark.parametrize("where", ["launching", "landing"])
def test_a_device_that_breaks_under_way_breaks_the_engine(
    tiny_llama: LoadedModel, late: Late, where: str
) -> None:
    setattr(late, where, failing(torch.AcceleratorError("device-side assert"), lambda _: True))
    engine = bench(tiny_llama)
    engine.submit(request(PROMPT), request(OTHER))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        engine.step()
    assert late.events.count("launch") == 1, "nothing is tried again"


def looped(engine: Bench, first: list[ToEngine], late: Late, under_way: list[list[ToEngine]]) -> list[ToApi]:
    """What a loop says that gets some messages at first, and others while its passes are under way."""
    inbox: queue.SimpleQueue[ToEngine] = queue.SimpleQueue()
    said: list[ToApi] = []

    def launching(_: Batch) -> None:
        for message in under_way.pop(0) if under_way else []:
            inbox.put(message)

    def say(message: ToApi) -> None:
        late.events.append("told")
        said.append(message)

    late.launching = launching
    for message in first:
        inbox.put(message)
    with pytest.raises(ValueError, match="started twice"):
        Loop(engine.core, inbox, say).run()
    return said


def steps_of(said: list[ToApi]) -> list[Stepped]:
    return [message for message in said if isinstance(message, Stepped)]


def test_the_loop_takes_messages_while_a_pass_is_under_way(tiny_llama: LoadedModel, late: Late) -> None:
    engine = bench(tiny_llama)
    first, second = request(PROMPT, max_tokens=4, speculation=NONE), request(OTHER, max_tokens=2)
    seen: list[tuple[int, int]] = []
    late.landing = lambda _: seen.append((engine.core.waiting, engine.core.settings.generation))
    settings = default_settings().model_copy(update={"generation": 5})
    messages: list[list[ToEngine]] = [
        [Submit(second), SetSettings(settings)],
        [Cancel(first.id)],
        [STOP],
    ]
    steps = steps_of(looped(engine, [Submit(first)], late, messages))
    assert seen == [(1, 5), (0, 5), (0, 5)]
    told = [[delta.request_id for delta in step.deltas] for step in steps]
    assert told == [[first.id], [first.id, second.id], [second.id]]
    generations = [step.record.generation for step in steps if step.record is not None]
    assert generations == [0, 5, 5]
    assert late.events == ["launch", "land", "told"] * 3, "told right after its step"


def test_what_cannot_be_taken_does_not_lose_the_step(tiny_llama: LoadedModel, late: Late) -> None:
    engine = bench(tiny_llama)
    asked = request(PROMPT, max_tokens=9)
    steps = steps_of(looped(engine, [Submit(asked)], late, [[STOP]]))
    assert [len(step.deltas) for step in steps] == [1]
    assert steps[0].deltas[0].tokens == reference(tiny_llama, PROMPT, 1)
