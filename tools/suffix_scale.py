"""What the index of earlier text costs from 10,000 tokens to 10 million: `python -m tools.suffix_scale`.

Real text: source files of the interpreter and of the installed packages, by the tokenizer of a model, cut
into outputs of 500 tokens and shuffled with a fixed seed; the last of them are held out, to be looked up.
Writes what it measured as JSON, and a picture of it. Run it alone on the machine.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import random
import sys
import sysconfig
import time
from array import array
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import Indexes, compiled_indexes, twin_indexes
from outrider_serving.suffix.lookup import Look

OUTPUT = 500
PROMPT = 100
DEPTH = 8
HELD_OUT = 40
SIZES = (10_000, 30_000, 100_000, 300_000, 1_000_000, 3_000_000, 10_000_000)
TWIN_LIMIT = 1_000_000
EVICTION_LIMIT = 1_000_000


def sources() -> Iterator[str]:
    """Texts of source files."""
    for name in ("stdlib", "purelib"):
        for path in sorted(Path(sysconfig.get_paths()[name]).rglob("*.py")):
            try:
                yield path.read_text(encoding="utf-8")
            except (UnicodeDecodeError, OSError):
                continue


def corpus(tokenizer_file: Path, tokens: int) -> list[array[int]]:
    """Outputs of real tokens, shuffled; so many tokens, and what is held out."""
    from tokenizers import Tokenizer

    tokenizer = Tokenizer.from_file(str(tokenizer_file))
    found: list[array[int]] = []
    wanted = tokens // OUTPUT + HELD_OUT
    for text in sources():
        ids = tokenizer.encode(text, add_special_tokens=False).ids
        found += [array("i", ids[at : at + OUTPUT]) for at in range(0, len(ids) - OUTPUT + 1, OUTPUT)]
        if len(found) >= wanted:
            break
    if len(found) < wanted:
        sys.exit(f"there are {len(found)} outputs of {OUTPUT} tokens, but {wanted} are needed")
    random.Random(0).shuffle(found)
    return found[:wanted]


def percentile(values: Sequence[float], share: float) -> float:
    """In the unit of the values."""
    return sorted(values)[min(len(values) - 1, int(share * len(values)))]


def microseconds(values: Sequence[float]) -> dict[str, float]:
    """Percentiles of seconds."""
    named = {"p50": 0.5, "p99": 0.99, "p999": 0.999, "max": 1.0}
    return {name: round(1e6 * percentile(values, share), 2) for name, share in named.items()}


def replay(indexes: Indexes, log: Any, held_out: Sequence[array[int]]) -> dict[str, Any]:
    """Looks up before every step of held-out outputs, as if the target confirmed each right token."""
    look, seconds, extends, accepted = Look(), list[float](), list[float](), 0
    for output in held_out:
        text = indexes.text(PROMPT)
        text.extend(output[:PROMPT])
        at = PROMPT
        while at < OUTPUT:
            began = time.perf_counter()
            found = indexes.look_up(text, (text, log), look, DEPTH, DEPTH)
            seconds.append(time.perf_counter() - began)
            right = 0
            while right < min(len(found.tokens), OUTPUT - at) and found.tokens[right] == output[at + right]:
                right += 1
            accepted += right
            fresh = output[at : at + right + 1]
            began = time.perf_counter()
            text.extend(fresh)
            extends.append((time.perf_counter() - began) / len(fresh))
            at += len(fresh)
    return {
        "look_up_us": microseconds(seconds),
        "extend_us_per_token": microseconds(extends),
        "accepted_per_step": round(accepted / len(seconds), 3),
    }


def scale(indexes: Indexes, outputs: Sequence[array[int]], sizes: Sequence[int]) -> list[dict[str, Any]]:
    """Figures at each size of one growing log."""
    log, rows, at = indexes.log(sizes[-1]), list[dict[str, Any]](), 0
    for size in sizes:
        began, first = time.perf_counter(), at
        while at * OUTPUT < size:
            log.extend(outputs[at])
            log.end()
            at += 1
        spent = (time.perf_counter() - began) / max(1, (at - first) * OUTPUT)
        row = {"tokens": at * OUTPUT, "append_us_per_token": round(1e6 * spent, 3)}
        row["bytes_per_token"] = round(log.size.bytes / log.size.tokens, 1)
        rows.append(row | replay(indexes, log, outputs[-HELD_OUT:]))
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def eviction(indexes: Indexes, outputs: Sequence[array[int]]) -> dict[str, Any]:
    """How long the longest call takes that remembers an output, while as much is evicted as comes."""
    history = History(indexes)
    history.hold("the tool", EVICTION_LIMIT)
    seconds = list[float]()
    for number, output in enumerate(outputs[: 3 * EVICTION_LIMIT // OUTPUT]):
        began = time.perf_counter()
        history.learn("tenant", output, number)
        seconds.append(time.perf_counter() - began)
    full = seconds[len(seconds) // 2 :]
    return {"tokens": history.size.tokens, "evicted": history.size.evicted, "learn_us": microseconds(full)}


_COLOURS = {"look-up p50": "#1f77b4", "look-up p99": "#d62728", "append a token": "#2ca02c"}


def picture(compiled: Sequence[dict[str, Any]]) -> str:
    """Latency and memory over size, as SVG."""
    width, height, left, top, plot_w, plot_h = 760, 380, 70, 40, 560, 270
    lows, highs = (4, -2), (7, 3)  # decades of tokens and of microseconds

    def x(tokens: float) -> float:
        return left + plot_w * (math.log10(tokens) - lows[0]) / (highs[0] - lows[0])

    def y(us: float) -> float:
        return top + plot_h * (1 - (math.log10(us) - lows[1]) / (highs[1] - lows[1]))

    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}" font-family="sans-serif" '
        'font-size="12"><rect width="100%" height="100%" fill="white"/>',
        f'<text x="{left}" y="22" font-size="15">The suffix index from 10,000 to 10 million tokens</text>',
    ]
    for decade in range(lows[1], highs[1] + 1):
        at = y(10.0**decade)
        label = f"{10.0**decade:g} µs" if decade < 3 else "1 ms"
        parts.append(f'<line x1="{left}" x2="{left + plot_w}" y1="{at:.1f}" y2="{at:.1f}" stroke="#ddd"/>')
        parts.append(f'<text x="{left - 8}" y="{at + 4:.1f}" text-anchor="end">{label}</text>')
    for row in compiled:
        at = x(row["tokens"])
        parts.append(
            f'<text x="{at:.1f}" y="{top + plot_h + 18}" text-anchor="middle">{_count(row["tokens"])}</text>'
            f'<text x="{at:.1f}" y="{top + plot_h + 36}" text-anchor="middle" fill="#666">'
            f"{row['bytes_per_token']:.0f} B</text>"
        )
    parts.append(f'<text x="{left}" y="{top + plot_h + 56}">tokens in the log, and bytes for each</text>')
    series = {
        "look-up p50": [row["look_up_us"]["p50"] for row in compiled],
        "look-up p99": [row["look_up_us"]["p99"] for row in compiled],
        "append a token": [row["append_us_per_token"] for row in compiled],
    }
    for name, values in series.items():
        points = [(x(row["tokens"]), y(value)) for row, value in zip(compiled, values, strict=True)]
        path = " ".join(f"{a:.1f},{b:.1f}" for a, b in points)
        colour = _COLOURS[name]
        parts.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="2"/>')
        last_x, last_y = points[-1]
        parts.append(f'<text x="{last_x + 8:.1f}" y="{last_y + 4:.1f}" fill="{colour}">{name}</text>')
    return "\n".join([*parts, "</svg>"]) + "\n"


def _count(tokens: int) -> str:
    for size, unit in ((1_000_000, "M"), (1_000, "k")):
        if tokens >= size:
            return f"{tokens / size:.0f} {unit}"
    return str(tokens)


def main() -> int:
    """Measure and write; the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("tokenizer", type=Path, help="tokenizer.json of a model")
    parser.add_argument("--json", type=Path, required=True, help="where the figures go")
    parser.add_argument("--svg", type=Path, help="where the picture goes")
    chosen = parser.parse_args()
    compiled = compiled_indexes()
    if compiled is None:
        sys.exit("there is no compiled index for this machine")
    outputs = corpus(chosen.tokenizer, SIZES[-1])
    gc.collect()
    gc.disable()  # as in serving, where what is loaded is frozen
    rows = scale(compiled, outputs, SIZES)
    found = {
        "compiled": rows,
        "plain Python": scale(twin_indexes(), outputs, [size for size in SIZES if size <= TWIN_LIMIT]),
        "eviction": eviction(compiled, outputs),
    }
    chosen.json.write_text(json.dumps(found, indent=1) + "\n", encoding="utf-8")
    if chosen.svg is not None:
        chosen.svg.write_text(picture(rows), encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
