"""The flags of `outrider bench`, and what each accepts. No torch."""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any, get_args

from outrider_serving import watch
from outrider_serving.bench.http_side import Endpoint, parse_address
from outrider_serving.bench.pairs import LEAST_PAIRS, MOST_PAIRS
from outrider_serving.bench.workloads import ALLOWED, Workload, parse_workload
from outrider_serving.engine import options as engine
from outrider_serving.settings import Method, PodSettings, Proposer, default_settings

KEY_VARIABLE = "OPENAI_API_KEY"
"""Environment variable with the key that is sent to servers, as OpenAI's own clients have it."""

TRANSFORMERS = "hf"

_SIDES = (
    f"off, ngram, suffix, {TRANSFORMERS} (transformers itself) or a settings file (*.json), whose arm in "
    "force runs"
)


def add_parser(commands: Any) -> None:
    """Add the command to those of `outrider` (what `add_subparsers` gave)."""
    parser = commands.add_parser(
        "bench",
        help="compare two ways to generate, as ratios measured side by side",
        description="Exit status: 1 if a bar is not met or a run failed, 2 for bad input, else 0.",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = parser.add_argument
    add("model", metavar="MODEL", nargs="?", help="a directory, a hub id, or package:NAME; none with --http")
    add(
        "--compare",
        default="ngram,off",
        metavar="A,B",
        type=_sides,
        help=f"two of {_SIDES}; the ratio is A's by B's",
    )
    add("--http", nargs=2, metavar="NAME=URL", type=_server, help="compare two running servers instead")
    add("--workloads", default="open,repeat,code,batch8", metavar="W,...", type=_workloads, help=ALLOWED)
    add("--tokens", default=64, type=_count, metavar="N", help="that each request generates")
    add("--temperature", default=0.0, type=_temperature, help="0 is greedy")
    add("--top-p", default=1.0, type=_share, help="over 0, at most 1; for a temperature over 0")
    add("--seed", type=int, metavar="N", help="makes sampled outputs repeat; they are drawn anew without it")
    add(
        "--pairs",
        default=f"{LEAST_PAIRS}..{MOST_PAIRS}",
        metavar="MIN..MAX",
        type=_pairs,
        help="of each workload",
    )
    add("--bar", type=_positive, metavar="X", help="every ratio must be at least this")
    add("--json", type=Path, metavar="FILE", help="write every pair there")
    add("--revision", metavar="REVISION", help="branch, tag or commit of a hub id")
    add("--dtype", default="auto", choices=get_args(engine.DType), help="dtype of the weights in memory")
    add("--context-length", type=_count, metavar="N", help="the model's own by default")
    add("--memory-share", type=_share, metavar="SHARE", help="for weights, pages and proposers of both sides")


def _sides(text: str) -> tuple[tuple[str, PodSettings | None], ...]:
    """Name and settings of each side; settings None for transformers."""
    names = text.split(",")
    if len(names) != 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not two sides: A,B of {_SIDES}")
    (a, one), (b, other) = map(_side, names)
    return (a, one), (b if b != a else f"{b} again", other)


def _side(text: str) -> tuple[str, PodSettings | None]:
    if text == "off":
        return text, default_settings(Proposer(method=Method.NONE))
    if text in (Method.NGRAM, Method.SUFFIX):
        return text, default_settings(Proposer(method=Method(text)))
    if text == TRANSFORMERS:
        return text, None
    if not text.endswith(".json"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a side: {_SIDES}")
    file = Path(text)
    try:
        return file.stem, watch.parse_settings(watch.read_settings(file))
    except watch.SettingsError as error:
        raise argparse.ArgumentTypeError(f"{text}: {error}") from error


def _server(text: str) -> tuple[str, Endpoint]:
    name, equals, address = text.partition("=")
    if not name or not equals:
        raise argparse.ArgumentTypeError(f"{text!r} is not a server as NAME=http://HOST:PORT")
    try:
        return name, Endpoint(parse_address(address))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error


def _workloads(text: str) -> tuple[Workload, ...]:
    try:
        found = tuple(parse_workload(name) for name in text.split(","))
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from error
    if len({workload.name for workload in found}) < len(found):
        raise argparse.ArgumentTypeError(f"{text!r} names a workload twice")
    return found


def _pairs(text: str) -> tuple[int, int]:
    found = re.fullmatch(r"(\d{1,6})(?:\.\.(\d{1,6}))?", text, re.ASCII)
    least, most = (int(found[1]), int(found[2] or found[1])) if found else (0, 0)
    if not 2 <= least <= most:
        raise argparse.ArgumentTypeError(
            f"{text!r} is not MIN..MAX pairs, at least 2 and the first at most the second"
        )
    return least, most


def _count(text: str) -> int:
    if not re.fullmatch(r"[1-9]\d{0,8}", text, re.ASCII):
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number of at least 1")
    return int(text)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return math.nan


def _temperature(text: str) -> float:
    if not 0 <= (value := _number(text)) <= 2:
        raise argparse.ArgumentTypeError(f"{text!r} is not a temperature (0 to 2)")
    return value


def _share(text: str) -> float:
    if not 0 < (value := _number(text)) <= 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not over 0 and at most 1")
    return value


def _positive(text: str) -> float:
    if not 0 < (value := _number(text)) < math.inf:
        raise argparse.ArgumentTypeError(f"{text!r} is not a ratio over 0")
    return value
