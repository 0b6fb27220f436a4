"""The index of earlier text beside the suffix tree of ArcticInference: `python -m tools.suffix_peer`.

The same outputs (see `tools.suffix_scale`) are fed to both, the same held-out ones replayed, in turn, each
time in a fresh process. ArcticInference need not be installed where Outrider is: `--peer-python` names an
interpreter that has it. Times are of the calls alone, without what makes their arguments. Run it alone on
the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import statistics
import subprocess
import sys
import tempfile
import time
from array import array
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, Protocol, TypeVar

FED, HELD_OUT, OUTPUT, PROMPT, DEPTH = 2000, 200, 500, 100, 8
"""Outputs that are fed, and replayed; tokens of each, and of what it begins with; the longest proposal."""

KEPT = 1000
"""Outputs that are kept, where the longest stall is looked for."""

PEER_DEPTH = 24
"""Of its tree, in tokens: as vLLM uses it."""

Result = TypeVar("Result")


class _Side(Protocol):
    """An index; its methods take what `tokens` has made."""

    def tokens(self, some: Sequence[int]) -> Any: ...
    def begin(self, request: int, prompt: Any) -> None: ...
    def wrote(self, request: int, tokens: Any) -> None: ...
    def end(self, request: int, output: Any) -> None: ...
    def look_up(self, request: int, context: Any) -> Sequence[int]: ...


class _Ours:
    """Requests' texts and one tenant's history, as the suffix proposer has them."""

    def __init__(self, kept: int | None) -> None:
        from outrider_serving.suffix.history import History
        from outrider_serving.suffix.indexes import compiled_indexes
        from outrider_serving.suffix.lookup import Look

        indexes = compiled_indexes()
        if indexes is None:
            sys.exit("there is no compiled index for this machine")
        self._indexes, self._look = indexes, Look()
        self._history = History(indexes)
        self._history.hold(self, OUTPUT * (kept or 2 * FED))
        self._texts: dict[int, Any] = {}

    def tokens(self, some: Sequence[int]) -> array[int]:
        return array("i", some)

    def begin(self, request: int, prompt: array[int]) -> None:
        self._texts[request] = self._indexes.text(len(prompt))
        self._texts[request].extend(prompt)

    def wrote(self, request: int, tokens: array[int]) -> None:
        self._texts[request].extend(tokens)

    def end(self, request: int, output: array[int]) -> None:
        self._texts.pop(request).discard()
        self._history.learn("", output, request)

    def look_up(self, request: int, context: array[int]) -> Sequence[int]:  # noqa: ARG002
        text, history = self._texts[request], self._history.index("")
        assert history is not None
        return self._indexes.look_up(text, (text, history), self._look, DEPTH, DEPTH).tokens


class _Peer:
    """ArcticInference's; its tree takes tokens in as they come."""

    def __init__(self, kept: int | None) -> None:
        import numpy
        from arctic_inference.suffix_decoding import SuffixDecodingCache  # type: ignore[import-not-found]

        self._numpy = numpy
        self._cache = SuffixDecodingCache(max_tree_depth=PEER_DEPTH, max_cached_requests=kept or -1)

    def tokens(self, some: Sequence[int]) -> Any:
        return self._numpy.asarray(some, dtype=self._numpy.int32)

    def begin(self, request: int, prompt: Any) -> None:
        self._cache.start_request(request, prompt)

    def wrote(self, request: int, tokens: Any) -> None:
        self._cache.add_active_response(request, tokens)

    def end(self, request: int, output: Any) -> None:  # noqa: ARG002
        self._cache.stop_request(request)

    def look_up(self, request: int, context: Any) -> Sequence[int]:
        found = self._cache.speculate(
            request, context, max_spec_tokens=DEPTH, max_spec_factor=1.0, min_token_prob=0.1
        )
        return list(found.token_ids)


SIDES: dict[str, Callable[[int | None], _Side]] = {"ours": _Ours, "ArcticInference": _Peer}


class _Clock:
    """Seconds of each call."""

    def __init__(self) -> None:
        self.calls: list[float] = []

    def __call__(self, work: Callable[..., Result], *arguments: Any) -> Result:
        began = time.perf_counter()
        result = work(*arguments)
        self.calls.append(time.perf_counter() - began)
        return result


def feed(side: _Side, outputs: Sequence[array[int]], first: int = 0) -> list[float]:
    """Let requests write these, numbered from `first` on; the seconds of each call."""
    clock = _Clock()
    for request, output in enumerate(outputs, first):
        clock(side.begin, request, side.tokens(()))
        clock(side.wrote, request, side.tokens(output))
        clock(side.end, request, side.tokens(output))
    return clock.calls


def replay(side: _Side, outputs: Sequence[array[int]]) -> dict[str, float]:
    """Look up before every step of outputs, as if the target confirmed each right token."""
    look_ups, extends = _Clock(), _Clock()
    proposed = right = fresh = 0
    for request, output in enumerate(outputs, FED):
        side.begin(request, side.tokens(output[:PROMPT]))
        at = PROMPT
        while at < OUTPUT:
            found = look_ups(side.look_up, request, side.tokens(output[max(0, at - PEER_DEPTH) : at]))
            same = 0
            while same < min(len(found), OUTPUT - at) and found[same] == output[at + same]:
                same += 1
            proposed, right = proposed + min(len(found), OUTPUT - at), right + same
            more = output[at : at + same + 1]
            extends(side.wrote, request, side.tokens(more))
            at, fresh = at + len(more), fresh + len(more)
        side.end(request, side.tokens(output))
    ordered = sorted(look_ups.calls)
    return {
        "accepted a step": right / len(ordered),
        "tokens of a proposal": proposed / len(ordered),
        "share that was right": right / proposed,
        "look-up p50, us": 1e6 * ordered[len(ordered) // 2],
        "look-up p99, us": 1e6 * ordered[int(0.99 * len(ordered))],
        "extend, us a token": 1e6 * sum(extends.calls) / fresh,
    }


def measure(make: Callable[[int | None], _Side], outputs: Sequence[array[int]]) -> dict[str, float]:
    """All figures of one side, in this process."""
    gc.collect()
    gc.disable()
    side = make(None)
    before = _resident()
    fed = feed(side, outputs[:FED])
    grown = _resident() - before
    tokens = FED * OUTPUT
    found = {"feed, us a token": 1e6 * sum(fed) / tokens, "MiB a million tokens": 1e6 * grown / tokens}
    found |= replay(side, outputs[FED:])
    side, kept = make(KEPT), outputs[:KEPT]
    calls = [feed(side, kept), feed(side, outputs[KEPT:FED], KEPT), feed(side, kept, FED)]
    names = ("it grows", "the first goes", "as much goes as comes")
    return found | {
        f"longest call while {name}, us": 1e6 * max(some) for name, some in zip(names, calls, strict=True)
    }


def _resident() -> float:
    """MiB."""
    pages = int(Path("/proc/self/statm").read_text().split()[1])
    return pages * os.sysconf("SC_PAGE_SIZE") / 2**20


def compare(file: Path, interpreters: dict[str, str], rounds: int) -> dict[str, Any]:
    """Rounds of both sides in turn, and of each figure the median."""
    rows: dict[str, list[dict[str, float]]] = {name: [] for name in interpreters}
    for turn in range(rounds):
        for name in list(interpreters)[:: 1 if turn % 2 else -1]:
            command = [interpreters[name], "-m", "tools.suffix_peer", "--side", name, str(file)]
            said = subprocess.run(command, check=True, stdout=subprocess.PIPE, text=True).stdout
            rows[name].append(json.loads(said))
            print(name, said.strip(), file=sys.stderr)
    medians = {
        name: {figure: round(statistics.median(row[figure] for row in found), 3) for figure in found[0]}
        for name, found in rows.items()
    }
    return {"medians": medians, "rounds": rows}


def main() -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("source", type=Path, help="tokenizer.json of a model; with --side, tokens")
    parser.add_argument("--json", type=Path, help="where the figures go")
    parser.add_argument("--peer-python", default=sys.executable, help="one that has ArcticInference")
    parser.add_argument("--rounds", type=int, default=3, help="of both sides in turn")
    parser.add_argument("--side", choices=SIDES, help="measure one side in this process")
    chosen = parser.parse_args()
    if chosen.side is not None:
        tokens = array("i", chosen.source.read_bytes())
        outputs = [tokens[at : at + OUTPUT] for at in range(0, len(tokens), OUTPUT)]
        print(json.dumps(measure(SIDES[chosen.side], outputs)))
        return 0
    from tools.suffix_scale import corpus

    from outrider_serving.bench.machine import machine

    with tempfile.NamedTemporaryFile(suffix=".tokens") as file:
        for output in corpus(chosen.source, (FED + HELD_OUT) * OUTPUT)[: FED + HELD_OUT]:
            output.tofile(file)
        file.flush()
        interpreters = {"ours": sys.executable, "ArcticInference": chosen.peer_python}
        found = compare(Path(file.name), interpreters, chosen.rounds)
    print(json.dumps(found["medians"], indent=1))
    if chosen.json is not None:
        written = json.dumps({"machine": machine(), **found}, indent=1)
        chosen.json.write_text(f"{written}\n", encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
