"""The interval of a ratio, the stopping rule, and the verdict."""

import math
import random
from collections.abc import Callable

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st

from outrider_serving.bench.pairs import (
    LEAST_PAIRS,
    Estimate,
    Rule,
    Verdict,
    a_first,
    estimate,
    settled,
    verdict,
    wants_more,
)

RULE = Rule(half_width=0.03)

ratio = st.floats(0.01, 100)
ratios = st.lists(ratio, min_size=2, max_size=60)


def measure(draw: Callable[[int], float], rule: Rule = RULE) -> list[float]:
    """Pairs until the rule is content; `draw` makes the n-th."""
    found: list[float] = []
    while wants_more(found, rule):
        found.append(draw(len(found)))
    return found


def test_a_known_interval() -> None:
    # Logarithms -1, 0, 1: mean 0, standard error 1/sqrt(3); t for 2 degrees of freedom is 4.302653.
    found = estimate([math.exp(-1), 1.0, math.exp(1)])
    assert found.ratio == pytest.approx(1)
    assert found.high == pytest.approx(math.exp(4.302653 / math.sqrt(3)), rel=1e-6)
    assert found.low == pytest.approx(1 / found.high)
    assert found.pairs == 3


@given(ratios)
def test_exchanging_the_sides_turns_everything_over(found: list[float]) -> None:
    one, other = estimate(found), estimate([1 / ratio for ratio in found])
    assert other.ratio == pytest.approx(1 / one.ratio)
    assert other.low == pytest.approx(1 / one.high)
    assert other.high == pytest.approx(1 / one.low)


@given(ratios, ratio)
def test_a_factor_moves_the_interval_and_leaves_its_width(found: list[float], factor: float) -> None:
    one, other = estimate(found), estimate([ratio * factor for ratio in found])
    assert other.ratio == pytest.approx(one.ratio * factor)
    assert other.half_width == pytest.approx(one.half_width, rel=1e-6, abs=1e-9)


@given(ratios, st.randoms(use_true_random=False))
def test_the_order_of_pairs_does_not_matter(found: list[float], rng: random.Random) -> None:
    turned = rng.sample(found, len(found))
    assert estimate(turned).high == pytest.approx(estimate(found).high)


@given(ratios)
def test_the_ratio_lies_within_its_interval_and_among_the_pairs(found: list[float]) -> None:
    one = estimate(found)
    assert one.low <= one.ratio * (1 + 1e-9)
    assert one.ratio <= one.high * (1 + 1e-9)
    assert min(found) * (1 - 1e-9) <= one.ratio <= max(found) * (1 + 1e-9)


@pytest.mark.parametrize("bad", [[], [1.0], [1.0, 0.0], [1.0, -1.0], [1.0, math.nan], [1.0, math.inf]])
def test_what_has_no_interval(bad: list[float]) -> None:
    with pytest.raises(ValueError, match="at least 2 positive ratios"):
        estimate(bad)


@pytest.mark.parametrize("noise", [0.01, 0.05, 0.2])
def test_the_interval_holds_the_truth_as_often_as_it_says(noise: float) -> None:
    rng, trials = random.Random(7), 2000
    held = 0
    for _ in range(trials):
        found = estimate([1.3 * math.exp(rng.gauss(0, noise)) for _ in range(10)])
        held += found.low <= 1.3 <= found.high
    # 0.95 with a standard error of 0.0049.
    assert 0.935 < held / trials < 0.965


@pytest.mark.parametrize("noise", [0.01, 0.04, 0.08])
def test_stopping_when_it_is_narrow_costs_little_coverage(noise: float) -> None:
    rng, trials = random.Random(11), 1000
    held = 0
    for _ in range(trials):
        found = estimate(measure(lambda _: 1.3 * math.exp(rng.gauss(0, noise))))
        held += found.low <= 1.3 <= found.high
    assert held / trials > 0.91


def test_a_bar_above_the_truth_is_hardly_ever_met() -> None:
    rng, trials = random.Random(13), 1000
    verdicts = []
    for _ in range(trials):
        found = estimate(measure(lambda _: math.exp(rng.gauss(0, 0.04))))
        verdicts.append(verdict(found, 1.06, RULE))
    assert verdicts.count(Verdict.MET) / trials < 0.05


def test_pairs_are_ab_ba_ab_ba() -> None:
    assert [a_first(n) for n in range(4)] == [True, False, True, False]


@given(
    drift=st.floats(-0.05, 0.05),
    truth=st.floats(0.5, 2),
    count=st.integers(1, 30),
)
def test_a_steady_drift_cancels(drift: float, truth: float, count: int) -> None:
    """Each run is slower than the one before by the same factor, whichever side it is of."""
    found, clock = [], 0
    for pair in range(2 * count):
        seconds = {}
        for side in "AB" if a_first(pair) else "BA":
            seconds[side] = (1.0 if side == "A" else truth) * math.exp(drift * clock)
            clock += 1
        found.append(seconds["B"] / seconds["A"])
    assert estimate(found).ratio == pytest.approx(truth)


def test_steady_pairs_end_at_the_fewest() -> None:
    assert len(measure(lambda n: 1.2 + 0.001 * (n % 2))) == LEAST_PAIRS


def test_pairs_are_added_until_the_interval_is_narrow() -> None:
    rng = random.Random(3)
    found = measure(lambda _: math.exp(rng.gauss(0, 0.06)))
    assert LEAST_PAIRS < len(found) < RULE.most
    assert len(found) % 2 == 0
    assert settled(estimate(found), RULE)
    assert not settled(estimate(found[:-2]), RULE)


def test_what_does_not_settle_is_given_up() -> None:
    rng = random.Random(3)
    found = measure(lambda _: math.exp(rng.gauss(0, 1)))
    assert len(found) == RULE.most
    assert verdict(estimate(found), 0.01, RULE) is Verdict.NOT_SETTLED


def test_fewer_pairs_than_ten_settle_nothing() -> None:
    rule = Rule(half_width=0.03, least=2, most=8)
    found = measure(lambda _: 1.2, rule)
    assert len(found) == 8
    assert verdict(estimate(found), 1.0, rule) is Verdict.NOT_SETTLED


def test_one_outlier_unsettles_until_others_outweigh_it() -> None:
    def steady(n: int) -> float:
        return 1.2 + 0.002 * (n % 2)

    clean = measure(steady)
    spoilt = measure(lambda n: 3.0 if n == 4 else steady(n))
    assert settled(estimate(clean), RULE)
    assert len(spoilt) > len(clean)
    assert not settled(estimate(spoilt[: len(clean)]), RULE)


@given(ratios, st.floats(0.01, 100), st.sampled_from([0.03, 0.05]))
def test_a_verdict_follows_from_interval_and_bar(found: list[float], bar: float, width: float) -> None:
    rule = Rule(width)
    one = estimate(found)
    match verdict(one, bar, rule):
        case Verdict.FAILED:
            assert one.high < bar
        case Verdict.MET:
            assert one.high >= bar
            assert one.half_width <= width
            assert one.pairs >= LEAST_PAIRS
        case Verdict.NOT_SETTLED:
            assert one.high >= bar
            assert one.half_width > width or one.pairs < LEAST_PAIRS


@given(st.floats(0.5, 2), st.floats(0, 0.02), st.floats(0.01, 0.5))
def test_a_settled_interval_that_reaches_the_bar_meets_it(ratio: float, width: float, over: float) -> None:
    found = Estimate(ratio, ratio * (1 - width), ratio * (1 + width), pairs=12)
    assume(found.high > found.ratio)
    assert verdict(found, found.high, RULE) is Verdict.MET
    assert verdict(found, found.high * (1 + over), RULE) is Verdict.FAILED


@pytest.mark.parametrize(("least", "most"), [(1, 60), (0, 0), (20, 10)])
def test_rules_without_sense_are_refused(least: int, most: int) -> None:
    with pytest.raises(ValueError, match="pairs: at least 2"):
        Rule(0.03, least, most)
