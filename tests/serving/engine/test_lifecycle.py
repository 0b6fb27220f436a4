"""Requests that are cancelled, late, refused or fail; an engine that is fed with settings, or broken."""

from __future__ import annotations

import gc
import tracemalloc
from dataclasses import replace

import pytest
import torch

from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.runner import ModelRunner, Pass
from outrider_serving.engine.types import DeadlineError, EngineError, QueueFullError
from outrider_serving.models.loading import LoadedModel
from outrider_serving.sampling.grammar import regex_grammar
from outrider_serving.settings import Arm, Method, NgramSettings, PodSettings, Proposer, default_settings
from serving.engine import proposers
from serving.engine.support import LONG, NONE, Bench, bench, building, reference, request

PROMPT = [5, 6, 7, 8] * 4


def settings(method: Method, generation: int = 1) -> PodSettings:
    return PodSettings(
        generation=generation, arms={"stable": Arm(proposer=Proposer(method=method))}, in_force="stable"
    )


def empty(engine: Bench) -> bool:
    """Nothing of any request is left: no place, no held page."""
    core = engine.core
    core.step()
    pages = core.pages
    return (core.running, core.waiting, core.busy, pages.held) == (0, 0, False, 0)


def test_cancelling_in_the_middle_of_a_verification_run_frees_everything(tiny: LoadedModel) -> None:
    known = [[*PROMPT, *reference(tiny, PROMPT, 40, eos=False)]]
    engine = bench(tiny, Proposer(max_depth=4), build=building(proposers.Bushy(known)))
    wanted = [request(PROMPT, max_tokens=40, ignore_eos=True) for _ in range(3)]
    results = engine.submit(*wanted)
    for _ in range(3):
        engine.step()
    engine.core.cancel(wanted[1].id)
    while engine.core.busy:
        engine.step()
    assert [len(result.tokens) for result in results] == [40, len(results[1].tokens), 40]
    assert len(results[1].tokens) < 40
    assert [list(result.tokens) == known[0][16:] for result in results] == [True, False, True]
    assert empty(engine)


def test_cancelling_what_waits_or_has_ended_or_never_was(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, max_running=1)
    wanted = [request(PROMPT, max_tokens=5) for _ in range(3)]
    results = engine.submit(*wanted)
    engine.step()
    engine.core.cancel(wanted[2].id)
    engine.core.cancel("nobody")
    while engine.core.busy:
        engine.step()
    engine.core.cancel(wanted[0].id)
    assert [len(result.tokens) for result in results] == [5, 5, 0]
    assert empty(engine)


def test_a_request_whose_grammar_is_being_compiled_can_be_cancelled(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)
    one = request(PROMPT, grammar=regex_grammar("[ab]{3}"))
    engine.submit(one)
    engine.core.cancel(one.id)
    assert empty(engine)


def test_a_deadline_ends_a_request_whether_it_waits_or_runs(tiny_llama: LoadedModel) -> None:
    now = 0.0
    engine = bench(tiny_llama, max_running=1, clock=lambda: now)
    running, waiting, fine = engine.submit(
        request(PROMPT, max_tokens=100, ignore_eos=True, deadline=5.0),
        request(PROMPT, deadline=2.0),
        request(PROMPT, max_tokens=4),
    )
    for _ in range(10):
        engine.step()
        now += 1
    while engine.core.busy:
        engine.step()
    assert isinstance(running.error, DeadlineError)
    assert isinstance(waiting.error, DeadlineError)
    assert 0 < len(running.tokens) < 100
    assert waiting.tokens == ()
    assert len(fine.tokens) == 4
    assert empty(engine)


def test_a_full_queue_refuses_and_recovers(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, max_waiting=2, max_running=3)
    results = engine.submit(*(request(PROMPT, max_tokens=4) for _ in range(5)))
    with pytest.raises(QueueFullError, match=r"^2 requests are waiting, which is the limit \(2\)") as refused:
        engine.submit(request(PROMPT))
    assert refused.value.retry_after >= 1
    while engine.core.busy:
        engine.step()
    assert all(len(result.tokens) == 4 for result in results)
    assert len(engine.run(request(PROMPT, max_tokens=4))[0].tokens) == 4


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
    engine = bench(tiny_llama)
    with pytest.raises(ValueError, match=message):
        engine.submit(request(prompt, max_tokens=max_tokens))
    assert empty(engine)


def test_an_id_that_is_taken_is_refused(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)
    one = request(PROMPT)
    engine.submit(one)
    with pytest.raises(ValueError, match="there is a request"):
        engine.core.submit(one)


def test_warm_up_generates_and_leaves_nothing(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)
    engine.core.warm_up()
    assert empty(engine)
    assert engine.core.pages.cached == 0


def test_warm_up_says_when_nothing_can_be_generated(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ModelRunner, "run", failing(torch.OutOfMemoryError("no memory")))
    with pytest.raises(EngineError, match="OutOfMemoryError"):
        bench(tiny_llama).core.warm_up()


def failing(error: Exception) -> object:
    def fail(*_: object, **__: object) -> None:
        raise error

    return fail


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("no memory"), RuntimeError("odd"), MemoryError()])
def test_a_target_pass_that_fails_fails_its_request_alone(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, error: Exception
) -> None:
    original = ModelRunner.run

    def sometimes(self: ModelRunner, batch: Batch, layers: list[int]) -> Pass:
        if bool(((batch.ids == 99) & (batch.positions == 0)).any()):
            raise error
        return original(self, batch, layers)

    known = [[*prompt, *reference(tiny_llama, prompt, 32, eos=False)] for prompt in (PROMPT, PROMPT[1:])]
    monkeypatch.setattr(ModelRunner, "run", sometimes)
    reader = proposers.HiddenReader(known, (2,))
    engine = bench(tiny_llama, Proposer(max_depth=3), build=building(reader))
    good, bad, other = engine.run(
        request(PROMPT, ignore_eos=True),
        request([99, 3]),
        request(PROMPT[1:], ignore_eos=True, logprobs=0),
    )
    assert type(bad.error) is EngineError
    assert [[*PROMPT, *good.tokens], [*PROMPT[1:], *other.tokens]] == known
    assert good.accepted > 0
    assert all(len(delta.logprobs) == len(delta.tokens) for delta in other.deltas)
    assert [row.finished for record in engine.records for row in record.rows if row.failed] == [True]
    assert empty(engine)


def test_a_broken_device_breaks_the_engine(tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelRunner, "run", failing(torch.AcceleratorError("device-side assert")))
    with pytest.raises(torch.AcceleratorError, match="device-side assert"):
        bench(tiny_llama).run(request(PROMPT))


@pytest.mark.parametrize(
    "where",
    ["propose", "observe", "forget", "load", "count", "tree", "build", "observe close", "forget close"],
)
def test_a_proposer_that_is_broken_fails_no_request(tiny_llama: LoadedModel, where: str) -> None:
    class Broken(proposers.Raising):
        def propose(self, rows: object) -> list[proposers.Proposal]:
            found = super().propose(rows)  # type: ignore[arg-type]
            if where == "count":
                return []
            return [proposers.Proposal((5,), (4,)) for _ in found] if where == "tree" else found

    def build(asked: Proposer) -> Broken | None:
        if asked.method is Method.NONE:
            return None
        if where == "build":
            raise RuntimeError("no such file")
        return Broken([], lambda name, _: name in where.split())

    engine = bench(tiny_llama, build=build)
    results = engine.run(request(PROMPT), request(PROMPT, speculation=NONE), request(PROMPT[1:]))
    assert results[0].tokens == results[1].tokens == reference(tiny_llama, PROMPT, 32)
    assert results[2].tokens == reference(tiny_llama, PROMPT[1:], 32)
    if "forget" not in where:  # which is after the last step
        assert sum(record.proposer_failures for record in engine.records) > 0
    assert empty(engine)


def test_a_proposer_that_raises_when_it_is_closed_fails_no_request(tiny_llama: LoadedModel) -> None:
    broken = proposers.Raising([], lambda name, _: name == "close")
    engine = bench(tiny_llama, build=building(broken))
    (result,) = engine.submit(request(PROMPT))
    engine.step()
    engine.core.set_settings(settings(Method.NONE))
    engine.core.set_settings(default_settings(Proposer(ngram=NgramSettings(min_match=3))))
    while engine.core.busy:
        engine.step()
    assert result.tokens == reference(tiny_llama, PROMPT, 32)
    assert broken.calls["close"] == 1
    assert sum(record.proposer_failures for record in engine.records) == 1
    engine.core.close()


def test_a_load_that_raises_is_not_closed(tiny_llama: LoadedModel) -> None:
    broken = proposers.Raising([], lambda name, _: name == "load")
    engine = bench(tiny_llama, build=building(broken))
    engine.run(request(PROMPT))
    engine.core.close()
    assert "close" not in broken.calls


def test_a_proposer_that_cannot_be_loaded_is_tried_again_after_pauses_that_double(
    tiny_llama: LoadedModel,
) -> None:
    now, tries, broken = 0.0, [], True

    def build(_: Proposer) -> proposers.Oracle:
        tries.append(now)
        if broken:
            raise RuntimeError("no such file")
        return proposers.Oracle([])

    engine = bench(tiny_llama, build=build, clock=lambda: now)

    def pass_time(seconds: int, proposer: Proposer) -> None:
        nonlocal now
        engine.core.set_settings(default_settings(proposer))
        for _ in range(seconds):
            engine.step()
            now += 1

    pass_time(200, Proposer())
    assert tries == [0, 1, 3, 7, 15, 31, 63, 127, 191]
    assert engine.core.proposer_trouble == "proposer ngram failed: no such file"
    pass_time(1, Proposer(ngram=NgramSettings(max_match=9)))
    assert tries[-1] == 200  # other settings are tried at once
    broken = False
    pass_time(3, Proposer(ngram=NgramSettings(max_match=9)))
    assert len(tries) == 11
    assert engine.core.proposer_trouble is None


def test_a_proposer_is_switched_while_requests_run(tiny_gemma3: LoadedModel) -> None:
    """The proposer that is loaded in the middle knows the text so far; records say what was in force."""
    prompt = [9, 10, 11] * 5
    engine = bench(tiny_gemma3, settings(Method.NONE))

    def between() -> None:
        if len(engine.records) == 10:
            engine.core.set_settings(settings(Method.NGRAM, 7))

    (result,) = engine.run(request(prompt, max_tokens=60, ignore_eos=True), between=between)
    assert result.tokens == reference(tiny_gemma3, prompt, 60, eos=False)
    assert {record.generation for record in engine.records[:10]} == {1}
    assert {record.generation for record in engine.records[10:]} == {7}
    assert not any(row.proposed for record in engine.records[:10] for row in record.rows)
    assert engine.records[10].rows[0].proposed > 0
    assert sum(row.accepted for record in engine.records[10:] for row in record.rows) > 0


def test_a_proposer_is_loaded_anew_for_other_settings_but_not_for_another_depth(
    tiny_llama: LoadedModel,
) -> None:
    built: list[Proposer] = []

    def build(asked: Proposer) -> proposers.Raising:
        built.append(asked)
        return proposers.Raising([], lambda *_: False)

    engine = bench(tiny_llama, Proposer(max_depth=2), build=build)
    for proposer in (Proposer(max_depth=9), Proposer(ngram=NgramSettings(max_match=9))):
        engine.run(request(PROMPT))
        engine.core.set_settings(default_settings(proposer))
    engine.run(request(PROMPT))
    assert [asked.ngram for asked in built] == [None, NgramSettings(max_match=9)]


def test_records_add_up_to_what_was_told(tiny_gemma3: LoadedModel) -> None:
    engine = bench(tiny_gemma3)
    results = engine.run(*(request([n + 3, 4] * 100, max_tokens=20 + n) for n in range(5)))
    rows = [row for record in engine.records for row in record.rows]
    assert sum(row.committed for row in rows) == sum(len(result.tokens) for result in results)
    assert sum(row.proposed for row in rows) == sum(result.proposed for result in results)
    assert sum(row.accepted for row in rows) == sum(result.accepted for result in results) > 0
    assert sum(row.finished for row in rows) == 5
    assert engine.core.pages.total == 256
    for record in engine.records:
        assert sum(record.accepted_by_position) == sum(row.accepted for row in record.rows)
        assert sum(record.proposed_by_position) == sum(row.depth for row in record.rows)
        assert record.tokens == sum(row.tokens for row in record.rows) <= 256
        assert record.busy_seconds > 0


def test_a_long_prompt_is_read_in_parts_between_the_steps_of_others(tiny_llama: LoadedModel) -> None:
    roomy = replace(tiny_llama, context_length=4096)
    engine = bench(roomy, pages=600, step_tokens=64)
    engine.submit(request(PROMPT, max_tokens=300, ignore_eos=True, speculation=NONE))
    engine.step()
    engine.run(request([3] * 1500, max_tokens=1, speculation=NONE))
    shared = [record for record in engine.records if len(record.rows) == 2]
    assert len(shared) == 24
    assert all(record.rows[0].committed == 1 for record in shared)


def test_tenants_share_equally_while_both_wait(tiny_llama: LoadedModel) -> None:
    """One tenant sends ten times as much; until the other's last request ends, both get the same."""
    engine = bench(tiny_llama, max_running=4)
    many = engine.submit(*(request(PROMPT, tenant="many", max_tokens=8) for _ in range(100)))
    few = engine.submit(*(request(PROMPT[:-1], tenant="few", max_tokens=8) for _ in range(10)))
    while not all(result.ended for result in few):
        engine.step()
    served = [sum(result.ended for result in results) for results in (many, few)]
    assert served[1] == 10
    assert abs(served[0] - served[1]) <= 4
    while engine.core.busy:
        engine.step()
    assert all(result.ended for result in many)


def test_tenants_and_private_requests_share_no_pages(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)

    def reused(**who: object) -> int:
        (result,) = engine.run(request(PROMPT, max_tokens=4, ignore_eos=True, **who))  # type: ignore[arg-type]
        return result.deltas[0].reused

    assert [reused(tenant="a"), reused(tenant="a"), reused(tenant="b")] == [0, 12, 0]
    assert [reused(tenant="c", private=True), reused(tenant="c", private=True), reused(tenant="c")] == [
        0,
        0,
        0,
    ]
    cached = engine.core.pages.cached
    group = [
        request(PROMPT, max_tokens=4, private=True, group="g", choice=n, ignore_eos=True) for n in range(3)
    ]
    results = engine.run(*group)
    assert [result.deltas[0].reused for result in results] == [0, 12, 12]
    assert engine.core.pages.cached <= cached  # nothing outlives them


def test_thousands_of_requests_leave_nothing_behind(tiny_llama: LoadedModel) -> None:
    """Memory, pages and entries stay as they were."""
    engine = bench(tiny_llama, max_running=32)
    many = 5000 if LONG else 1000

    def round_of(count: int) -> int:
        for start in range(0, count, 100):
            wanted = [
                request([n % 50 + 2, n % 7 + 2, 5], max_tokens=3, temperature=n % 2, frequency_penalty=n % 3)
                for n in range(start, start + 100)
            ]
            engine.submit(*wanted)
            for one in wanted[::10]:
                engine.core.cancel(one.id)
            while engine.core.busy:
                engine.step()
        engine.results.clear()
        engine.records.clear()
        gc.collect()
        return tracemalloc.get_traced_memory()[0]

    tracemalloc.start()
    try:
        before = round_of(300)
        after = round_of(many)
    finally:
        tracemalloc.stop()
    assert after - before < 200_000
    assert empty(engine)
