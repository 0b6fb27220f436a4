"""Where a reader of one stream is: what it has read, what it has read before, and what it missed.

Pure: entries come in, decisions go out. Entries may come twice: what is re-read after a failover, what was
written again after a time-out or a loss. They are told apart by the digest of their record. Ids of entries
are numbers: milliseconds * 2**64 + sequence.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider_serving.suffix.shared.record import Record, Refusal, decode, digest

MAX_ORIGINS = 4096
"""Writers of a stream whose numbers are watched; of more, those longest unseen are forgotten."""


LATE_MS = 60_000
"""An entry that is so much younger than its outputs is not left to the trimming by ids."""


def parse_id(text: bytes) -> int:
    """An entry's id as a number; ValueError where it is none."""
    milliseconds, _, sequence = text.partition(b"-")
    return (int(milliseconds) << 64) + int(sequence)


def format_id(number: int) -> str:
    """The id as Redis spells it."""
    return f"{number >> 64}-{number & (2**64 - 1)}"


@dataclass(slots=True)
class _Numbers:
    """Of one origin: it numbers its records without holes, so that what is not there was lost."""

    first: int
    last: int
    seen: int = 1

    @property
    def missing(self) -> int:
        return self.last - self.first + 1 - self.seen


@dataclass(frozen=True, slots=True)
class Read:
    """An entry that was read, and what its record says."""

    id: int
    raw: bytes
    digest: int | None
    record: Record | Refusal


def judge(entries: Sequence[tuple[int, bytes | None]], vocab_size: int) -> list[Read]:
    """Decode entries. Pure, so that a thread may do it."""
    return [
        Read(entry, b"", None, Refusal.FOREIGN)
        if raw is None
        else Read(entry, raw, digest(raw), decode(raw, vocab_size))
        for entry, raw in entries
    ]


class Cursor:
    """The reader of one tenant's stream.

    What it remembers is bounded by what the stream can hold: `entries`.
    """

    def __init__(self, tenant: str, entries: int) -> None:
        """Begin before a stream's first entry; it holds about `entries` (Redis trims a little late)."""
        self.tenant = tenant
        self.caught_up = False
        """Whether a read has come to the stream's end since it began."""
        self.begun = False
        """Whether it is known where reading begins."""
        self.live = False
        """Whether it was read to its end just now: what comes is news, which is waited for."""
        self.ended_at: float | None = None
        """When a read came to the stream's end last, on the monotonic clock."""
        self.helping = 4
        """Entries that are read at a time while it is behind: as many as are taken in the time for that."""
        self.helped_at = 0.0
        """When it was read last while it was behind, on the monotonic clock."""
        self.broken = False
        """Whether something else than a stream has its key."""
        self.length = 0
        """Entries of the stream when it was last looked at."""
        self.bound = 2 * entries + 256
        """Entries that it remembers."""
        self._missed = 0  # in what was read before some was left out
        self._begin()
        self.lap = 0
        """Changes when reading begins again: what was asked for before is not for this cursor any more."""

    def _begin(self) -> None:
        self.position = 0
        self.caught_up = self.live = self.begun = False
        self._left_out, self._begun_after = 0, 0
        self._places: deque[tuple[int, int | None]] = deque()  # ids and digests, as they were read
        self._known: dict[int, int] = {}  # the last id by digest
        self._earlier: dict[int, None] = {}  # digests that were known when reading began again
        self._late: dict[int, int] = {}  # when outputs were finished, by the entries that came much later
        self._origins: OrderedDict[bytes, _Numbers] = OrderedDict()

    def again(self) -> None:
        """Read all of it again, and know what was read before: ids may be others, or lower."""
        earlier, origins = self._earlier | dict.fromkeys(self._known), self._origins
        for known in list(earlier)[: -self.bound]:
            del earlier[known]
        self._begin()
        self._earlier, self._origins = earlier, origins
        self.lap += 1

    def anew(self) -> None:
        """Begin a stream that was purged: nothing is known any more."""
        self._missed = 0
        self._begin()
        self.lap += 1

    def begin_after(self, entry: int, left_out: int) -> None:
        """Leave out what could not be kept: the entries up to this one. They are no gap.

        Args:
            entry: its id, or 0 to leave nothing out.
            left_out: so many are there.
        """
        self.begun = True
        self.position = max(self.position, entry)
        self._left_out, self._begun_after = left_out, self.position
        if left_out:
            self._missed = self.gaps
            self._origins.clear()

    def passed(self, entry: int, digest: int | None) -> bool:
        """Note that an entry was read; whether its record is new (without a digest it is none)."""
        self.position = entry
        self._places.append((entry, digest))
        while len(self._places) > self.bound:
            self._drop_first()
        if digest is None:
            return False
        new = digest not in self._known and digest not in self._earlier
        self._earlier.pop(digest, None)
        self._known[digest] = entry
        return new

    def is_there(self, digest: int) -> bool:
        """Whether the stream was seen to hold a record since reading began."""
        return digest in self._known

    def finished(self, entry: int, created: int) -> None:
        """Note when (ms) outputs were finished: what was written late must go before its id tells."""
        if (entry >> 64) - created > LATE_MS and len(self._late) < self.bound:
            self._late[entry] = created

    def overdue(self, oldest: int) -> list[int]:
        """Entries that are noted as finished before `oldest` (ms)."""
        return sorted(entry for entry, created in self._late.items() if created < oldest)

    def removed(self, entries: Iterable[int]) -> None:
        """Forget entries that are not in the stream any more."""
        gone = set(entries)
        kept = deque[tuple[int, int | None]]()
        for place in self._places:
            if place[0] in gone:
                self._forget(*place)
            else:
                kept.append(place)
        self._places = kept

    def numbered(self, origin: bytes, number: int) -> None:
        """Note the number of a new record."""
        numbers = self._origins.get(origin)
        if numbers is None:
            self._origins[origin] = _Numbers(number, number)
            if len(self._origins) > MAX_ORIGINS:
                self._origins.popitem(last=False)
            return
        self._origins.move_to_end(origin)
        if number >= numbers.first:  # else it was written again, and lay before all that could be missed
            numbers.last = max(numbers.last, number)
            numbers.seen += 1

    @property
    def gaps(self) -> int:
        """Records that never came although later and earlier ones of their origins did."""
        return self._missed + sum(max(0, numbers.missing) for numbers in self._origins.values())

    def looked_at(self, length: int, first: int, last: int, *, position: int, lap: int) -> None:
        """Take what the stream holds: `length` entries with ids from `first` to `last` (all 0 if none).

        `position` and `lap` are those of this cursor when that was asked for. What was trimmed is forgotten.
        Where the last id is before the position, this is another stream.
        """
        if lap != self.lap:
            return
        if last < position and (length or self._places):
            self.again()
        self.length = length
        while self._places and self._places[0][0] <= position and (not length or self._places[0][0] < first):
            self._drop_first()
        if first > self._begun_after:
            self._left_out = 0
        elif last <= position == self.position:
            self._left_out = max(0, length - len(self._places))

    @property
    def lag(self) -> int:
        """Entries that were there when it was last looked at, and not read yet, but for what was left out."""
        return max(0, self.length - self._left_out - len(self._places))

    def _drop_first(self) -> None:
        self._forget(*self._places.popleft())

    def _forget(self, entry: int, digest: int | None) -> None:
        self._late.pop(entry, None)
        if digest is not None and self._known.get(digest) == entry:
            del self._known[digest]


def share(cursors: Iterable[Cursor], entries: int) -> int:
    """How many entries to read of each so that all together are at most `entries`, but one of each."""
    return max(1, entries // max(1, sum(1 for _ in cursors)))
