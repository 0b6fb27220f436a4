"""Where the time of steps goes."""

import pytest

from outrider_serving.bench.breakdown import Breakdown, break_down
from outrider_serving.engine.records import RowRecord, StepRecord
from outrider_serving.engine.types import Labels, SamplingClass

LABELS = Labels("other", "bench", SamplingClass.GREEDY, "stable", 0)


def row(tokens: int, proposed: int) -> RowRecord:
    return RowRecord(
        "r", LABELS, tokens, context=9, proposed=proposed, depth=proposed, accepted=0, committed=1
    )


def step(*rows: RowRecord, target: float = 6.0) -> StepRecord:
    return StepRecord("stable", 0, 0.0, rows, 0, 1.0, target, 2.0, 3.0)


def test_the_parts_of_decoding_steps_add_up() -> None:
    found = break_down([step(row(5, 4)), step(row(1, 0), row(3, 2), target=4.0)])
    assert found == Breakdown(
        steps=2, rows=3, tokens=9, proposal=2.0, target=10.0, verification=4.0, rest=6.0
    )
    assert found.busy == 22.0
    assert found.outside_target == pytest.approx(12 / 22)


def test_steps_that_read_prompts_are_left_out() -> None:
    assert break_down([step(row(7, 0)), step(row(1, 0), row(40, 0))]) == Breakdown()


def test_nothing_has_no_share() -> None:
    assert Breakdown().outside_target == 0
