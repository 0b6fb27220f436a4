"""Prompts as agents send them."""

import re
from collections import Counter
from difflib import SequenceMatcher
from string import Template

import pytest

from outrider_serving.bench import agent
from outrider_serving.bench.agent import AgentWorkload, agent_workload
from outrider_serving.bench.agent_templates import FAMILIES

SEEDS = pytest.mark.parametrize("seed", [0, 1, 2, 11, 987_654])


@pytest.fixture(scope="module")
def made() -> AgentWorkload:
    return agent_workload()


def test_the_sets_have_the_sizes_that_are_asked_for(made: AgentWorkload) -> None:
    assert len(made.stored) == len(FAMILIES) * 3 * 3
    assert len(made.measured) == len(made.retried) == len(FAMILIES) * 3
    other = agent_workload(documents=2, stored=4, measured=2)
    assert len(other.stored) == len(FAMILIES) * 2 * 4
    assert len(other.measured) == len(other.retried) == len(FAMILIES) * 2 * 2


def test_the_same_seed_gives_the_same_and_another_one_something_else(made: AgentWorkload) -> None:
    assert agent_workload() == made
    other = agent_workload(seed=3)
    assert not {prompt.text for prompt in other.measured} & {prompt.text for prompt in made.measured}


@SEEDS
def test_no_text_is_twice_and_no_measured_one_was_stored(seed: int) -> None:
    made = agent_workload(seed, measured=2)
    texts = [prompt.text for prompt in (*made.stored, *made.measured)] + list(made.unlike)
    assert len(set(texts)) == len(texts)
    assert not [one for one in made.measured if any(one.text in other.text for other in made.stored)]


def test_no_text_comes_back_where_there_are_few(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(agent, "POOLS", {slot: pool[:6] for slot, pool in agent.POOLS.items()})
    made = agent_workload(documents=2, stored=30, measured=5)
    texts = [prompt.text for prompt in (*made.stored, *made.measured)]
    assert len(set(texts)) == len(texts)


@SEEDS
def test_retries_are_stored_prompts_verbatim_and_each_another_one(seed: int) -> None:
    made = agent_workload(seed, measured=2)
    assert set(made.retried) <= set(made.stored)
    assert len(set(made.retried)) == len(made.retried)


@SEEDS
def test_each_revision_is_a_small_edit_of_the_one_before(seed: int) -> None:
    made = agent_workload(seed)
    texts = {(one.family, one.document, one.revision): one.text for one in (*made.stored, *made.measured)}
    likenesses = []
    for (family, document, revision), text in texts.items():
        if revision:
            before = texts[family, document, revision - 1]
            assert text != before
            likenesses.append(SequenceMatcher(None, before, text, autojunk=False).ratio())
    assert min(likenesses) > 0.4
    assert sum(likenesses) / len(likenesses) > 0.75


def test_measured_ones_are_the_later_revisions(made: AgentWorkload) -> None:
    assert {one.revision for one in made.stored} == {0, 1, 2}
    assert {one.revision for one in made.measured} == {3}


def test_families_take_turns(made: AgentWorkload) -> None:
    for prompts in (made.measured, made.retried):
        for start in range(0, len(prompts), len(FAMILIES)):
            turn = [prompt.family for prompt in prompts[start : start + len(FAMILIES)]]
            assert sorted(turn) == sorted(FAMILIES)
    assert [one.family for one in made.measured[: len(FAMILIES)]] != list(FAMILIES)


def test_there_are_calls_edits_retries_and_facts(made: AgentWorkload) -> None:
    kinds = Counter(prompt.kind for prompt in made.measured)
    assert set(kinds) == {"call", "edit", "retry", "facts"}
    assert min(kinds.values()) >= 6


@SEEDS
def test_edits_rename_add_functions_and_take_them_out(seed: int) -> None:
    made = sorted(agent_workload(seed, documents=1, stored=16).stored, key=lambda one: one.revision)
    tables = [one.text for one in made if one.family == "table"]
    assert len({re.findall(r"class (\w+)\(Base\)", text)[0] for text in tables}) > 1
    functions = [text.count("def ") for text in tables]
    assert set(functions) == {0, 1, 2}
    assert 0 in functions[functions.index(2) :]


def test_nothing_is_left_to_fill_in(made: AgentWorkload) -> None:
    for prompt in (*made.stored, *made.measured):
        assert not Template(prompt.text).get_identifiers()


@pytest.mark.parametrize(
    "numbers",
    [
        {"documents": 0},
        {"stored": 0},
        {"measured": 0},
        {"stored": 1, "measured": 2},
    ],
)
def test_other_numbers_are_refused(numbers: dict[str, int]) -> None:
    with pytest.raises(ValueError, match="at least 1 of each, and no more measured than stored"):
        agent_workload(**numbers)
