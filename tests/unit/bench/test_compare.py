"""Interleaved pairs of two sides."""

import threading

import pytest

from outrider_serving.bench.compare import Equality, compare
from outrider_serving.bench.coverage import Coverage, Written
from outrider_serving.bench.pairs import LEAST_PAIRS, Rule
from outrider_serving.bench.results import BenchError, Difference, Run
from outrider_serving.bench.sides import alone, check_lengths
from outrider_serving.bench.workloads import Job, Workload
from unit.bench.made import DRAWN, JOB, MadeSide, run

RULE = Rule(half_width=0.03)


def test_each_side_prepares_and_warms_up_then_pairs_alternate() -> None:
    calls: list[str] = []
    a, b = MadeSide("a", lambda _: run(1.0), calls), MadeSide("b", lambda _: run(2.0), calls)
    compare(a, b, JOB, Rule(0.03, 2, 4))
    assert calls[:2] == ["prepare a", "prepare b"]
    assert "".join(calls[2:]) == "ab" + "abbaabba"


def test_each_thing_before_the_pairs_is_told_as_it_begins() -> None:
    told: list[str] = []
    a, b = MadeSide("a", lambda _: run(1.0), told), MadeSide("b", lambda _: run(2.0), told)
    compare(
        a,
        b,
        Job(Workload("agent", ("A prompt",), stored=("x", "y")), tokens=4),
        Rule(0.03, 2, 2),
        begins=told.append,
    )
    assert told[:4] == [
        "preparing: 2 earlier requests, side a",
        "prepare a",
        "preparing: 2 earlier requests, side b",
        "prepare b",
    ]
    assert told[4:8] == ["warming up, side a", "a", "warming up, side b", "b"]


def test_how_much_of_what_a_wrote_was_stored() -> None:
    stored = Written((1,), (99, *range(8, 18))), Written((2,), (3, 4))
    a = MadeSide("a", lambda _: run(1.0, tuple(range(20))), stored=stored)
    found = compare(a, MadeSide("b", lambda _: run(1.0)), JOB, RULE).coverage
    assert found == Coverage(tokens=20, covered=10, looked_up=0, verbatim=0)
    assert compare(MadeSide("b", lambda _: run(1.0)), a, JOB, RULE).coverage is None
    text = MadeSide("a", lambda _: run(1.0, "text"), stored=stored)
    assert compare(text, text, JOB, RULE).coverage is None


def test_the_ratio_is_of_a_to_b_and_the_warm_up_does_not_count() -> None:
    a = MadeSide("a", lambda n: run(1.0 if n else 50.0))
    b = MadeSide("b", lambda n: run(2.0 if n else 0.01))
    found = compare(a, b, JOB, RULE)
    assert found.estimate.ratio == pytest.approx(2)
    assert found.estimate.pairs == LEAST_PAIRS
    assert (found.a, found.b) == ("a", "b")
    assert [summary.speed for summary in found.summaries] == [4.0, 2.0]


def test_pairs_are_added_while_the_ratio_is_not_settled() -> None:
    a = MadeSide("a", lambda n: run(1.0 if n % 3 else 1.3))
    found = compare(a, MadeSide("b", lambda _: run(1.0)), JOB, RULE)
    assert LEAST_PAIRS < len(found.pairs) <= RULE.most


def test_the_same_outputs() -> None:
    found = compare(MadeSide("a", lambda _: run(1.0)), MadeSide("b", lambda _: run(1.0)), JOB, RULE)
    assert found.equality == Equality(pairs=LEAST_PAIRS, different=0, first=None)


def test_another_output_in_some_pairs() -> None:
    a = MadeSide("a", lambda n: run(1.0, (1, 2, 9, 9) if n > 6 else (1, 2, 3, 4)))
    found = compare(a, MadeSide("b", lambda _: run(1.0)), JOB, RULE)
    assert found.equality == Equality(pairs=LEAST_PAIRS, different=4, first=Difference(0, 2))


def test_outputs_that_are_drawn_anew_are_not_compared() -> None:
    found = compare(MadeSide("a", lambda _: run(1.0)), MadeSide("b", lambda _: run(1.0, "text")), DRAWN, RULE)
    assert found.equality is None


def test_runs_of_another_length_are_refused() -> None:
    short = run(1.0)
    assert check_lengths(short, JOB, "a") is short
    with pytest.raises(BenchError, match="a, workload open: request 0 gave 4 tokens, but 7 were asked for"):
        check_lengths(short, type(JOB)(JOB.workload, 7), "a")


def test_each_run_has_a_thread_that_ends_with_it() -> None:
    seen: list[threading.Thread] = []

    def note(_: int) -> Run:
        seen.append(threading.current_thread())
        return run(1.0)

    compare(MadeSide("a", note), MadeSide("b", note), JOB, Rule(0.03, 2, 2))
    assert len(set(seen)) == len(seen) == 6
    assert not any(thread.is_alive() for thread in seen)
    assert threading.main_thread() not in seen


def test_what_a_run_raises_comes_out() -> None:
    def fail() -> None:
        raise BenchError("no")

    with pytest.raises(BenchError, match="no"):
        alone(fail)
