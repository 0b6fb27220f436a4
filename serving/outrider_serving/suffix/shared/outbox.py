"""What waits to be written, and what was written or read and may have to be written again. Pure, bounded."""

from __future__ import annotations

import os
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass, field

from outrider_serving.suffix.shared.record import Payload, compress, digest, seal

_OVERHEAD = 200  # bytes of an object, about
_WRITERS = 4096


@dataclass(frozen=True, slots=True)
class Finished:
    """One output that waits; tokens as int32."""

    tenant: str
    tokens: array[int]
    generation: int
    at: float
    """When it was finished, on the monotonic clock."""

    @property
    def bytes(self) -> int:
        """What it takes of the memory."""
        return 4 * len(self.tokens) + _OVERHEAD


class Outbox:
    """Finished outputs in their order; the oldest give way where there is no room."""

    def __init__(self, capacity: int) -> None:
        """Hold at most `capacity` bytes."""
        self._capacity = capacity
        self._waiting: deque[Finished] = deque()
        self.bytes = 0
        self.tokens = 0

    def __len__(self) -> int:
        return len(self._waiting)

    def put(self, output: Finished) -> int:
        """Append an output; how many gave way."""
        self._waiting.append(output)
        self._count(output, 1)
        dropped = 0
        while self.bytes > self._capacity:
            self._count(self._waiting.popleft(), -1)
            dropped += 1
        return dropped

    def take(self, tokens: int) -> list[Finished]:
        """Remove the oldest, until there are at least as many tokens."""
        taken: list[Finished] = []
        while self._waiting and tokens > 0:
            taken.append(self._waiting.popleft())
            self._count(taken[-1], -1)
            tokens -= len(taken[-1].tokens)
        return taken

    def keep(self, wanted: Callable[[Finished], bool]) -> int:
        """Remove all others; how many."""
        before = len(self._waiting)
        kept = [output for output in self._waiting if wanted(output)]
        self._waiting.clear()
        self.bytes = self.tokens = 0
        for output in kept:
            self._waiting.append(output)
            self._count(output, 1)
        return before - len(kept)

    def _count(self, output: Finished, sign: int) -> None:
        self.bytes += sign * output.bytes
        self.tokens += sign * len(output.tokens)


@dataclass(slots=True)
class Group:
    """Outputs that records may hold together."""

    tenant: str
    generation: int
    created: int
    outputs: list[array[int]] = field(default_factory=list)
    payloads: list[Payload] = field(default_factory=list)

    def compress(self) -> None:
        """Make the payloads. Pure, so that a thread may do it."""
        self.payloads = compress(self.outputs)


@dataclass(frozen=True, slots=True)
class Sealed:
    """A record of this process, and how much it holds."""

    raw: bytes
    digest: int
    outputs: int
    tokens: int


@dataclass(frozen=True, slots=True)
class Batch:
    """Records of one tenant that are written together."""

    tenant: str
    generation: int
    created: int
    records: tuple[Sealed, ...]

    @property
    def bytes(self) -> int:
        """What it takes of the memory."""
        return sum(len(record.raw) + _OVERHEAD for record in self.records)

    @property
    def tokens(self) -> int:
        """Of all records."""
        return sum(record.tokens for record in self.records)

    @property
    def outputs(self) -> int:
        """Of all records."""
        return sum(record.outputs for record in self.records)


@dataclass(slots=True)
class _Writer:
    origin: bytes
    number: int = 0


class Sealer:
    """Gives records their numbers: of each tenant without holes.

    Each tenant has an origin of its own, so that a tenant that is forgotten (of more than 4,096, the one that
    wrote longest ago) begins another one and no number comes twice.
    """

    def __init__(self) -> None:
        self._writers: OrderedDict[str, _Writer] = OrderedDict()

    def seal(self, tenant: str, generation: int, created: int, payloads: list[Payload]) -> Batch:
        """Payloads as records of a tenant; `created` in ms of Redis."""
        writer = self._writers.setdefault(tenant, _Writer(os.urandom(8)))
        self._writers.move_to_end(tenant)
        if len(self._writers) > _WRITERS:
            self._writers.popitem(last=False)
        records = []
        for payload in payloads:
            writer.number += 1
            origin, number = writer.origin, writer.number
            raw = seal(payload, origin=origin, number=number, generation=generation, created=created)
            records.append(Sealed(raw, digest(raw), payload.outputs, payload.tokens))
        return Batch(tenant, generation, created, tuple(records))

    def is_own(self, tenant: str, origin: bytes) -> bool:
        """Whether this process wrote a record."""
        writer = self._writers.get(tenant)
        return writer is not None and writer.origin == origin


@dataclass(frozen=True, slots=True)
class Remembered:
    """A record that may have to be written again."""

    tenant: str
    generation: int
    created: int
    """ms of Redis."""
    raw: bytes
    epoch: str
    """In which it was seen in Redis."""


class Memory:
    """The latest records, own and received, by their digests; the oldest give way where there is no room."""

    def __init__(self, capacity: int) -> None:
        """Hold at most `capacity` bytes."""
        self._capacity = capacity
        self._records: OrderedDict[int, Remembered] = OrderedDict()
        self.bytes = 0

    def __len__(self) -> int:
        return len(self._records)

    def __contains__(self, number: int) -> bool:
        return number in self._records

    def values(self) -> list[Remembered]:
        """Records, the oldest first."""
        return list(self._records.values())

    def items(self) -> list[tuple[int, Remembered]]:
        """Digests and records, the oldest first."""
        return list(self._records.items())

    def put(self, number: int, record: Remembered) -> None:
        """Remember a record with this digest."""
        if number not in self._records:
            self.bytes += len(record.raw) + _OVERHEAD
        self._records[number] = record
        while self.bytes > self._capacity:
            self._forget(next(iter(self._records)))

    def outlive(self, oldest: int) -> None:
        """Forget those that are older (ms of Redis)."""
        self.keep(lambda record: record.created >= oldest)

    def keep(self, wanted: Callable[[Remembered], bool]) -> None:
        """Forget all others."""
        for number in [number for number, record in self._records.items() if not wanted(record)]:
            self._forget(number)

    def _forget(self, number: int) -> None:
        self.bytes -= len(self._records.pop(number).raw) + _OVERHEAD
