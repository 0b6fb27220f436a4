"""Bytes to a JSON object, and what is said of bytes that are none."""

import contextlib

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api.body import decode
from outrider_serving.api.errors import ApiError


def test_an_object() -> None:
    assert decode('{"a": "é\\u0000"}'.encode()) == {"a": "é\x00"}


@pytest.mark.parametrize(
    ("raw", "code", "says"),
    [
        (b"", "invalid_json", "line 1 column 0"),
        (b"{", "invalid_json", "line 1 column 1"),
        (b'{"a": }', "invalid_json", "line 1 column 7"),
        (b'{"a": NaN}', "invalid_json", "column 7"),
        (b'{"a": Infinity}', "invalid_json", "column 7"),
        (b'{"a": -Infinity}', "invalid_json", "column 8"),
        (b'{"a": "\\ud800"}', "invalid_json", "escape"),
        (b'{"seed": 1, "seed": 2}', "invalid_json", 'duplicate key "seed" at line 1 column 20'),
        (b'{"a": [{"b": 1, "\\u0062": 1}]}', "invalid_json", 'duplicate key "b"'),
        (b"[1]", "invalid_json", "must be a JSON object"),
        (b'"x"', "invalid_json", "must be a JSON object"),
        (b"[" * 100_000, "invalid_json", "recursion"),
        (b'{"a": ' * 1000 + b"1" + b"}" * 1000, "invalid_json", "recursion"),
        (b'{"a": ' + b"9" * 5000 + b"}", "invalid_json", "number"),
        (b'{"a": "\xff"}', "invalid_utf8", "0xff at offset 7"),
        (b'{"a": "\xed\xa0\x80"}', "invalid_utf8", "0xed at offset 7"),
    ],
)
def test_refused(raw: bytes, code: str, says: str) -> None:
    with pytest.raises(ApiError) as refused:
        decode(raw)
    assert (refused.value.status, refused.value.code) == (400, code)
    assert says in refused.value.message


@given(st.binary(max_size=200))
def test_any_bytes_are_decoded_or_refused(raw: bytes) -> None:
    with contextlib.suppress(ApiError):
        assert isinstance(decode(raw), dict)
