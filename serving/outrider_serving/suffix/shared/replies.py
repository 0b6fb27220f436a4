"""What Redis answers, checked: a server may be anything that listens on a port."""

from __future__ import annotations

from dataclasses import dataclass

from outrider_serving.suffix.shared import keys
from outrider_serving.suffix.shared.cursor import parse_id


class NonsenseError(Exception):
    """An answer that Redis does not give to this command. The message repeats none of it: it may be text."""


@dataclass(frozen=True, slots=True)
class Extent:
    """What a stream holds: how many entries, with ids from `first` to `last` (0 where there are none)."""

    length: int
    first: int
    last: int


@dataclass(frozen=True, slots=True)
class Looked:
    """Answer of the script LOOK."""

    now: int
    """ms of Redis."""
    epoch: str
    """Empty where there is none."""
    version: bytes
    """Of the tombstones; empty where nothing tells whether they are as they were."""
    extents: tuple[Extent, ...]


Entry = tuple[int, bytes | None]
"""Id and record of an entry; None where its fields are not ours."""


def _other(expected: str, reply: object) -> NonsenseError:
    """Something else than was expected came: its kind and length tell nobody's text."""
    match reply:
        case None:
            came = "nothing"
        case list():
            came = f"an array of {len(reply)}"
        case bytes():
            came = f"a text of {len(reply)} bytes"
        case int():
            came = "a number"
        case _:
            came = "an error"
    return NonsenseError(f"{expected} was expected, and {came} came")


def number(reply: object) -> int:
    """An integer, as one or as text."""
    try:
        return int(reply)  # type: ignore[call-overload,no-any-return]
    except (TypeError, ValueError) as error:
        raise _other("a number", reply) from error


def items(reply: object, count: int | None = None) -> list[object]:
    """An array, of `count` items where that is told."""
    if not isinstance(reply, list) or (count is not None and len(reply) != count):
        raise _other("an array" if count is None else f"an array of {count}", reply)
    return reply


def text(reply: object) -> bytes:
    """A text."""
    if not isinstance(reply, bytes):
        raise _other("a text", reply)
    return reply


def entry_id(reply: object) -> int:
    """An entry's id."""
    try:
        return parse_id(text(reply))
    except ValueError as error:
        raise _other("an entry's id", reply) from error


def looked(reply: object, logs: int) -> Looked:
    """Answer of LOOK for as many logs."""
    now, epoch, version, extents = items(reply, 4)
    return Looked(
        number(now),
        text(epoch).decode("ascii", "replace")[:64],
        text(version)[:64],
        tuple(Extent(number(n), entry_id(first), entry_id(last)) for n, first, last in _rows(extents, logs)),
    )


def tombstones(reply: object) -> dict[str, int]:
    """Names and values of a hash; those of what is no tenant are left out."""
    flat = items(reply)
    if len(flat) % 2:
        raise _other("an array of names and values", reply)
    found: dict[str, int] = {}
    for name, purge in zip(flat[::2], flat[1::2], strict=True):
        tenant = keys.read(text(name))
        if tenant is not None and text(purge).isdigit() and len(text(purge)) < 16:
            found[tenant] = number(purge)
    return found


def clock(reply: object) -> int:
    """Answer of TIME, in ms."""
    seconds, microseconds = items(reply, 2)
    return 1000 * number(seconds) + number(microseconds) // 1000


def _rows(extents: object, logs: int) -> list[list[object]]:
    return [items(row, 3) for row in items(extents, logs)]


def streams(reply: object) -> dict[bytes, list[Entry]]:
    """Answer of XREAD: entries by key."""
    if reply is None:
        return {}
    found: dict[bytes, list[Entry]] = {}
    for pair in items(reply):
        key, got = items(pair, 2)
        found[text(key)] = entries(got)
    return found


def entries(reply: object) -> list[Entry]:
    """Answer of XRANGE."""
    return [_entry(*items(entry, 2)) for entry in items(reply)]


def _entry(entry: object, fields: object) -> Entry:
    # Fields of an entry that was deleted while it was read are nil.
    if isinstance(fields, list) and len(fields) == 2 and fields[0] == b"r":
        return entry_id(entry), text(fields[1])
    return entry_id(entry), None


def written(reply: object) -> tuple[int, int]:
    """Answer of PUBLISH: records written, and the tombstone that forbade it or 0."""
    count, tombstone = items(reply, 2)
    return number(count), number(tombstone)


def run_id(reply: object) -> str:
    """The server's run in an answer of INFO; empty where it is not told."""
    for line in text(reply).splitlines():
        if line.startswith(b"run_id:"):
            return line[7:].decode("ascii", "replace").strip()[:64]
    return ""


def tenants(reply: object) -> list[str]:
    """Answer of ZREVRANGE; what is no tenant is left out."""
    return [tenant for name in items(reply) if (tenant := keys.read(text(name))) is not None]
