"""The `outrider bench` command: opens two sides, compares them on each workload, reports."""

from __future__ import annotations

import argparse
import gc
import json
import os
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from typing import Any

from outrider_serving.bench.arguments import KEY_VARIABLE
from outrider_serving.bench.compare import Comparison, Pair, compare
from outrider_serving.bench.http_side import HttpSide
from outrider_serving.bench.machine import machine, versions
from outrider_serving.bench.pairs import (
    HALF_WIDTH_BETWEEN_PROCESSES,
    HALF_WIDTH_IN_PROCESS,
    Rule,
    Verdict,
    verdict,
)
from outrider_serving.bench.report import document, tables
from outrider_serving.bench.results import BenchError
from outrider_serving.bench.sides import Side, alone
from outrider_serving.bench.workloads import Job, Sampling
from outrider_serving.engine.cgroup import limit_threads
from outrider_serving.engine.options import DEFAULT_MAX_RUNNING, EngineOptions
from outrider_serving.engine.types import EngineError
from outrider_serving.models.errors import ModelError
from outrider_serving.models.source import check_source, parse_source


class _InputError(Exception):
    """Bad input; the message names the flag and what is allowed."""


@dataclass(frozen=True, slots=True)
class _Opened:
    """Two sides, and what a report says about them."""

    sides: tuple[Side, Side]
    about: dict[str, Any]


def run(chosen: argparse.Namespace) -> int:
    """Run the command with its parsed flags; the exit status."""
    try:
        jobs = _jobs(chosen)
        half_width = HALF_WIDTH_BETWEEN_PROCESSES if chosen.http else HALF_WIDTH_IN_PROCESS
        rule = Rule(half_width, *chosen.pairs)
        opened = _servers(chosen) if chosen.http else _engines(chosen)
        with ExitStack() as stack:
            for side in opened.sides:
                stack.callback(side.close)
            return _compare(opened, jobs, rule, chosen)
    except (_InputError, ModelError) as error:
        return _fail(f"error: {error}", 2)
    except (BenchError, EngineError) as error:
        return _fail(f"failed: {error}", 1)
    except KeyboardInterrupt:
        return _fail("interrupted", 130)


def _fail(message: str, status: int) -> int:
    print("outrider bench: " + " ".join(message.split()), file=sys.stderr)
    return status


@contextmanager
def _spared() -> Iterator[None]:
    """What is loaded is spared by garbage collections, as in serving: they would take long, now and then."""
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()


@_spared()
def _compare(opened: _Opened, jobs: list[Job], rule: Rule, chosen: argparse.Namespace) -> int:
    """Measure and report; the JSON is written after each workload, so that what was measured is not lost."""
    about = {"versions": versions(), "machine": machine(), **opened.about}
    comparisons: list[Comparison] = []
    for job in jobs:
        comparisons.append(
            compare(*opened.sides, job, rule, partial(_tell, job), partial(_say, job.workload.name))
        )
        found = comparisons[-1].estimate
        _say(job.workload.name, f"{found.ratio:.3f} from {found.pairs} pairs")
        if chosen.json is not None:
            text = json.dumps(document(comparisons, rule, chosen.bar, about), indent=1)
            chosen.json.write_text(text + "\n", encoding="utf-8")
    print(tables(comparisons, rule, chosen.bar))
    met = chosen.bar is None or all(
        verdict(comparison.estimate, chosen.bar, rule) is Verdict.MET for comparison in comparisons
    )
    return 0 if met else 1


def _tell(job: Job, pair: Pair) -> None:
    _say(job.workload.name, f"a pair with the ratio {pair.ratio:.3f}")


def _say(about: str, what: str) -> None:
    """Progress: workloads take minutes."""
    print(f"{about}: {what}", file=sys.stderr)


def _jobs(chosen: argparse.Namespace) -> list[Job]:
    """What is asked for, checked as far as one flag depends on another."""
    if (chosen.model is None) == (chosen.http is None):
        raise _InputError("give either MODEL or --http NAME=URL NAME=URL")
    if chosen.temperature == 0 and (chosen.seed is not None or chosen.top_p < 1):
        raise _InputError("--seed and --top-p are for a --temperature over 0")
    if chosen.json is not None and not (
        chosen.json.parent.is_dir() and os.access(chosen.json.parent, os.W_OK)
    ):
        raise _InputError(f"--json {chosen.json}: there is no such directory, or it cannot be written to")
    sampling = Sampling(chosen.temperature, chosen.top_p, chosen.seed)
    return [Job(workload, chosen.tokens, sampling) for workload in chosen.workloads]


def _servers(chosen: argparse.Namespace) -> _Opened:
    (a, first), (b, second) = chosen.http
    if a == b:
        raise _InputError(f"--http: both servers are called {a!r}: give them different names")
    key = os.environ.get(KEY_VARIABLE) or None
    try:
        sides = HttpSide(a, replace(first, key=key)), HttpSide(b, replace(second, key=key))
    except BenchError as error:
        raise _InputError(f"--http: {error}") from error
    described = [
        {"name": side.name, "kind": "http", "address": str(endpoint), "model": side.model}
        for side, endpoint in zip(sides, (first, second), strict=True)
    ]
    return _Opened(sides, {"sides": described, **_asked(chosen)})


def _engines(chosen: argparse.Namespace) -> _Opened:
    check_source(parse_source(chosen.model))
    limit_threads()  # as the engine's own process does
    # Everything heavy is behind this import, so that --help and bad input are answered at once.
    from outrider_serving.bench.opening import Wanted, describe, open_sides, surroundings

    options = EngineOptions(
        chosen.model,
        revision=chosen.revision,
        dtype=chosen.dtype,
        context_length=chosen.context_length,
        max_running=max(DEFAULT_MAX_RUNNING, *(len(workload.prompts) for workload in chosen.workloads)),
        memory_share=chosen.memory_share,
    )
    (a, b) = (Wanted(*side) for side in chosen.compare)
    _say(chosen.model, f"loading, sides {a.name} and {b.name}")
    sides = alone(lambda: open_sides(options, (a, b)))
    described = [describe(options, a), describe(options, b)]
    return _Opened(sides, {"sides": described, "engine": asdict(options), **surroundings(), **_asked(chosen)})


def _asked(chosen: argparse.Namespace) -> dict[str, Any]:
    names = ("tokens", "temperature", "top_p", "seed")
    return {"asked": {name: getattr(chosen, name) for name in names}}
