"""Records: finished outputs of one tenant as bytes, with a version, a checksum and a bounded size.

A record is one entry of a stream (little endian):

| bytes | what |
| --- | --- |
| 4 | magic |
| 1 | format's version |
| 1 | flags: 0, none is known |
| 2 | outputs |
| 8 | origin: random, of one process and tenant |
| 8 | number of the record among those of its origin, without holes |
| 8 | generation: the tenant's last purge that the requests knew when they came |
| 8 | time at which the outputs were finished (ms of Redis) |
| 4 | tokens |
| ... | zlib: int32 length of each output, then int32 tokens of all of them |
| 4 | CRC-32 of everything before |

Nothing in it is trusted: reading is bounded in time and memory whatever the bytes are.
"""

from __future__ import annotations

import hashlib
import struct
import zlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import pairwise

import numpy as np
from numpy.typing import NDArray

from outrider_serving.suffix.shared.options import MAX_BYTES

MAX_TOKENS = 32 * 1024
"""Of a record, whatever it is compressed to."""

MAX_OUTPUTS = 1024
"""Of a record."""

OVERLAP = 32
"""Tokens at the end of a part of an output that the next part begins with, so that matches go on across."""

_MAGIC = b"ORSL"
_VERSION = 1
_HEAD = struct.Struct("<4sBBH8sQQQI")
_CHECK = struct.Struct("<I")
_FRAME = _HEAD.size + _CHECK.size
_LIKELY_TOKENS = 8 * 1024  # most often these are compressed to less than MAX_BYTES


class Refusal(StrEnum):
    """Why bytes are not taken as a record."""

    FOREIGN = "foreign"
    VERSION = "version"
    CHECKSUM = "checksum"
    LENGTH = "length"
    TOKENS = "tokens"


@dataclass(frozen=True, slots=True)
class Payload:
    """Outputs of one record, compressed."""

    outputs: int
    tokens: int
    data: bytes


@dataclass(frozen=True, slots=True)
class Record:
    """What a record says."""

    origin: bytes
    number: int
    generation: int
    created: int
    """ms of Redis."""
    outputs: tuple[array[int], ...]
    """int32 tokens of each output or part of one."""

    @property
    def tokens(self) -> int:
        """Of all outputs."""
        return sum(map(len, self.outputs))


def digest(raw: bytes) -> int:
    """64 bits that tell records apart."""
    return int.from_bytes(hashlib.blake2b(raw, digest_size=8).digest(), "little")


def compress(outputs: Sequence[array[int]]) -> list[Payload]:
    """Outputs (int32 each, none empty) as payloads of records, each of which keeps within all limits.

    Where an output does not fit in one, its parts overlap by OVERLAP tokens.
    """
    payloads: list[Payload] = []
    group: list[array[int]] = []
    size = 0
    for part in (part for output in outputs for part in _cut(output, MAX_TOKENS)):
        if group and (size + len(part) > _LIKELY_TOKENS or len(group) == MAX_OUTPUTS):
            payloads += _fit(group)
            group, size = [], 0
        group.append(part)
        size += len(part)
    return payloads + _fit(group) if group else payloads


def seal(payload: Payload, *, origin: bytes, number: int, generation: int, created: int) -> bytes:
    """A payload as the bytes of a record; `origin` has 8 bytes."""
    counts = (payload.outputs, origin, number, generation, created, payload.tokens)
    body = _HEAD.pack(_MAGIC, _VERSION, 0, *counts) + payload.data
    return body + _CHECK.pack(zlib.crc32(body))


def decode(raw: bytes, vocab_size: int) -> Record | Refusal:
    """What bytes say, or why they are refused; their tokens lie in [0, `vocab_size`)."""
    if not raw.startswith(_MAGIC):
        return Refusal.FOREIGN
    if not _FRAME <= len(raw) <= MAX_BYTES:
        return Refusal.LENGTH
    _, version, flags, outputs, origin, number, generation, created, tokens = _HEAD.unpack_from(raw)
    # A later version may have its checksum elsewhere.
    if version != _VERSION:
        return Refusal.VERSION
    if zlib.crc32(raw[: -_CHECK.size]) != _CHECK.unpack_from(raw, len(raw) - _CHECK.size)[0]:
        return Refusal.CHECKSUM
    if flags:
        return Refusal.VERSION
    if not (0 < outputs <= MAX_OUTPUTS and outputs <= tokens <= MAX_TOKENS):
        return Refusal.LENGTH
    numbers = _decompress(raw[_HEAD.size : -_CHECK.size], outputs + tokens)
    if numbers is None:
        return Refusal.LENGTH
    lengths, text = numbers[:outputs], numbers[outputs:]
    if lengths.min() < 1 or int(lengths.sum(dtype=np.int64)) != tokens:
        return Refusal.LENGTH
    if text.min() < 0 or text.max() >= vocab_size:
        return Refusal.TOKENS
    ends = [0, *np.cumsum(lengths).tolist()]
    parts = tuple(array("i", text[start:end].tobytes()) for start, end in pairwise(ends))
    return Record(origin, number, generation, created, parts)


def _cut(tokens: array[int], size: int) -> list[array[int]]:
    """Parts of at most `size` tokens, more than OVERLAP each."""
    if len(tokens) <= size:
        return [tokens]
    return [tokens[at : at + size] for at in range(0, len(tokens) - OVERLAP, size - OVERLAP)]


def _fit(group: list[array[int]]) -> list[Payload]:
    """A group of outputs as one payload, or as those of its halves where it does not fit."""
    lengths = array("i", map(len, group))
    together = np.concatenate([np.frombuffer(part, dtype=np.intc) for part in (lengths, *group)])
    data = zlib.compress(together.astype("<i4").tobytes())
    if _FRAME + len(data) <= MAX_BYTES:
        return [Payload(len(group), sum(lengths), data)]
    if len(group) == 1:
        group = _cut(group[0], len(group[0]) // 2 + OVERLAP)
    middle = len(group) // 2
    return _fit(group[:middle]) + _fit(group[middle:])


def _decompress(data: bytes, count: int) -> NDArray[np.intc] | None:
    """Exactly `count` numbers; None where there are more, fewer, or none. Never makes more than those."""
    stream = zlib.decompressobj()
    try:
        plain = stream.decompress(data, 4 * count)
        # What is left at the end of the limit may be the stream's own end, or more text.
        more = stream.decompress(stream.unconsumed_tail, 1)
    except zlib.error:
        return None
    if len(plain) != 4 * count or more or not stream.eof or stream.unused_data:
        return None
    return np.frombuffer(plain, dtype="<i4").astype(np.intc)
