"""Figures of runs, and where two outputs part."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.bench.results import (
    Difference,
    Run,
    Stream,
    first_difference,
    quantile,
    summarise,
)

TWO = Run(
    (
        Stream((1, 2, 3, 4), 4, (0.5, 1.0, 2.0), proposed=4, accepted=1),
        Stream((5, 6), 2, (1.5, 4.0), proposed=0, accepted=0),
    )
)


def test_a_run_lasts_until_its_last_token() -> None:
    assert (TWO.seconds, TWO.tokens, TWO.speed) == (4.0, 6, 1.5)


def test_the_figures_of_several_runs() -> None:
    alone = Run((Stream((1, 2), 2, (1.0, 2.0), proposed=4, accepted=2),))
    found = summarise([TWO, alone])
    assert found.speed == pytest.approx(8 / 6)
    assert found.first_token == 1.0
    assert found.pauses == (1.0, 2.5, 2.5)
    assert found.tokens_per_step == pytest.approx(8 / 7)
    assert found.acceptance == pytest.approx(3 / 8)
    assert found.breakdown is None


def test_a_single_burst_has_no_pause_and_no_known_acceptance() -> None:
    found = summarise([Run((Stream("text", 4, (2.0,)),))])
    assert found.pauses == (0.0, 0.0, 0.0)
    assert found.tokens_per_step == 4
    assert found.acceptance is None


@given(st.lists(st.integers(), min_size=1), st.floats(0.01, 1))
def test_a_quantile_is_a_value_with_that_share_not_over_it(values: list[int], share: float) -> None:
    found = quantile(values, share)
    assert found in values
    assert sum(value <= found for value in values) >= math.ceil(share * len(values))
    assert sum(value < found for value in values) < math.ceil(share * len(values))


def stream(output: tuple[int, ...] | str) -> Stream:
    return Stream(output, len(output), (1.0,))


@given(st.lists(st.lists(st.integers(0, 2), min_size=1), min_size=1))
def test_a_run_does_not_differ_from_itself(outputs: list[list[int]]) -> None:
    run = Run(tuple(stream(tuple(output)) for output in outputs))
    assert first_difference(run, run) is None


@pytest.mark.parametrize(
    ("one", "other", "index"),
    [((1, 2, 3), (1, 5, 3), 1), ((1, 2), (1, 2, 3), 2), ("abc", "abd", 2), ("", "a", 0)],
)
def test_where_outputs_part(one: tuple[int, ...] | str, other: tuple[int, ...] | str, index: int) -> None:
    same = stream(one)
    assert first_difference(Run((same, stream(one))), Run((same, stream(other)))) == Difference(1, index)


def test_tokens_are_not_compared_with_text() -> None:
    with pytest.raises(ValueError, match="tokens cannot be compared with text"):
        first_difference(Run((stream("ab"),)), Run((stream((1, 2)),)))
