"""Records: what comes out is what went in, and nothing else is taken for a record."""

from __future__ import annotations

import random
import struct
import zlib
from array import array

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.suffix.shared.options import MAX_BYTES
from outrider_serving.suffix.shared.record import (
    MAX_OUTPUTS,
    MAX_TOKENS,
    OVERLAP,
    Record,
    Refusal,
    compress,
    decode,
    digest,
    seal,
)

VOCABULARY = 262_144
ORIGIN = b"12345678"
HEAD = 44  # bytes before what is compressed

outputs_of_any_kind = st.lists(
    st.one_of(
        st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=50),
        st.builds(
            lambda seed, length: random.Random(seed).choices(range(VOCABULARY), k=length),
            st.integers(0, 2**32),
            st.integers(1, 20_000),
        ),
        st.builds(lambda token, length: [token] * length, st.integers(0, 9), st.integers(1, 100_000)),
    ),
    min_size=1,
    max_size=12,
)
counts = st.integers(0, 2**64 - 1)


def sealed(*outputs: list[int], number: int = 1, generation: int = 2, created: int = 3) -> list[bytes]:
    payloads = compress([array("i", output) for output in outputs])
    return [
        seal(payload, origin=ORIGIN, number=number, generation=generation, created=created)
        for payload in payloads
    ]


def forged(data: bytes, *, outputs: int = 1, tokens: int = 4, flags: int = 0, version: int = 1) -> bytes:
    """A record with a right checksum, whatever else it holds."""
    head = struct.pack("<4sBBH8sQQQI", b"ORSL", version, flags, outputs, ORIGIN, 1, 0, 0, tokens)
    assert len(head) == HEAD
    return head + data + struct.pack("<I", zlib.crc32(head + data))


def packed(*numbers: int) -> bytes:
    return zlib.compress(struct.pack(f"<{len(numbers)}i", *numbers))


def joined(parts: list[list[int]], outputs: list[list[int]]) -> bool:
    """Whether parts, of which those of one output overlap, are the outputs in their order."""
    left = list(parts)
    for output in outputs:
        text = left.pop(0)
        while len(text) < len(output):
            assert text[-OVERLAP:] == left[0][:OVERLAP]
            text = text + left.pop(0)[OVERLAP:]
        if text != output:
            return False
    return not left


@given(outputs_of_any_kind, counts, counts, counts)
def test_what_comes_out_is_what_went_in(
    outputs: list[list[int]], number: int, generation: int, created: int
) -> None:
    parts: list[list[int]] = []
    for raw in sealed(*outputs, number=number, generation=generation, created=created):
        assert len(raw) <= MAX_BYTES
        record = decode(raw, VOCABULARY)
        assert isinstance(record, Record)
        about = (record.origin, record.number, record.generation, record.created)
        assert about == (ORIGIN, number, generation, created)
        assert record.tokens <= MAX_TOKENS
        assert len(record.outputs) <= MAX_OUTPUTS
        parts += [list(output) for output in record.outputs]
    assert joined(parts, outputs)


def test_short_outputs_share_a_record_up_to_its_limits() -> None:
    assert len(sealed(*[[1, 2, 3, 4]] * MAX_OUTPUTS)) == 1
    assert len(sealed(*[[1, 2, 3, 4]] * (MAX_OUTPUTS + 1))) == 2
    assert len(sealed([1] * MAX_TOKENS)) == 1
    assert len(sealed([1] * (MAX_TOKENS + 1))) == 2


def test_no_output_is_no_record() -> None:
    assert sealed() == []


@given(st.lists(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), min_size=1, max_size=5))
def test_each_flipped_bit_is_found(outputs: list[list[int]]) -> None:
    (raw,) = sealed(*outputs)
    for bit in range(8 * len(raw)):
        flipped = bytearray(raw)
        flipped[bit // 8] ^= 1 << bit % 8
        assert isinstance(decode(bytes(flipped), VOCABULARY), Refusal), bit


@given(st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=20), st.data())
def test_what_is_cut_or_longer_is_found(tokens: list[int], data: st.DataObject) -> None:
    (raw,) = sealed(tokens)
    cut = data.draw(st.integers(0, len(raw) - 1))
    assert isinstance(decode(raw[:cut], VOCABULARY), Refusal)
    assert isinstance(decode(raw + data.draw(st.binary(min_size=1, max_size=50)), VOCABULARY), Refusal)


@given(st.binary(max_size=200))
def test_any_bytes_are_refused(raw: bytes) -> None:
    assert isinstance(decode(raw, VOCABULARY), Refusal)
    assert isinstance(decode(b"ORSL" + raw, VOCABULARY), Refusal)


@given(st.binary(max_size=200), st.integers(0, 2**16 - 1), st.integers(0, 2**32 - 1))
def test_any_bytes_with_a_right_checksum_are_refused_or_hold_what_they_say(
    data: bytes, outputs: int, tokens: int
) -> None:
    record = decode(forged(data, outputs=outputs, tokens=tokens), VOCABULARY)
    if isinstance(record, Record):
        assert (len(record.outputs), record.tokens) == (outputs, tokens)


GOOD = packed(4, 1, 2, 3, 4)


@pytest.mark.parametrize(
    ("raw", "reason"),
    [
        (b"", Refusal.FOREIGN),
        (b"hello", Refusal.FOREIGN),
        (b"ORSL", Refusal.LENGTH),
        (b"ORSL" + bytes(MAX_BYTES), Refusal.LENGTH),
        (forged(GOOD, version=2), Refusal.VERSION),
        (forged(GOOD, flags=1), Refusal.VERSION),
        (forged(GOOD)[:-1] + b"\0", Refusal.CHECKSUM),
        (forged(GOOD, outputs=0), Refusal.LENGTH),
        (forged(GOOD, outputs=2), Refusal.LENGTH),
        (forged(GOOD, tokens=3), Refusal.LENGTH),
        (forged(GOOD, tokens=5), Refusal.LENGTH),
        (forged(GOOD, outputs=MAX_OUTPUTS + 1, tokens=MAX_TOKENS), Refusal.LENGTH),
        (forged(GOOD, tokens=MAX_TOKENS + 1), Refusal.LENGTH),
        (forged(GOOD[:-1]), Refusal.LENGTH),
        (forged(GOOD + b"x"), Refusal.LENGTH),
        (forged(b"not compressed"), Refusal.LENGTH),
        (forged(b""), Refusal.LENGTH),
        (forged(packed(3, 1, 2, 3, 4)), Refusal.LENGTH),
        (forged(packed(5, -1, 1, 2, 3, 4), outputs=2), Refusal.LENGTH),
        (forged(packed(4, 0, 1, 2, 3, 4), outputs=2), Refusal.LENGTH),
        (forged(packed(2**31 - 1, 2**31 - 1, 6, 1, 2, 3, 4), outputs=3), Refusal.LENGTH),
        (forged(packed(4, 1, 2, 3, -1)), Refusal.TOKENS),
        (forged(packed(4, 1, 2, 3, VOCABULARY)), Refusal.TOKENS),
    ],
)
def test_each_fault_has_its_reason(raw: bytes, reason: Refusal) -> None:
    assert isinstance(decode(forged(GOOD), VOCABULARY), Record)
    assert decode(raw, VOCABULARY) is reason


def test_a_bomb_is_not_inflated(monkeypatch: pytest.MonkeyPatch) -> None:
    inflated = 0
    real = zlib.decompressobj

    class Watched:
        def __init__(self) -> None:
            self._real = real()

        def decompress(self, data: bytes, limit: int) -> bytes:
            nonlocal inflated
            plain = self._real.decompress(data, limit)
            inflated += len(plain)
            return plain

        def __getattr__(self, name: str) -> object:
            return getattr(self._real, name)

    bomb = forged(zlib.compress(bytes(10_000_000)), tokens=MAX_TOKENS)
    assert len(bomb) < MAX_BYTES
    monkeypatch.setattr("zlib.decompressobj", Watched)
    assert decode(bomb, VOCABULARY) is Refusal.LENGTH
    assert inflated <= 4 * (MAX_TOKENS + 2)


def test_records_have_digests_of_their_own() -> None:
    raws = [*sealed([1, 2, 3, 4]), *sealed([1, 2, 3, 4], number=2), *sealed([1, 2, 3, 5])]
    assert len({digest(raw) for raw in raws}) == 3
    assert all(0 <= digest(raw) < 2**64 for raw in raws)
