"""The table of instruments, and what the records do to it."""

import dataclasses
from collections.abc import Iterator

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider_serving.api.records import Outcome, RequestRecord, Usage
from outrider_serving.engine.process.child import Reason
from outrider_serving.engine.records import RowRecord, StepRecord
from outrider_serving.engine.types import Labels, SamplingClass
from outrider_serving.generations import NEWEST, OLDER
from outrider_serving.instruments import TABLE, Kind
from outrider_serving.settings import Objective
from outrider_serving.telemetry import Telemetry

LABELS = Labels("agents", "chat_completions", SamplingClass.GREEDY, "stable", 3)
OBJECTIVE = Objective(ttft_milliseconds=100, tpot_milliseconds=100)


@pytest.fixture
def telemetry() -> Iterator[Telemetry]:
    read = [line for line in TABLE if line.kind in (Kind.GAUGE, Kind.READ_COUNTER)]
    readers = {line.name: (lambda: {"full": 3, "short": 4}) if line.labels else (lambda: 5) for line in read}
    made = Telemetry(
        address="127.0.0.1", port=8000, readers=readers | {"outrider.shared.fresh": lambda: None}
    )
    yield made
    made.close()


def value(telemetry: Telemetry, sample: str, **labels: str) -> float:
    """The sum of a sample's series that have these labels."""
    return sum(
        found.value
        for family in text_string_to_metric_families(telemetry.exposition().decode())
        for found in family.samples
        if found.name == sample and labels.items() <= found.labels.items()
    )


def request(outcome: Outcome = Outcome.COMPLETED, ttft: float | None = 0.05) -> RequestRecord:
    return RequestRecord(
        id="id",
        model="m",
        tenant="",
        labels=LABELS,
        stream=True,
        outcome=outcome,
        duration=0.5,
        usage=Usage(10, 20, 5, 16, 12),
        objective=OBJECTIVE,
        ttft=ttft,
        tpot=0.02 if ttft else None,
        error_type=None if ttft else "queue_full",
    )


def test_proposals_are_counted_by_where_they_were_found(telemetry: Telemetry) -> None:
    rows = (
        RowRecord("a", LABELS, 5, 10, proposed=4, depth=4, accepted=3, committed=4, source="history"),
        RowRecord("b", LABELS, 3, 10, proposed=2, depth=2, accepted=0, committed=1, source="request"),
        RowRecord("c", LABELS, 3, 10, proposed=2, depth=2, accepted=2, committed=3, source="history"),
        RowRecord("d", LABELS, 1, 10, proposed=0, depth=0, accepted=0, committed=1),
    )
    telemetry.record_step(StepRecord("stable", 3, 0.0, rows, 0, 0.1, 0.1, 0.1, 0.1))
    found = [
        (value(telemetry, f"outrider_suffix_{what}_total", workload="agents", scope=scope))
        for scope in ("history", "request")
        for what in ("proposals", "accepted")
    ]
    assert found == [2, 5, 1, 0]


def test_names_are_unique_and_described() -> None:
    assert len({line.name for line in TABLE}) == len(TABLE)
    assert all(line.description.endswith(".") for line in TABLE)
    assert all((line.kind is Kind.HISTOGRAM) == bool(line.buckets) for line in TABLE)


def test_buckets_are_the_conventions() -> None:
    buckets = {line.name: line.buckets for line in TABLE if line.buckets}
    duration = buckets["gen_ai.server.request.duration"]
    assert (duration[0], duration[-1], len(duration)) == (0.01, 81.92, 14)
    assert buckets["gen_ai.server.time_to_first_token"][-1] == 10.0
    assert buckets["gen_ai.server.time_per_output_token"][-1] == 2.5


def test_requests_are_counted_by_verdict(telemetry: Telemetry) -> None:
    telemetry.record_request(request())
    telemetry.record_request(request(ttft=0.2))
    telemetry.record_request(request(Outcome.REFUSED, ttft=None))
    telemetry.record_request(request(Outcome.CANCELLED))
    of = {"workload": "agents", "endpoint": "chat_completions", "sampling_class": "greedy", "generation": "3"}
    requests = "outrider_requests_total"
    assert value(telemetry, requests, objective="met", outcome="completed", **of) == 1
    assert value(telemetry, requests, objective="missed", **of) == 2
    assert value(telemetry, requests, objective="missed", outcome="refused", **of) == 1
    assert value(telemetry, requests, objective="none", outcome="cancelled", **of) == 1
    assert value(telemetry, "outrider_request_tokens_total", objective="met") == 20
    assert value(telemetry, "outrider_prompt_tokens_total") == 40


def of_generation(generation: int) -> RequestRecord:
    record = request()
    return dataclasses.replace(record, labels=dataclasses.replace(LABELS, generation=generation))


def generations(telemetry: Telemetry, sample: str) -> dict[str, float]:
    """What a sample counts, by generation."""
    families = text_string_to_metric_families(telemetry.exposition().decode())
    samples = [found for family in families for found in family.samples if found.name == sample]
    return {found.labels["generation"]: found.value for found in samples}


def test_the_newest_generations_have_series_however_many_there_were(telemetry: Telemetry) -> None:
    many = 3000
    for generation in range(many):
        telemetry.record_request(of_generation(generation))
        if generation % 1000 == 0:
            telemetry.exposition()
    expected = {str(generation): 1.0 for generation in range(many - NEWEST, many)}
    assert generations(telemetry, "outrider_requests_total") == expected
    assert generations(telemetry, "outrider_request_tokens_total") == dict.fromkeys(expected, 20)
    assert b"overflow" not in telemetry.exposition()


def test_no_series_of_a_generation_goes_down_or_jumps(telemetry: Telemetry) -> None:
    """Requests of a generation end after those of newer ones; whatever their order, a count grows by one."""
    order = [5, 5, 3, *range(6, 6 + NEWEST), 5, 3, 8, 5, 1, 40, 8, 6, 40]
    before: dict[str, float] = {}
    gone: set[str] = set()
    for generation in order:
        telemetry.record_request(of_generation(generation))
        now = generations(telemetry, "outrider_requests_total")
        gone |= before.keys() - now.keys()
        assert not gone & now.keys()
        grown = {name: count - before.get(name, 0) for name, count in now.items()}
        assert sorted(grown.values()) == [0] * (len(grown) - 1) + [1]
        before = now
    assert len(before) == NEWEST + 1
    # 5, 3, 5 and 1 came when there were eight newer ones; 6 made way for 40, and came once more.
    assert before[OLDER] == 5
    assert (before["8"], before["40"]) == (3, 2)


def test_the_conventions_histograms(telemetry: Telemetry) -> None:
    telemetry.record_request(request())
    telemetry.record_request(request(Outcome.REFUSED, ttft=None))
    of = {
        "gen_ai_operation_name": "chat",
        "gen_ai_request_model": "m",
        "server_port": "8000",
        "arm": "stable",
    }
    assert value(telemetry, "gen_ai_server_request_duration_seconds_count", **of) == 2
    assert (
        value(telemetry, "gen_ai_server_request_duration_seconds_count", error_type="queue_full", **of) == 1
    )
    assert value(telemetry, "gen_ai_server_time_to_first_token_seconds_count", **of) == 1
    assert value(telemetry, "gen_ai_server_time_per_output_token_seconds_sum", **of) == pytest.approx(0.02)


def test_a_steps_seconds_are_shared_and_its_tokens_counted(telemetry: Telemetry) -> None:
    other = Labels("other", "completions", SamplingClass.SAMPLED, "stable", 3)
    rows = (
        RowRecord("a", LABELS, tokens=7, context=9, proposed=6, depth=4, accepted=2, committed=3),
        RowRecord("b", other, tokens=1, context=9, proposed=0, depth=0, accepted=0, committed=1),
        RowRecord("c", other, tokens=64, context=0, proposed=0, depth=0, accepted=0, committed=0),
    )
    telemetry.record_step(StepRecord("stable", 3, 0.0, rows, 0, 0.3, 0.6, 0.9, 1.2, proposer_failures=2))
    seconds = "outrider_step_time_seconds_total"
    assert value(telemetry, seconds) == pytest.approx(3.0)
    assert value(telemetry, seconds, phase="target") == pytest.approx(0.6)
    assert value(telemetry, seconds, workload="other") == pytest.approx(2.0)
    assert value(telemetry, "outrider_verification_steps_total", workload="other") == 1
    assert value(telemetry, "outrider_tokens_committed_total") == 4
    assert value(telemetry, "outrider_tokens_proposed_total", workload="agents") == 6
    assert value(telemetry, "outrider_tokens_accepted_total", workload="agents") == 2
    assert value(telemetry, "outrider_position_proposed_total", position="4") == 1
    assert value(telemetry, "outrider_position_proposed_total", position="5") == 0
    assert value(telemetry, "outrider_position_accepted_total", position="2") == 1
    assert value(telemetry, "outrider_position_accepted_total", position="3") == 0
    assert value(telemetry, "outrider_proposer_failures_total") == 2


def test_reuse_and_preemptions_are_counted(telemetry: Telemetry) -> None:
    other = Labels("other", "completions", SamplingClass.SAMPLED, "stable", 3)
    rows = tuple(
        RowRecord(
            name, labels, tokens=8, context=0, proposed=0, depth=0, accepted=0, committed=0, reused=reused
        )
        for name, labels, reused in (("a", LABELS, 32), ("b", LABELS, 16), ("c", other, 0))
    )
    for preemptions in (0, 2):
        telemetry.record_step(
            StepRecord("stable", 3, 0.0, rows, 0, 0.1, 0.1, 0.1, 0.1, preemptions=preemptions)
        )
    reused = "outrider_prompt_tokens_reused_total"
    assert value(telemetry, reused, workload="agents", endpoint="chat_completions", arm="stable") == 96
    assert value(telemetry, reused) == 96
    assert value(telemetry, "outrider_preemptions_total", arm="stable") == 2


def test_restarts_are_counted_by_reason(telemetry: Telemetry) -> None:
    for reason in (Reason.DIED, Reason.DIED, Reason.STALLED):
        telemetry.record_restart(reason)
    restarts = "outrider_engine_restarts_total"
    counted = [value(telemetry, restarts, reason=reason) for reason in ("died", "stalled", "failed")]
    assert counted == [2, 1, 0]


def test_gauges_are_read_when_asked(telemetry: Telemetry) -> None:
    assert value(telemetry, "outrider_requests_waiting") == 5
    assert value(telemetry, "outrider_shared_received_total") == 5
    assert value(telemetry, "outrider_shared_dropped_total", reason="full") == 3
    assert value(telemetry, "outrider_shared_dropped_total") == 7
    assert b"outrider_shared_fresh_seconds " not in telemetry.exposition()


def test_recorded_labels_are_those_of_the_table(telemetry: Telemetry) -> None:
    telemetry.record_request(request(Outcome.REFUSED, ttft=0.2))
    telemetry.record_restart(Reason.DIED)
    row = RowRecord("a", LABELS, 5, 9, 4, depth=4, accepted=2, committed=3, reused=1, source="request")
    telemetry.record_step(
        StepRecord("stable", 3, 0.0, (row,), 0, 0.1, 0.1, 0.1, 0.1, proposer_failures=1, preemptions=1)
    )
    seen: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(telemetry.exposition().decode()):
        for sample in family.samples:
            seen.setdefault(family.name, set()).update(sample.labels.keys() - {"le"})
    for line in TABLE:
        name = line.name.replace(".", "_") + {"s": "_seconds", "By": "_bytes"}.get(line.unit, "")
        assert seen.get(name, set()) <= {label.replace(".", "_") for label in line.labels}
