"""The figures of a run as Markdown tables, and what is wrong with them. Pure.

A bound of a histogram's bucket is told as "at most": the operator's own metrics know no better.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any, Final

from tools.fleet.figures import by_verb

Figures = dict[str, Any]

_VERBS: Final = ("get", "list", "watch", "create", "patch", "update", "delete")


def tables(figures: Figures) -> str:
    """Latencies, requests by verb, and the process, one row a phase or figure of it."""
    phases: dict[str, Figures] = figures["phases"]
    return "\n\n".join((_latencies(phases), _requests(phases), _by_kind(phases), _process(phases)))


def complaints(figures: Figures) -> list[str]:
    """What no run may show: writes when there was nothing to do, and passes that failed."""
    found = []
    for name, phase in figures["phases"].items():
        found += [f"{name}: needless {call}: {n}" for call, n in phase.get("needless writes", {}).items()]
        if failed := phase["metrics"]["failed passes"]:
            found.append(f"{name}: failed passes: {failed}")
    return found


def _latencies(phases: dict[str, Figures]) -> str:
    rows = []
    for name, phase in phases.items():
        rows += [
            (name, what, f"{values['count']:.0f}", *(_seconds(values[key]) for key in ("p50", "p99", "max")))
            for what, values in phase.get("latency", {}).items()
        ]
        rows += [
            (name, what, "1", _seconds(phase[what]), "", "")
            for what in (
                "all are sent",
                "the next process runs",
                "the next process leads",
                "all was looked at",
            )
            if what in phase
        ]
        metrics = phase["metrics"]
        for what in ("queue wait at most", "pass at most"):
            bounds = metrics[what]
            rows.append(
                (name, what, str(metrics["passes"]), *(_seconds(bounds[key]) for key in ("p50", "p99")), "")
            )
    return _table(("phase", "seconds until, or of", "number", "p50", "p99", "most"), rows)


def _requests(phases: dict[str, Figures]) -> str:
    rows = []
    for name, phase in phases.items():
        verbs = by_verb(phase["calls"])
        total = sum(verbs.values())
        rows.append(
            (
                name,
                f"{phase['seconds']:.0f}",
                *(str(verbs.get(verb, 0)) for verb in _VERBS),
                str(total),
                f"{60 * total / phase['seconds']:.0f}",
                str(phase["own calls"]),
                str(sum(phase["metrics"]["calls"].values())),
            )
        )
    return _table(("phase", "seconds", *_VERBS, "all", "a minute", "not by kopf", "by metrics"), rows)


def _by_kind(phases: dict[str, Figures]) -> str:
    """Requests by verb and resource: one row each, one column a phase."""
    calls = sorted({call for phase in phases.values() for call in phase["calls"]})
    rows = [(call, *(str(phase["calls"].get(call, 0)) for phase in phases.values())) for call in calls]
    head = (f"{name} ({phase['seconds']:.0f} s)" for name, phase in phases.items())
    return _table(("request", *head), rows)


def _process(phases: dict[str, Figures]) -> str:
    rows = []
    for name, phase in phases.items():
        process = phase["process"]
        cpu = process["CPU seconds"]
        rows.append(
            (
                name,
                f"{cpu:.1f}",
                f"{60 * cpu / phase['seconds']:.1f}",
                f"{process['resident MiB']:.0f}",
                f"{process['most resident MiB']:.0f}",
                f"{phase['load']:.1f}",
            )
        )
    head = ("phase", "CPU seconds", "a minute", "resident MiB", "most so far, MiB", "machine's load before")
    return _table(head, rows)


def _seconds(value: float | None) -> str:
    if value is None:
        return ""
    if math.isinf(value):
        return "over the last bucket"
    return f"{value:.3f}" if value < 1 else f"{value:.1f}"


def _table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(cells) + " |" for cells in lines)
