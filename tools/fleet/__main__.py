"""What the operator costs with many SpeculativeModels: `python -m tools.fleet --help`.

Starts a node of its own, installs the chart, runs the bench within the node's network and ends the node.
Progress goes to standard error, the raw figures to a file, and tables for docs/scale.md to standard output.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import replace
from pathlib import Path
from typing import Any

from tools.fleet.tables import complaints, tables

from outrider_local import images, node, release
from outrider_local.cluster import Cluster
from outrider_local.layout import Layout
from outrider_local.ports import free_port
from outrider_local.report import EXIT_USAGE, ProblemError, complain
from outrider_local.settings import Settings, from_environment


def main(words: Sequence[str] | None = None) -> int:
    """Run the bench; 1 if it fails, or the operator wrote something in a quiet phase."""
    options = _parser().parse_args(words)
    try:
        settings = replace(from_environment(os.environ, options.name), api_port=free_port(), port=free_port())
        with redirect_stdout(sys.stderr), _cluster(settings):
            figures = _inside(settings, options)
    except ProblemError as problem:
        complain(problem)
        return problem.exit_code
    except KeyboardInterrupt:
        return 130
    options.json.parent.mkdir(parents=True, exist_ok=True)
    options.json.write_text(json.dumps(figures, indent=1) + "\n")
    print(tables(figures))
    found = complaints(figures)
    for complaint in found:
        print(f"error: {complaint}", file=sys.stderr)
    return 1 if found else 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tools.fleet", description=__doc__)
    parser.add_argument("--count", type=_positive, default=1000, help="SpeculativeModels (default 1000)")
    parser.add_argument("--namespaces", type=_positive, default=10, help="they are spread over (default 10)")
    parser.add_argument("--idle-seconds", type=_positive, default=180, help="of an idle phase (default 180)")
    parser.add_argument("--singles", type=_positive, default=20, help="single changes (default 20)")
    parser.add_argument(
        "--start-seconds", type=_positive, default=5, help="from a pod's start to its readiness (default 5)"
    )
    parser.add_argument("--name", default="fleet", help="name of the node (default fleet)")
    parser.add_argument(
        "--json", type=Path, default=Path("build/fleet.json"), help="raw figures (default build/fleet.json)"
    )
    return parser


def _positive(text: str) -> int:
    if not text.isdecimal() or not int(text):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


@contextmanager
def _cluster(settings: Settings) -> Iterator[None]:
    """A node with the chart on it, for as long as the context lasts."""
    if node.running(settings) is not None:
        raise ProblemError(
            f"the node {settings.name} runs already", "end it, or choose another --name", EXIT_USAGE
        )
    # A bench that is told to end tears down as one that is interrupted.
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        _local(settings, "node", "up")
        release.install(settings, Cluster(settings), images.provide(settings))
        yield
    finally:
        _local(settings, "node", "down")


def _inside(settings: Settings, options: argparse.Namespace) -> dict[str, Any]:
    """Run the other half in the node's network; its figures."""
    names = ("count", "namespaces", "singles", "idle_seconds", "start_seconds")
    flags = [f"--{name.replace('_', '-')}={getattr(options, name)}" for name in names]
    said = _local(
        settings,
        *("node", "exec", "--network", str(settings.venv / "bin" / "python"), "-m", "tools.fleet.inside"),
        *(*flags, f"--audit-log={Layout(settings.state).audit_log}"),
    )
    figures: dict[str, Any] = json.loads(said.splitlines()[-1])  # without root, sudo is announced before
    return figures


def _local(settings: Settings, *words: str) -> str:
    """Run a command of ``outrider_local`` on the node; its output."""
    done = subprocess.run(
        [sys.executable, "-m", "outrider_local", *words],
        env={**os.environ, **settings.variables()},
        cwd=settings.checkout,
        stdout=subprocess.PIPE,
        text=True,
        check=False,
    )
    if done.returncode:
        raise ProblemError(f"outrider_local {' '.join(words[:3])}: exit status {done.returncode}")
    return done.stdout


if __name__ == "__main__":
    raise SystemExit(main())
