"""Answers to JSON. A large one is spelled part by part, so that nothing else waits for all of it."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

BATCH = 100
"""Items of a list that are spelled at once: well below a millisecond for tokens with their logprobs."""

_JSON = json.JSONEncoder(ensure_ascii=False, allow_nan=False, separators=(",", ":"))


def encoded(answer: Mapping[str, Any]) -> bytes:
    """An object of the API in UTF-8; `choices` are a list, or an iterator that makes them when read.

    The interpreter lets no other thread run while the library spells something, so what has many tokens with
    logprobs is spelled in parts. (Without logprobs a part of a stream is short, and spelled at once.)
    """
    choices = answer.get("choices", [])
    if isinstance(choices, list) and not any(choice.get("logprobs") for choice in choices):
        return _JSON.encode(answer).encode()
    return b"".join(part.encode() for part in parts(answer))


def parts(answer: Mapping[str, Any]) -> Iterator[str]:
    """The object in parts: its choices one by one, their fields one by one, long lists by the batch."""
    return _enclosed(
        "{}",
        (
            _field(name, _enclosed("[]", map(_parts, item)) if name == "choices" else _parts(item))
            for name, item in answer.items()
        ),
    )


def _parts(value: Any) -> Iterator[str]:
    if isinstance(value, Mapping):
        yield from _enclosed("{}", (_field(name, _parts(item)) for name, item in value.items()))
    elif isinstance(value, list) and len(value) > BATCH:
        batches = (value[start : start + BATCH] for start in range(0, len(value), BATCH))
        yield from _enclosed("[]", (iter([_JSON.encode(batch)[1:-1]]) for batch in batches))
    else:
        yield _JSON.encode(value)


def _field(name: str, value: Iterator[str]) -> Iterator[str]:
    yield f"{_JSON.encode(name)}:"
    yield from value


def _enclosed(brackets: str, items: Iterable[Iterator[str]]) -> Iterator[str]:
    before = brackets[0]
    for item in items:
        yield before
        yield from item
        before = ","
    yield brackets[1] if before == "," else brackets
