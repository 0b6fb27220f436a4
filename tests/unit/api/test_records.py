"""Whether a request met its objective, and the marks it is judged by."""

from itertools import product

import pytest

from outrider_serving.api.pace import Pace
from outrider_serving.api.records import Outcome, RequestRecord, Usage, Verdict, met
from outrider_serving.engine.types import Labels, SamplingClass
from outrider_serving.settings import Objective

LIMIT = 100
UNDER, EXACT, OVER = 0.05, 0.1, 0.1001
FIGURES = (None, UNDER, EXACT, OVER)


def objective(max_gap: int | None) -> Objective:
    return Objective(ttft_milliseconds=LIMIT, tpot_milliseconds=LIMIT, max_gap_milliseconds=max_gap)


@pytest.mark.parametrize("max_gap_limit", [None, LIMIT])
@pytest.mark.parametrize(("ttft", "tpot", "max_gap"), list(product(FIGURES, FIGURES, FIGURES)))
@pytest.mark.parametrize("outcome", list(Outcome))
def test_met_is_the_conjunction(
    max_gap_limit: int | None, ttft: float | None, tpot: float | None, max_gap: float | None, outcome: Outcome
) -> None:
    kept = {
        "completed": outcome is Outcome.COMPLETED,
        "ttft": ttft in (UNDER, EXACT),
        "tpot": tpot in (None, UNDER, EXACT),
        "max_gap": max_gap_limit is None or max_gap in (None, UNDER, EXACT),
    }
    assert met(objective(max_gap_limit), ttft, tpot, max_gap, outcome) is all(kept.values())


def record(outcome: Outcome, limits: Objective | None, ttft: float | None = UNDER) -> RequestRecord:
    labels = Labels("other", "completions", SamplingClass.GREEDY, "stable", 0)
    return RequestRecord("id", "m", "", labels, True, outcome, 1.0, Usage(), limits, ttft, UNDER, UNDER)


@pytest.mark.parametrize(
    ("outcome", "ttft", "verdict"),
    [
        (Outcome.COMPLETED, UNDER, Verdict.MET),
        (Outcome.COMPLETED, OVER, Verdict.MISSED),
        (Outcome.FAILED, UNDER, Verdict.MISSED),
        (Outcome.TIMED_OUT, UNDER, Verdict.MISSED),
        (Outcome.REFUSED, None, Verdict.MISSED),
        (Outcome.CANCELLED, UNDER, Verdict.NONE),
    ],
)
def test_verdicts(outcome: Outcome, ttft: float | None, verdict: Verdict) -> None:
    assert record(outcome, objective(None), ttft).verdict is verdict
    assert record(outcome, None, ttft).verdict is Verdict.NONE


def test_pace_of_a_request_without_tokens() -> None:
    pace = Pace(received=10.0)
    assert (pace.ttft, pace.tpot(0), pace.max_gap) == (None, None, None)


def test_pace_of_one_token() -> None:
    pace = Pace(received=10.0)
    pace.mark(10.5)
    assert (pace.ttft, pace.tpot(1), pace.max_gap) == (0.5, None, None)


def test_pace_of_bursts() -> None:
    pace = Pace(received=10.0)
    for now in (11.0, 11.25, 12.25):
        pace.mark(now)
    assert (pace.ttft, pace.tpot(6), pace.max_gap) == (1.0, 0.25, 1.0)


def test_pace_of_several_choices_is_by_the_tokens_of_one() -> None:
    pace = Pace(received=10.0)
    pace.mark(11.0)
    pace.mark(13.0)
    assert pace.tpot(7 / 2) == 0.8
    assert pace.tpot(3 / 2) is None


def test_pace_of_one_burst() -> None:
    pace = Pace(received=10.0)
    pace.mark(11.0)
    assert (pace.tpot(4), pace.max_gap) == (0.0, None)
