"""How deep to propose: by measured times and acceptance, tried again within a budget."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from itertools import product

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.depth import MAX_KINDS, PROBES, MeasuredDepth, Outcome, Row
from outrider_serving.step_times import StepTimes

KIND = "ngram"


class World:
    """Steps of a given time, and rows whose proposed tokens are each accepted with a given chance."""

    def __init__(
        self,
        seconds: Callable[[int], float],
        chances: list[float],
        longest: int = 8,
        ready: float = 1.0,
        others: int = 0,  # rows that never propose
    ) -> None:
        self.rule = MeasuredDepth()
        self.seconds = seconds
        self.chances = chances
        self.ready = ready
        self.others = others
        self.rows = [Row(str(n), KIND, longest) for n in range(len(chances))]
        self.rng = random.Random(1)
        self.time = 0.0
        self.committed = 0

    def step(self) -> dict[str, int]:
        depths = dict.fromkeys((row.request_id for row in self.rows), 0)
        if not self.rule.rests:
            depths |= self.rule.choose(self.rows, len(self.rows) + self.others)
        outcomes = []
        for row, chance in zip(self.rows, self.chances, strict=True):
            asked, accepted = depths[row.request_id] > 0, 0
            if self.ready < 1 and self.rng.random() >= self.ready:
                depths[row.request_id] = 0
            while accepted < depths[row.request_id] and self.rng.random() < chance:
                accepted += 1
            self.committed += accepted + 1
            if asked:
                outcomes.append(Outcome(row.request_id, KIND, depths[row.request_id], accepted))
        self.committed += self.others
        tokens = len(self.rows) + self.others + sum(depths.values())
        took = self.seconds(tokens)
        self.time += took
        self.rule.observe(outcomes)
        self.rule.time(tokens, took)
        return depths

    def rate(self, steps: int) -> float:
        """Committed tokens a second over the next steps."""
        committed, time = self.committed, self.time
        for _ in range(steps):
            self.step()
        return (self.committed - committed) / (self.time - time)


def flat(_: int) -> float:
    return 0.014


def memory_bound(tokens: int) -> float:
    """As measured on two cores: what it takes to read the weights, until there is more to compute."""
    return max(0.014, 0.004 + 0.001 * tokens)


def dear(tokens: int) -> float:
    return 0.001 * tokens


def best(world: World) -> float:
    """The best rate that one depth for all rows gives in expectation."""
    rates = []
    for depth in range(9):
        tokens = len(world.rows) * (1 + depth)
        commits = sum(sum(chance**k for k in range(depth + 1)) for chance in world.chances)
        rates.append(commits / world.seconds(tokens))
    return max(rates)


@pytest.mark.parametrize(("chance", "rows"), product([0.05, 0.4, 0.8, 0.97], [1, 8, 32]))
@pytest.mark.parametrize("seconds", [flat, memory_bound, dear])
def test_it_comes_near_the_best_depth(chance: float, rows: int, seconds: Callable[[int], float]) -> None:
    world = World(seconds, [chance] * rows)
    world.rate(100)
    assert world.rate(600) > 0.93 * best(world)


@pytest.mark.parametrize("seconds", [flat, memory_bound, dear])
def test_it_is_never_much_slower_than_no_proposals(seconds: Callable[[int], float]) -> None:
    """From the first step on, with nothing accepted."""
    world = World(seconds, [0.0] * 32)
    assert world.rate(1000) > 0.97 * 32 / seconds(32)


@pytest.mark.parametrize("seconds", [flat, memory_bound, dear])
@pytest.mark.parametrize("rows", [1, 8, 32])
def test_rows_that_seldom_propose_anything_are_not_counted_on(
    seconds: Callable[[int], float], rows: int
) -> None:
    world = World(seconds, [0.3] * rows, ready=0.1)
    assert world.rate(1000) > 0.97 * rows / seconds(rows)


def test_rows_get_what_they_are_worth() -> None:
    world = World(memory_bound, [0.05] * 7 + [0.97])
    world.rate(200)
    steps = [world.step() for _ in range(50)]
    best = sum(depths["7"] for depths in steps)
    assert best >= 4 * 50  # 0.97 ** 5 is what a token of any row is worth in that time
    assert sum(sum(depths.values()) for depths in steps) - best <= 50


@pytest.mark.parametrize("seconds", [flat, memory_bound, dear])
@pytest.mark.parametrize("others", [7, 31])
def test_rows_that_cannot_propose_are_not_kept_waiting(seconds: Callable[[int], float], others: int) -> None:
    world = World(seconds, [0.8], others=others)
    assert world.rate(2000) > 0.97 * (others + 1) / seconds(others + 1)


def test_what_begins_anew_puts_no_other_to_rest() -> None:
    world = World(flat, [0.9, 0.9])
    world.rate(100)
    last = Row("0", KIND, 0)  # before its last token it has nothing to propose
    assert world.rule.choose([last], 2, True) == {"0": 0}
    assert not world.rule.rests


def test_what_is_known_of_a_kind_of_proposals_says_nothing_of_another() -> None:
    world = World(lambda tokens: 0.014 + 0.002 * tokens, [0.0])
    world.rate(300)
    assert world.rule.choose(world.rows, 1)["0"] == 0
    assert world.rule.choose([Row("0", "suffix", 8)], 1)["0"] > 0


def test_of_kinds_those_with_the_latest_outcomes_are_known() -> None:
    rule = MeasuredDepth()
    for number in range(2 * MAX_KINDS):
        rule.observe([Outcome("0", ("mine", 0), 8, 8), Outcome("1", ("other", number), 8, 0)])
    assert len(rule._kinds) == MAX_KINDS
    for size in (1, 8):
        rule.time(size, 0.014 + 0.001 * size)
    known, unknown = (rule.choose([Row("2", kind, 8)], 1)["2"] for kind in (("mine", 0), ("new", 0)))
    assert known > unknown > 0


def test_tries_that_found_nothing_to_propose_hardly_lengthen_the_rest() -> None:
    world = World(memory_bound, [0.0] * 4)
    world.rate(500)
    world.chances, world.ready = [0.97] * 4, 0.3
    steps = next(n for n in range(1000) if sum(world.step().values()) > 8)
    assert steps < 60


def test_outcomes_count_where_times_do_not() -> None:
    """While texts are read beside, step after step."""
    world = World(memory_bound, [0.9])
    world.rate(50)
    for _ in range(30):
        if not world.rule.rests:
            depth = world.rule.choose(world.rows, 1)["0"]
        world.rule.observe([Outcome("0", KIND, depth, 0)] if depth else [])
    assert world.rule.rests or world.rule.choose(world.rows, 1)["0"] == 0


def test_a_row_that_becomes_worth_it_is_found() -> None:
    world = World(memory_bound, [0.0] * 16)
    world.rate(300)
    world.chances = [0.98] * 16
    world.rate(1500)
    assert world.rate(300) > 0.85 * best(world)


def test_tries_stay_within_their_budget() -> None:
    """Beyond the marginal cost of what pays: in a dear world nothing pays at such a chance."""
    world = World(dear, [0.01] * 16)
    world.rate(300)
    extra = steps = 0.0
    for _ in range(2000):
        extra += dear(16 + sum(world.step().values())) - dear(16)
        steps += dear(16)
    assert 0 < extra < 1.5 * PROBES * steps


def test_a_single_slow_step_does_not_decide() -> None:
    world = World(memory_bound, [0.8])
    world.rate(200)
    before = world.step()["0"]
    tokens = 1 + before
    world.rule.time(tokens, 2.0)
    assert world.step()["0"] >= before - 2


@pytest.mark.parametrize("disturbed", [9, 5])
def test_a_first_time_that_was_disturbed_does_not_decide_for_long(disturbed: int) -> None:
    world = World(flat, [0.98])
    for tokens in range(1, disturbed):
        world.rule.time(tokens, flat(tokens))
    world.rule.time(disturbed, 2 * flat(disturbed))
    assert world.step()["0"] < disturbed - 1
    world.rate(12)
    assert world.step()["0"] == 8


def test_a_step_that_takes_long_indeed_is_hardly_tried_again() -> None:
    tried: list[int] = []

    def cliff(tokens: int) -> float:
        tried.append(tokens)
        return 0.014 if tokens < 6 else 0.05

    world = World(cliff, [0.98])
    world.rate(400)
    assert sum(tokens > 5 for tokens in tried) < 8
    world.rate(400)
    assert sum(tokens > 5 for tokens in tried) < 10


def test_a_machine_that_is_quiet_again_is_found_to_be() -> None:
    """Else tries would seem to take more than the time that they may: steps of other sizes were slow then."""
    load = 4.0
    world = World(lambda tokens: memory_bound(tokens) * load, [0.0])
    world.rate(300)
    load, world.chances = 1.0, [0.97]
    assert next(n for n in range(1000) if world.step()["0"] > 4) < 40


@pytest.mark.parametrize("disturbed", [4, 14, 20])
def test_a_size_that_is_measured_all_the_time_is_known_whatever_its_neighbours_took(disturbed: int) -> None:
    times, slow = StepTimes(), 0.022 if disturbed < 16 else 0.012
    for step in range(200):
        times.observe(16, 0.018)
        if step in (120, 121):
            times.observe(disturbed, slow)
    assert times.of(np.array([16.0]))[0] == pytest.approx(0.018, rel=0.03)


@pytest.mark.parametrize("seconds", [lambda _: 0.0, lambda tokens: 0.0 if tokens < 4 else 1e-9])
def test_steps_that_a_coarse_clock_takes_for_nothing_are_no_error(seconds: Callable[[int], float]) -> None:
    world = World(seconds, [0.9, 0.1, 0.5])
    for _ in range(100):
        assert all(0 <= depth <= 8 for depth in world.step().values())


def test_steps_grow_by_doubling() -> None:
    """So that the first proposals of a busy engine are not all made at once."""
    world = World(memory_bound, [0.9] * 32)
    largest = 32
    for _ in range(20):
        tokens = 32 + sum(world.step().values())
        assert tokens <= 2 * largest
        largest = max(largest, tokens)


def test_nothing_is_kept_of_requests_that_have_ended() -> None:
    world = World(flat, [0.5] * 4)
    world.rate(10)
    world.rule.forget([row.request_id for row in world.rows])
    world.rule.observe([Outcome("0", KIND, 4, 2)])  # of the step that ended it
    assert world.rule._rows == {}


@pytest.mark.parametrize(("rows", "shortest"), product([1, 3, 16], [2, 5, 8]))
def test_a_least_depth_is_kept_to_from_the_first_step_on(rows: int, shortest: int) -> None:
    world = World(flat, [0.9] * rows)
    world.rows = [row._replace(shortest=shortest) for row in world.rows]
    seen = [depth for _ in range(300) for depth in world.step().values()]
    assert {0, *range(shortest, 9)} >= set(seen)
    assert world.rate(200) > 0.9 * best(world)


@pytest.mark.parametrize("seconds", [dear, memory_bound])
def test_a_least_depth_that_does_not_pay_is_hardly_ever_tried(seconds: Callable[[int], float]) -> None:
    world = World(seconds, [0.0] * 8)
    world.rows = [row._replace(shortest=4) for row in world.rows]
    assert world.rate(1000) > 0.95 * 8 / seconds(8)


def test_depths_are_within_what_rows_can_use() -> None:
    rule = MeasuredDepth()
    rows = [Row("a", KIND, 0), Row("b", KIND, 3)]
    for size in (2, 40):
        rule.time(size, 0.01)
    assert rule.choose(rows, 2) == {"a": 0, "b": 3}
    assert rule.choose([], 0) == {}


@given(
    steps=st.lists(
        st.tuples(st.integers(1, 300), st.just(0.0) | st.floats(1e-4, 1.0)), min_size=1, max_size=60
    ),
    sizes=st.lists(st.integers(1, 500), min_size=2, max_size=20),
)
def test_more_tokens_never_take_less(steps: list[tuple[int, float]], sizes: list[int]) -> None:
    times = StepTimes()
    for tokens, seconds in steps:
        times.observe(tokens, seconds)
    found = times.of(np.array(sorted(sizes), dtype=np.float64))
    assert all(math.isfinite(one) and one > 0 for one in found)
    assert (np.diff(found) >= -1e-12).all()


def test_times_are_forgotten_when_they_are_old() -> None:
    times = StepTimes()
    times.observe(8, 9.0)
    for _ in range(500):
        times.observe(1, 0.01)
    assert times.of(np.array([8.0]))[0] == pytest.approx(0.01)
