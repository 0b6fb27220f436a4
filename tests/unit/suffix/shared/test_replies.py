"""Answers of what may not be Redis: taken as they must be, or nonsense; nothing else ever happens."""

from __future__ import annotations

import contextlib
from collections.abc import Callable

import pytest
from hypothesis import given
from hypothesis import strategies as st
from redis.exceptions import ResponseError

from outrider_serving.suffix.shared import replies
from outrider_serving.suffix.shared.line import refusal
from outrider_serving.suffix.shared.replies import Extent, Looked, NonsenseError

anything = st.recursive(
    st.one_of(
        st.none(),
        st.integers(),
        st.binary(max_size=5),
        st.sampled_from([b"r", b"1-1", b"0-0", b"7", b"a", b"run_id:x", b"-1", b"9" * 5000]),
        st.builds(ResponseError, st.just("no")),
    ),
    lambda inner: st.lists(inner, max_size=5),
    max_leaves=15,
)
PARSERS: list[Callable[[object], object]] = [
    lambda reply: replies.looked(reply, 1),
    replies.tombstones,
    replies.clock,
    replies.streams,
    replies.entries,
    replies.written,
    replies.run_id,
    replies.tenants,
]


@given(anything)
def test_whatever_comes_is_taken_or_nonsense(reply: object) -> None:
    for parse in PARSERS:
        with contextlib.suppress(NonsenseError):
            parse(reply)


@given(anything)
def test_what_looks_like_a_look_is_taken_or_nonsense(extents: object) -> None:
    try:
        looked = replies.looked([b"1", b"x", b"v", extents], 1)
    except NonsenseError:
        return
    assert len(looked.extents) == 1


@given(st.lists(st.one_of(st.sampled_from([b"a", b"=single", b"7", b"9" * 20]), anything), max_size=4))
def test_tombstones_are_taken_or_nonsense(flat: list[object]) -> None:
    try:
        found = replies.tombstones(flat)
    except NonsenseError:
        return
    assert all(0 <= purge < 10**15 for purge in found.values())


def test_a_look_is_taken() -> None:
    reply = [b"1000", b"epoch", b"version", [[b"2", b"5-1", b"6-0"], [b"0", b"0-0", b"0-0"]]]
    assert replies.looked(reply, 2) == Looked(
        1000, "epoch", b"version", (Extent(2, (5 << 64) + 1, 6 << 64), Extent(0, 0, 0))
    )
    with pytest.raises(NonsenseError):
        replies.looked(reply, 1)


def test_tombstones_are_taken() -> None:
    pairs = [
        b"a",
        b"12",
        b"=single",
        b"13",
        b"not/ours",
        b"14",
        b"b",
        b"x",
        b"c",
        b"9" * 20,
        b"=version",
        b"7",
    ]
    assert replies.tombstones(pairs) == {"a": 12, "": 13}
    assert replies.clock([b"1900000000", b"999999"]) == 1_900_000_000_999


@pytest.mark.parametrize(
    ("parse", "reply", "told"),
    [
        (replies.number, b"secret", "a number was expected, and a text of 6 bytes came"),
        (replies.number, None, "a number was expected, and nothing came"),
        (replies.clock, [b"1"], "an array of 2 was expected, and an array of 1 came"),
        (replies.entries, 7, "an array was expected, and a number came"),
        (replies.entries, [[b"secret", None]], "an entry's id was expected, and a text of 6 bytes came"),
        (replies.text, ResponseError("secret"), "a text was expected, and an error came"),
        (
            replies.tombstones,
            [b"secret"],
            "an array of names and values was expected, and an array of 1 came",
        ),
    ],
)
def test_nonsense_is_told_without_what_it_says(
    parse: Callable[[object], object], reply: object, told: str
) -> None:
    with pytest.raises(NonsenseError) as caught:
        parse(reply)
    assert str(caught.value) == told


def test_streams_are_taken() -> None:
    reply = [[b"key", [[b"1-0", [b"r", b"raw"]], [b"2-0", [b"x", b"raw"]], [b"3-0", None]]]]
    assert replies.streams(reply) == {b"key": [(1 << 64, b"raw"), (2 << 64, None), (3 << 64, None)]}
    assert replies.streams(None) == {}


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ResponseError("command not allowed when used memory", status_code="OOM"), "OOM"),
        (ResponseError("Error running script: @user_script: 7: -OOM command not allowed"), "OOM"),
        (ResponseError("You can't write", status_code="READONLY"), "READONLY"),
        (ResponseError("MISCONF Redis is configured to save RDB snapshots"), "MISCONF"),
        (ResponseError("WRONGTYPE Operation against a key"), ""),
        (ResponseError("ERR unknown command"), ""),
    ],
)
def test_refusals_are_told_by_their_code(error: ResponseError, code: str) -> None:
    assert refusal(error) == code
