"""The suffix proposer in the engine: what is remembered, of whom, and for whom."""

from __future__ import annotations

import random
import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from outrider_serving.depth import FullDepth, Outcome
from outrider_serving.engine.types import SpeculationOverride
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Advanced, Began, Row
from outrider_serving.proposers.suffix import PIECE, SuffixProposer
from outrider_serving.sampling.grammar import regex_grammar
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import (
    Arm,
    Method,
    NgramSettings,
    PodSettings,
    Proposer,
    Scope,
    SuffixSettings,
    default_settings,
)
from outrider_serving.suffix.compiled import CompiledIndex
from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import Indexes, best_indexes, twin_indexes
from outrider_serving.suffix.lookup import SuffixIndex
from outrider_serving.suffix.twin import TwinIndex
from serving.engine.support import Bench, Result, bench, request
from serving.engine.test_broken import slow_grammars
from serving.engine.test_greedy import PROMPTS, TOKENS

SUFFIX = Proposer(method=Method.SUFFIX, max_depth=6)
PROMPT = PROMPTS[1]  # nothing recurs in it


def suffix(**settings: Any) -> Proposer:
    return SUFFIX.model_copy(update={"suffix": SuffixSettings(**settings)})


def ask(engine: Bench, prompt: list[int] = PROMPT, **how: Any) -> Result:
    (result,) = engine.run(request(prompt, max_tokens=TOKENS, ignore_eos=True, **how))
    return result


def replay(result: Result) -> list[tuple[int, int, int]]:
    return [(delta.proposed, delta.accepted, len(delta.tokens)) for delta in result.deltas]


def test_what_was_written_is_proposed_to_the_next_one(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    cold, warm = ask(engine), ask(engine)
    assert warm.tokens == cold.tokens
    assert warm.accepted > cold.accepted
    assert warm.steps <= 2 + TOKENS // 7
    assert engine.core.history.tokens >= TOKENS


def test_its_own_text_alone_where_the_settings_say_so(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, suffix(scopes=(Scope.REQUEST,)))
    assert replay(ask(engine)) == replay(ask(engine))
    assert engine.core.history.tokens == 0


def test_its_history_alone_where_the_settings_say_so(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, suffix(scopes=(Scope.HISTORY,)))
    repeated = [5, 6, 7, 8] * 3
    assert ask(engine, repeated).proposed == 0
    assert ask(engine, repeated).accepted > 0


@pytest.mark.parametrize("how", [{"private": True}, {"history": None}])
def test_what_is_not_to_be_remembered_is_not(tiny_llama: LoadedModel, how: dict[str, Any]) -> None:
    engine = bench(tiny_llama, SUFFIX)
    first = ask(engine, **how)
    assert engine.core.history.tokens == 0
    assert replay(ask(engine)) == replay(first)


def test_a_private_request_profits_from_history(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    cold = ask(engine)
    tokens = engine.core.history.tokens
    assert ask(engine, private=True).accepted > cold.accepted
    assert engine.core.history.tokens == tokens


@pytest.mark.parametrize("width", [1, 3])
def test_no_tenants_text_changes_anothers_proposals(tiny_llama: LoadedModel, width: int) -> None:
    """Replayed: the very same proposals, whether others have written the same before or not."""
    alone = bench(tiny_llama, suffix(width=width))
    expected = [replay(ask(alone, prompt, history="a")) for prompt in PROMPTS * 2]
    beside = bench(tiny_llama, suffix(width=width))
    found = []
    for prompt in PROMPTS * 2:
        for other in ("b", "", "A"):
            ask(beside, prompt, history=other)
        found.append(replay(ask(beside, prompt, history="a")))
        beside.core.learn("c", [prompt * 4], 0)
    assert found == expected
    assert sum(accepted for steps in expected for _, accepted, _ in steps) > 0


def test_how_much_is_accepted_is_told_apart_by_tenant_and_workload(tiny_llama: LoadedModel) -> None:
    """Else another's history would set how deep proposals go, and be known by that."""
    kinds: list[object] = []

    class Watched(FullDepth):
        def observe(self, outcomes: Iterable[Outcome], /) -> None:
            kinds.extend(outcome.kind for outcome in outcomes)

    engine = bench(tiny_llama, SUFFIX, depths=Watched())
    found = []
    for history, workload in (("a", "w"), ("b", "w"), (None, "w"), ("a", "v"), ("a", "w")):
        kinds.clear()
        wanted = request(PROMPT, max_tokens=TOKENS, ignore_eos=True, history=history)
        engine.run(replace(wanted, labels=replace(wanted.labels, workload=workload)))
        (kind,) = set(kinds)
        found.append(kind)
    assert found[0] == found[-1]
    assert len(set(found)) == 4


def test_what_others_have_learned_is_proposed(tiny_llama: LoadedModel) -> None:
    known = ask(bench(tiny_llama, SUFFIX)).tokens
    engine = bench(tiny_llama, SUFFIX)
    engine.core.tend()  # the proposer is loaded
    engine.core.learn("everybody", [known], 1000)
    assert ask(engine, private=True).accepted >= TOKENS - 5
    engine.core.erase(1000)
    assert ask(engine, private=True).accepted >= TOKENS - 5
    engine.core.erase(1001)
    assert ask(engine, private=True).accepted < TOKENS - 5


def test_what_was_purged_is_proposed_to_nobody(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    cold = ask(engine)
    ask(engine, history="other")
    engine.core.purge("everybody")
    assert replay(ask(engine)) == replay(cold)
    assert ask(engine, history="other").accepted > cold.accepted


def test_a_request_of_several_steps_is_remembered_when_cancelled(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    wanted = request(PROMPT, max_tokens=TOKENS, ignore_eos=True)
    (result,) = engine.submit(wanted)
    while len(result.tokens) < 12:
        engine.step()
    engine.core.cancel(wanted.id)
    engine.step()
    assert not engine.core.busy
    assert engine.core.history.tokens > 12


def test_what_runs_when_its_tenant_is_purged_is_not_remembered(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    (result,) = engine.submit(request(PROMPT, max_tokens=TOKENS, ignore_eos=True))
    engine.step()
    engine.core.purge("everybody")
    while not result.ended:
        engine.step()
    assert engine.core.history.tokens == 0
    ask(engine)
    assert engine.core.history.tokens > 0


@pytest.mark.parametrize("steps", [0, 1])
def test_nor_is_what_waits_for_its_grammar(
    tiny_llama: LoadedModel, steps: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whether it is compiled already, and only the next step would look, or waits for its turn."""
    slow_grammars(monkeypatch, 0.02)
    engine = bench(tiny_llama, SUFFIX)
    grammar = regex_grammar("[ab]{8,}")
    wanted = [request(PROMPT, max_tokens=TOKENS, ignore_eos=True, grammar=grammar) for _ in range(6)]
    results = engine.submit(*wanted)
    other = engine.submit(request(PROMPT, max_tokens=TOKENS, grammar=grammar, history="other"))
    for _ in range(steps):
        engine.step()
    engine.core.purge("everybody")
    while not all(result.ended for result in (*results, *other)):
        engine.step()
    assert {result.error for result in results} == {None}
    assert (engine.core.history.tenants, engine.core.history.tokens) == (1, len(other[0].tokens) + 1)


def test_what_is_too_old_is_forgotten(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    cold = ask(engine)
    engine.core.erase(int(time.time()) - 3600)
    assert ask(engine).accepted > cold.accepted
    engine.core.erase(int(time.time()) + 3600)
    assert replay(ask(engine)) == replay(cold)


def test_it_is_warm_when_it_comes_back(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX)
    prompts = PROMPT, [9, 8, 7]
    cold = [ask(engine, prompts[0])]
    engine.core.set_settings(default_settings(Proposer(method=Method.NONE)))
    cold.append(ask(engine, prompts[1]))
    engine.core.set_settings(default_settings(suffix(max_match=16)))
    warm = [ask(engine, prompt) for prompt in prompts]
    assert cold[1].proposed == 0
    assert warm[0].accepted > cold[0].accepted
    assert warm[1].accepted > 0, "what was written meanwhile is known too"


def test_two_arms_of_it_remember_once(tiny_llama: LoadedModel) -> None:
    arms = {name: Arm(proposer=suffix(max_match=most)) for name, most in (("first", 16), ("second", 32))}
    engine = bench(tiny_llama, PodSettings(generation=0, arms=arms, in_force="first"))
    ask(engine)
    assert engine.core.history.tokens == TOKENS + 1


def test_a_request_asks_for_it_by_itself(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, Proposer(method=Method.NGRAM, ngram=NgramSettings(min_match=9, max_match=9)))
    wish = SpeculationOverride(method=Method.SUFFIX, max_depth=6)
    cold, warm = ask(engine, speculation=wish), ask(engine, speculation=wish)
    assert warm.accepted > cold.accepted
    assert warm.tokens == cold.tokens


def test_it_goes_on_after_preemption(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, SUFFIX, pages=36, max_running=8)
    wanted = [request(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS]
    first = engine.run(*wanted)
    again = engine.run(*(request(prompt, max_tokens=TOKENS, ignore_eos=True) for prompt in PROMPTS))
    assert sum(record.preemptions for record in engine.records) > 0
    assert [result.tokens for result in again] == [result.tokens for result in first]
    assert sum(result.accepted for result in again) > sum(result.accepted for result in first)
    assert sum(record.proposer_failures for record in engine.records) == 0


LONG = random.Random(1).choices(range(5000), k=5 * PIECE)


class Spy:
    """A proposer by itself, and the indexes of its requests' texts."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, indexes: Indexes) -> None:
        self.made: list[Any] = []
        make = Indexes.text

        def text(indexes: Indexes, tokens: int) -> SuffixIndex:
            self.made.append(make(indexes, tokens))
            return self.made[-1]

        monkeypatch.setattr(Indexes, "text", text)
        self.history = History(indexes)
        self.proposer = SuffixProposer(SuffixSettings(min_probability=0), self.history)
        self.history.hold("the test", 100_000)

    def began(self, request_id: str, tokens: list[int]) -> Began:
        return Began(request_id, tuple(tokens), history="everybody")

    def wrote(self, request_id: str, *tokens: int) -> Advanced:
        return Advanced(request_id, 0, (), {}, (), tokens)

    def proposed(self, request_id: str) -> Proposal:
        anything: Any = None
        row = Row(request_id, 1, 8, 8, 0, 0, (), law=anything, noise=None, randomness=anything)
        (proposal,) = self.proposer.propose([row])
        return proposal

    @property
    def taken_in(self) -> list[int]:
        return [index.size.tokens for index in self.made]


@pytest.fixture(params=[best_indexes, twin_indexes])
def spy(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Spy:
    return Spy(monkeypatch, request.param())


def test_a_long_text_is_taken_in_by_pieces(spy: Spy) -> None:
    """Meanwhile its end is looked up in what is in, and in the history."""
    late, end = LONG[-PIECE : 8 - PIECE], LONG[100:120]
    spy.history.learn("everybody", [*end, 7001, 7002, 7003, 7004, 7005], 0)
    spy.history.learn("everybody", [*late, *range(8001, 8009)], 0)
    spy.proposer.observe([spy.began("r", LONG + end)])
    assert spy.taken_in == [PIECE]
    assert spy.proposed("r").source == "request"  # what follows `end` where it is in
    spy.proposer.observe([spy.wrote("r", 7001)])
    assert spy.taken_in == [2 * PIECE]
    assert spy.proposed("r").tokens == (7002, 7003, 7004, 7005)
    spy.proposer.observe([spy.wrote("r", *late)])
    assert spy.proposed("r").tokens == (*range(8001, 8009),)  # in the text it is not in yet
    for _ in range(3):
        spy.proposer.observe([spy.wrote("r")])
    (tokens,) = spy.taken_in
    assert tokens >= len(LONG) + len(end) + 1 + len(late)
    found = spy.proposed("r")
    assert (found.source, found.tokens) == ("request", tuple(LONG[8 - PIECE : 16 - PIECE]))
    spy.proposer.observe([spy.wrote("r", *LONG[8 - PIECE : 10 - PIECE])])
    assert spy.proposed("r").tokens == tuple(LONG[10 - PIECE : 18 - PIECE])
    spy.proposer.observe([spy.began("s", LONG + end), spy.wrote("s", 7001, 7002)])
    assert spy.proposed("s").tokens == (7003, 7004, 7005)


def test_texts_that_begin_together_share_a_piece_the_shortest_first(spy: Spy) -> None:
    texts = {str(n): LONG[n : n + length] for n, length in enumerate((PIECE, 50, PIECE // 2, PIECE))}
    spy.proposer.observe([*(spy.began(*text) for text in texts.items()), spy.wrote("3", 5)])
    assert spy.taken_in == [PIECE // 2 - 50, 51 - 1, PIECE // 2, 0]
    spy.proposer.observe([spy.wrote("1", 5)])
    assert spy.taken_in == [PIECE, 51, PIECE // 2, PIECE // 2 - 50]
    spy.proposer.observe([spy.wrote("1", 5)])
    assert spy.taken_in == [PIECE, 52, PIECE // 2, PIECE + 1]


def test_the_memory_of_texts_is_given_back(spy: Spy, monkeypatch: pytest.MonkeyPatch) -> None:
    gone = list[SuffixIndex]()
    for kind in (CompiledIndex, TwinIndex):
        monkeypatch.setattr(kind, "discard", lambda index: gone.append(index))
    spy.proposer.observe([spy.began("a", LONG), spy.began("b", PROMPT), spy.began("c", PROMPT)])
    spy.proposer.forget("a")
    assert gone == spy.made[:1]
    spy.proposer.observe([spy.began("b", PROMPT)])  # after a preemption
    assert gone == spy.made[:2]
    spy.proposer.close()
    assert {*gone} == {*spy.made}


def test_memory_that_is_given_back_is_looked_after_until_it_is(tiny_llama: LoadedModel) -> None:
    core = bench(tiny_llama, suffix(history_tokens=200_000)).core
    core.tend()  # the proposer is loaded
    core.learn("everybody", [range(n, n + 1000) for n in range(150)], 0)
    assert core.history.bytes > 4 << 20
    assert core.tend_in is None
    core.purge("everybody")
    until = time.monotonic() + 5.0
    while True:
        due = core.tend_in
        if not core.history.bytes:
            break
        assert due is not None  # what leaves gets less only
        assert due <= 0.1
        assert time.monotonic() < until
    assert core.tend_in is None
