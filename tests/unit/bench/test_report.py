"""Tables and JSON."""

import json
from dataclasses import replace

from outrider_serving.bench.breakdown import Breakdown
from outrider_serving.bench.compare import Comparison, Equality, Pair
from outrider_serving.bench.coverage import Coverage
from outrider_serving.bench.pairs import Rule
from outrider_serving.bench.report import document, equality_in_words, tables
from outrider_serving.bench.results import Difference
from unit.bench.made import JOB, run

RULE = Rule(0.03)
PARTS = Breakdown(steps=4, rows=8, tokens=16, proposal=0.01, target=0.1, verification=0.02, rest=0.03)


def comparison(a_seconds: float = 1.0, pairs: int = 10) -> Comparison:
    made = tuple(Pair(run(a_seconds, breakdown=PARTS), run(2.0), a_first=n % 2 == 0) for n in range(pairs))
    return Comparison(JOB, "ngram", "hf", made, Equality(pairs, 0, None))


def cells(table: str) -> list[list[str]]:
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table.splitlines()]


def test_a_table_of_ratios() -> None:
    head, _, row = cells(tables([comparison()], RULE, 1.5).split("\n\n")[0])
    assert dict(zip(head, row, strict=True)) == {
        "workload": "open",
        "ngram tok/s": "4.0",
        "hf tok/s": "2.0",
        "ngram / hf": "2.000",
        "95% interval": "2.000 to 2.000",
        "pairs": "10",
        "settled": "yes",
        "at least 1.5": "met",
        "output": "identical",
        "stored before": "",
        "in itself": "",
    }


def test_how_much_was_seen_before_is_told() -> None:
    seen = replace(comparison(), coverage=Coverage(tokens=100, covered=61, looked_up=30, verbatim=0))
    table = cells(tables([seen], RULE, None).split("\n\n")[0])
    assert (table[0][-2:], table[2][-2:]) == (["stored before", "in itself"], ["61%", "30%"])


def test_a_bar_that_is_not_reached() -> None:
    head, _, row = cells(tables([comparison()], RULE, 2.5).split("\n\n")[0])
    assert row[head.index("at least 2.5")] == "failed"


def test_too_few_pairs_are_not_settled() -> None:
    head, _, row = cells(tables([comparison(pairs=4)], RULE, 0.1).split("\n\n")[0])
    assert row[head.index("settled")].startswith("no")
    assert row[head.index("at least 0.1")] == "not settled"


def test_without_a_bar_there_is_no_column_for_it() -> None:
    assert "at least" not in tables([comparison()], RULE, None)


def test_figures_of_both_sides() -> None:
    head, _, a, b = cells(tables([comparison()], RULE, None).split("\n\n")[1])
    assert head == [
        "workload",
        "side",
        "first token ms",
        "pause ms p50/p90/p99",
        "tokens per step",
        "acceptance",
    ]
    assert a == ["open", "ngram", "500.0", "500.0/500.0/500.0", "2.00", "50%"]
    assert b[1:3] == ["hf", "1000.0"]


def test_where_a_step_goes_for_the_side_that_tells() -> None:
    head, _, *rows = cells(tables([comparison()], RULE, None).split("\n\n")[2])
    assert [dict(zip(head, row, strict=True)) for row in rows] == [
        {
            "workload": "open",
            "side": "ngram",
            "steps": "40",
            "rows": "2.0",
            "tokens": "4.0",
            "step ms": "40.00",
            "proposal": "2.50",
            "target": "25.00",
            "verification": "5.00",
            "rest": "7.50",
            "outside the target": "37.5%",
        }
    ]


def test_outputs_in_words() -> None:
    assert equality_in_words(None) == "drawn anew"
    assert equality_in_words(Equality(4, 0, None)) == "identical"
    said = equality_in_words(Equality(4, 3, Difference(1, 32)))
    assert said == "differs in 3 of 4 pairs, first at 32 of request 1"


def test_the_json_has_every_pair() -> None:
    about = {"machine": {"cores": 2}}
    found = json.loads(json.dumps(document([comparison()], RULE, 1.5, about)))
    assert found["machine"] == {"cores": 2}
    assert found["rule"] == {"half_width": 0.03, "least": 10, "most": 60}
    (one,) = found["comparisons"]
    assert (one["workload"], one["a"], one["b"]) == ("open", "ngram", "hf")
    assert (one["settled"], one["verdict"]) == (True, "met")
    assert [pair["order"] for pair in one["pairs"]] == ["AB", "BA"] * 5
    assert [pair["ratio"] for pair in one["pairs"]] == [2.0] * 10
    assert one["pairs"][0]["a"]["streams"] == [
        {"tokens": 4, "arrivals": [0.5, 1.0], "proposed": 4, "accepted": 2, "began": 0.0}
    ]
    assert one["pairs"][0]["a"]["breakdown"]["steps"] == 4
    assert one["pairs"][0]["b"]["breakdown"] is None
    assert one["outputs"] == {"a": [[1, 2, 3, 4]], "b": [[1, 2, 3, 4]]}
