"""The metrics that the documents name are there."""

from __future__ import annotations

import re
from pathlib import Path

from outrider_serving.instruments import TABLE, Instrument, Kind

ROOT = Path(__file__).parents[3]
UNITS = {"s": "_seconds", "By": "_bytes"}
NO_METRIC = {"outrider_serving", "outrider_shared"}
"""A package, and what a line greps for."""


def exposed(instrument: Instrument) -> str:
    """How Prometheus calls it."""
    counted = instrument.kind in (Kind.COUNTER, Kind.GENERATION_COUNTER, Kind.READ_COUNTER)
    name = instrument.name.replace(".", "_") + UNITS.get(instrument.unit, "")
    return f"{name}_total" if counted else name


def test_every_metric_that_a_page_names_is_exposed() -> None:
    pages = [ROOT / "README.md", *(ROOT / "docs").glob("*.md")]
    named = {name for page in pages for name in re.findall(r"\boutrider_[a-z_]+\b", page.read_text())}
    ours = {name for name in named - NO_METRIC if not name.startswith("outrider_operator")}
    assert len(ours) > 20
    assert ours <= {exposed(one) for one in TABLE}


def test_labels_in_queries_are_those_of_the_metric() -> None:
    labels = {exposed(one): {*one.labels, "pod"} for one in TABLE}
    page = (ROOT / "docs" / "suffix.md").read_text()
    queries = re.findall(r"\b(?:sum|max) by \(([^)]*)\) \((?:rate\()?(outrider_\w+)", page)
    assert len(queries) >= 6
    for by, name in queries:
        assert set(by.split(", ")) <= labels[name], name
