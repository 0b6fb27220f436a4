"""Workloads by name."""

import re

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.bench.workloads import MOST_STREAMS, Sampling, parse_workload, prompt

PROMPTS = st.sampled_from(["open", "repeat", "code"])


@given(PROMPTS)
def test_one_stream_of_a_prompt(name: str) -> None:
    assert parse_workload(name).prompts == (prompt(name),)


@given(PROMPTS, st.integers(1, MOST_STREAMS))
def test_several_streams_of_a_prompt(name: str, streams: int) -> None:
    assert parse_workload(f"{name}:{streams}").prompts == (prompt(name),) * streams


@given(st.integers(1, MOST_STREAMS))
def test_a_batch_takes_open_and_repeat_in_turn(streams: int) -> None:
    found = parse_workload(f"batch{streams}").prompts
    assert len(found) == streams
    assert all(text == prompt(["open", "repeat"][n % 2]) for n, text in enumerate(found))


@pytest.mark.parametrize(
    "name", ["", "opens", "open:0", "open:08", "open:", "batch", "batch0", "batch8x", "٣"]
)
def test_other_names_are_refused_with_what_is_allowed(name: str) -> None:
    with pytest.raises(ValueError, match=re.escape(f"{name!r} is not a workload: open, repeat or code")):
        parse_workload(name)


@pytest.mark.parametrize("name", ["agent", "agent-cold", "agent-again", "agent-unlike"])
def test_what_agents_ask(name: str) -> None:
    one, several = parse_workload(name), parse_workload(f"{name}:4")
    assert (one.streams, several.streams) == (1, 4)
    assert one.prompts == several.prompts
    assert len(one.prompts) >= 12
    assert bool(one.stored) == (name != "agent-cold")
    again = set(one.prompts) & set(one.stored)
    assert again == (set(one.prompts) if name == "agent-again" else set())


def test_agents_have_so_many_prompts() -> None:
    with pytest.raises(ValueError, match=r"'agent:99' has 99 streams, but there are \d+ prompts"):
        parse_workload("agent:99")


def test_too_many_streams_are_refused() -> None:
    with pytest.raises(ValueError, match=f"9999 streams: at most {MOST_STREAMS}"):
        parse_workload("open:9999")


def test_repeat_and_code_begin_again_what_they_have_shown() -> None:
    words = prompt("repeat").split("List:")
    assert words[1] == words[2]
    assert words[3] == ""
    code, again = prompt("code").split("\n\n# The same code again:\n")
    assert (len(code), len(again)) == (1800, 200)
    assert code.startswith(again)


def test_each_stream_has_a_seed_of_its_own() -> None:
    assert [Sampling(1.0, seed=5).seed_of(n) for n in range(3)] == [5, 6, 7]
    assert Sampling(1.0).seed_of(0) is None


def test_what_repeats() -> None:
    assert Sampling().repeats
    assert Sampling(0.7, seed=0).repeats
    assert not Sampling(0.7).repeats
