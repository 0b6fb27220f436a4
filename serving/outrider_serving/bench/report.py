"""What a comparison is reported as: tables for people, JSON with every pair for whoever checks them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from outrider_serving.bench.compare import Comparison, Equality, Pair
from outrider_serving.bench.pairs import CONFIDENCE, Rule, settled, verdict
from outrider_serving.bench.results import QUANTILES, Run, Summary

FORMAT = 1
"""Of the JSON; counts changes that a reader must know of."""


def tables(comparisons: Sequence[Comparison], rule: Rule, bar: float | None) -> str:
    """Markdown: the ratios, each side's figures and, where a side tells, where its steps' time goes."""
    parts = [_ratios(comparisons, rule, bar), _figures(comparisons)]
    broken_down = _parts(comparisons)
    return "\n\n".join([*parts, broken_down] if broken_down else parts)


def _ratios(comparisons: Sequence[Comparison], rule: Rule, bar: float | None) -> str:
    a, b = comparisons[0].a, comparisons[0].b
    head = ["workload", f"{a} tok/s", f"{b} tok/s", f"{a} / {b}", f"{CONFIDENCE:.0%} interval"]
    head += [
        "pairs",
        "settled",
        *([f"at least {bar:g}"] if bar is not None else []),
        "output",
        "stored before",
        "in itself",
    ]
    rows = []
    for comparison in comparisons:
        found, (of_a, of_b) = comparison.estimate, comparison.summaries
        row = [comparison.job.workload.name, f"{of_a.speed:.1f}", f"{of_b.speed:.1f}", f"{found.ratio:.3f}"]
        row += [f"{found.low:.3f} to {found.high:.3f}", str(found.pairs)]
        row += ["yes" if settled(found, rule) else f"no (half-width {found.half_width:.1%})"]
        row += [verdict(found, bar, rule).value] if bar is not None else []
        of = comparison.coverage
        seen = ["", ""] if of is None else [f"{of.share:.0%}", f"{of.own_share:.0%}"]
        rows.append([*row, equality_in_words(comparison.equality), *seen])
    return _table(head, rows)


def _figures(comparisons: Sequence[Comparison]) -> str:
    pauses = "/".join(f"p{round(q * 100)}" for q in QUANTILES)
    head = ["workload", "side", "first token ms", f"pause ms {pauses}", "tokens per step", "acceptance"]
    return _table(head, [row for comparison in comparisons for row in _figures_of(comparison)])


def _figures_of(comparison: Comparison) -> list[list[str]]:
    return [
        [
            comparison.job.workload.name,
            side,
            f"{summary.first_token * 1e3:.1f}",
            "/".join(f"{pause * 1e3:.1f}" for pause in summary.pauses),
            f"{summary.tokens_per_step:.2f}",
            "" if summary.acceptance is None else f"{summary.acceptance:.0%}",
        ]
        for side, summary in _sides(comparison)
    ]


def _parts(comparisons: Sequence[Comparison]) -> str:
    """A decoding step's rows, tokens and milliseconds; empty where no side has any."""
    head = ["workload", "side", "steps", "rows", "tokens", "step ms", "proposal", "target"]
    head += ["verification", "rest", "outside the target"]
    rows = []
    for comparison in comparisons:
        for side, summary in _sides(comparison):
            parts = summary.breakdown
            if parts is None or not parts.steps:
                continue
            seconds = (parts.busy, parts.proposal, parts.target, parts.verification, parts.rest)
            row = [comparison.job.workload.name, side, str(parts.steps)]
            row += [f"{parts.rows / parts.steps:.1f}", f"{parts.tokens / parts.steps:.1f}"]
            row += [f"{part / parts.steps * 1e3:.2f}" for part in seconds]
            rows.append([*row, f"{parts.outside_target:.1%}"])
    return _table(head, rows) if rows else ""


def _sides(comparison: Comparison) -> list[tuple[str, Summary]]:
    return list(zip((comparison.a, comparison.b), comparison.summaries, strict=True))


def equality_in_words(equality: Equality | None) -> str:
    """Whether the outputs were the same, as tables say it."""
    if equality is None:
        return "drawn anew"
    if equality.first is None:
        return "identical"
    stream, index = equality.first.stream, equality.first.index
    return f"differs in {equality.different} of {equality.pairs} pairs, first at {index} of request {stream}"


def _table(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Markdown whose columns also line up in a terminal; all but the first are set to the right."""
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [_line(head, widths), "| " + " | ".join(_rule(n, width) for n, width in enumerate(widths)) + " |"]
    return "\n".join([*lines, *(_line(row, widths) for row in rows)])


def _line(cells: Sequence[str], widths: Sequence[int]) -> str:
    padded = [c.rjust(w) if n else c.ljust(w) for n, (c, w) in enumerate(zip(cells, widths, strict=True))]
    return "| " + " | ".join(padded) + " |"


def _rule(column: int, width: int) -> str:
    return "-" * (width - 1) + ":" if column else "-" * width


def document(
    comparisons: Sequence[Comparison], rule: Rule, bar: float | None, surroundings: dict[str, Any]
) -> dict[str, Any]:
    """Plain data for JSON: all that was asked for, every pair, and what follows from them."""
    return {
        "format": FORMAT,
        **surroundings,
        "confidence": CONFIDENCE,
        "rule": asdict(rule),
        "bar": bar,
        "comparisons": [_comparison(comparison, rule, bar) for comparison in comparisons],
    }


def _comparison(comparison: Comparison, rule: Rule, bar: float | None) -> dict[str, Any]:
    found, (a, b) = comparison.estimate, comparison.summaries
    return {
        "workload": comparison.job.workload.name,
        "a": comparison.a,
        "b": comparison.b,
        "estimate": asdict(found) | {"half_width": found.half_width},
        "settled": settled(found, rule),
        "verdict": verdict(found, bar, rule).value if bar is not None else None,
        "equality": asdict(comparison.equality) if comparison.equality is not None else None,
        "coverage": asdict(comparison.coverage) if comparison.coverage is not None else None,
        "summaries": {"a": asdict(a), "b": asdict(b)},
        "outputs": {"a": _outputs(comparison.pairs[0].a), "b": _outputs(comparison.pairs[0].b)},
        "pairs": [_pair(pair) for pair in comparison.pairs],
    }


def _pair(pair: Pair) -> dict[str, Any]:
    return {
        "order": "AB" if pair.a_first else "BA",
        "ratio": pair.ratio,
        "a": _run(pair.a),
        "b": _run(pair.b),
    }


def _run(run: Run) -> dict[str, Any]:
    """A run without its outputs, which repeat from pair to pair."""
    return {
        "seconds": run.seconds,
        "tokens": run.tokens,
        "streams": [
            {name: value for name, value in asdict(stream).items() if name not in ("output", "prompt")}
            for stream in run.streams
        ],
        "breakdown": asdict(run.breakdown) if run.breakdown is not None else None,
    }


def _outputs(run: Run) -> list[tuple[int, ...] | str]:
    return [stream.output for stream in run.streams]
