"""All that the shared log knows, and every decision on it. No I/O: `session.py` asks Redis and tells this."""

from __future__ import annotations

import time
from array import array
from collections import OrderedDict, deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TypeAlias

from outrider_serving.suffix.lookup import LEAST_OUTPUT
from outrider_serving.suffix.shared import keys
from outrider_serving.suffix.shared.cursor import Cursor, Read
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.suffix.shared.outbox import Batch, Finished, Group, Memory, Outbox, Remembered, Sealer
from outrider_serving.suffix.shared.record import Record, Refusal, decode
from outrider_serving.suffix.shared.stats import Counts, LogStats, Trouble

MAX_FOLLOWED = 256
"""Tenants; of more, those longest not needed are let go, and read on when needed again."""

MAX_LEFT = 65_536
"""Tenants that were let go, of which it is known how far they were read."""

TAKEN_TOKENS = 16 * 1024
"""Compressed at a time."""

BATCHED = 16
"""Records that one command writes."""

AHEAD_MS = 3_600_000
"""An entry whose outputs are so much newer than now is removed from its stream once it was read: its id is as
wrong, and those who read it later would take it for new again."""

Outputs: TypeAlias = "tuple[array[int], ...]"

Received: TypeAlias = "Sequence[tuple[Outputs, int]]"
"""Outputs that are delivered together, and when the oldest was written, in seconds since the epoch."""


@dataclass(frozen=True, slots=True)
class Epoch:
    """Which data of which run of a server: another one may hold less than the last, or other ids."""

    value: str
    """Of the key; empty where it could not be set."""
    run: str


class State:
    """What is known and what waits; for one event loop."""

    def __init__(self, options: LogOptions, vocab_size: int, on_purge: Callable[[str], None]) -> None:
        """`on_purge` is told each tenant whose text is void; it must not raise."""
        self.options = options
        self.counts = Counts()
        self.outbox = Outbox(options.queue_bytes)
        self.taken: list[Finished] = []
        """Being made into records."""
        self.pending: deque[Batch] = deque()
        """Records whose writing is not certain yet."""
        self.memory = Memory(options.memory_bytes)
        self.followed: OrderedDict[str, Cursor] = OrderedDict()
        """The one last needed is the last."""
        self.left: dict[str, int] = {}
        """How far those were read that were let go."""
        self.tombstones: dict[str, int] = {}
        self.epoch: Epoch | None = None
        self.refill_due = False
        self.connected = False
        self.unwritten = Trouble()
        """Redis refuses what is written."""
        self.caught_up_at: float | None = None
        """On the monotonic clock."""
        self._value = ""  # the last epoch that was not empty
        self._sealer = Sealer()
        self._vocab_size = vocab_size
        self._on_purge = on_purge
        self._clock = time.time() - time.monotonic()  # until Redis has told its own

    @property
    def stats(self) -> LogStats:
        """What there is to tell."""
        counts, fresh, cursors = self.counts, self.caught_up_at, [*self.followed.values()]
        return LogStats(
            connected=self.connected,
            fresh_seconds=None if fresh is None else time.monotonic() - fresh,
            lag_entries=sum(cursor.lag for cursor in cursors),
            tenants=len(cursors),
            queue_outputs=len(self.outbox) + len(self.taken) + sum(batch.outputs for batch in self.pending),
            queue_tokens=self.outbox.tokens
            + sum(len(output.tokens) for output in self.taken)
            + sum(batch.tokens for batch in self.pending),
            queue_bytes=self.outbox.bytes
            + sum(output.bytes for output in self.taken)
            + sum(batch.bytes for batch in self.pending),
            memory_records=len(self.memory),
            memory_bytes=self.memory.bytes,
            published_records=counts.published_records,
            published_tokens=counts.published_tokens,
            received_records=counts.received_records,
            received_tokens=counts.received_tokens,
            duplicates=counts.duplicates,
            dropped=dict(counts.dropped),
            skipped=dict(counts.skipped),
            gaps=counts.gaps + sum(cursor.gaps for cursor in cursors),
            purges=counts.purges,
            reconnects=max(0, counts.connections - 1),
            epochs=counts.epochs,
            refilled_records=counts.refilled_records,
            faults=dict(counts.faults),
        )

    # What the API's process asks for.

    def publish(self, tenant: str, tokens: Sequence[int], generation: int) -> None:
        """Let a finished output wait to be written, or count why not."""
        reason, checked = self._check(tenant, tokens, generation)
        if checked is None:
            self.counts.dropped[reason] += 1
            return
        full = self.outbox.put(Finished(tenant, checked, generation, time.monotonic()))
        if full:
            self.counts.dropped["full"] += full

    def _check(self, tenant: str, tokens: Sequence[int], generation: int) -> tuple[str, array[int] | None]:
        if not (isinstance(tenant, str) and keys.is_tenant(tenant)):
            return "tenant", None
        try:
            if len(tokens) < LEAST_OUTPUT:
                return "short", None
            copied = array("i", tokens)
            if min(copied) < 0 or max(copied) >= self._vocab_size:
                return "tokens", None
            return ("purged", None) if generation < self.generation(tenant) else ("", copied)
        except (TypeError, ValueError, OverflowError):
            return "tokens", None

    def generation(self, tenant: str) -> int:
        """The tenant's newest tombstone that is known; 0 without one."""
        return self.tombstones.get(tenant, 0)

    def need(self, tenant: str) -> bool:
        """Follow a tenant from now on; whether that is news."""
        if tenant in self.followed:
            self.followed.move_to_end(tenant)
            return False
        if not keys.is_tenant(tenant):
            return False
        cursor = self.followed[tenant] = Cursor(tenant, self.options.entries)
        cursor.position = self.left.pop(tenant, cursor.position)
        if len(self.followed) > MAX_FOLLOWED:
            other, gone = self.followed.popitem(last=False)
            self.counts.gaps += gone.gaps
            self.left[other] = gone.position
            while len(self.left) > MAX_LEFT:
                self.left.pop(next(iter(self.left)))
        return True

    def replay(self) -> Iterator[tuple[str, Outputs, int]]:
        """Tenant, outputs and age mark of all records that are remembered and alive, the oldest first."""
        for remembered in self.memory.values():
            if self._fault_of(remembered.tenant, remembered.generation, remembered.created) is None:
                record = decode(remembered.raw, self._vocab_size)
                if isinstance(record, Record):
                    yield remembered.tenant, record.outputs, remembered.created // 1000

    # Time, purges and losses.

    def now(self) -> int:
        """What Redis' clock says, in ms."""
        return int(1000 * (time.monotonic() + self._clock))

    def set_clock(self, now: int) -> None:
        """Take what Redis says that it is."""
        self._clock = now / 1000 - time.monotonic()

    def oldest(self) -> int:
        """What was finished before (ms of Redis) may not be kept any more."""
        return self.now() - 1000 * self.options.retention_seconds

    def _fault_of(self, tenant: str, generation: int, created: int) -> str | None:
        """Why a record may not be kept any more."""
        if generation < self.generation(tenant):
            return "purged"
        return "expired" if created < self.oldest() else None

    def learn(self, found: dict[str, int]) -> None:
        """Apply tombstones that Redis has."""
        self._bury({tenant: one for tenant, one in found.items() if one > self.generation(tenant)})

    def lacking(self, found: dict[str, int]) -> dict[str, int]:
        """Tombstones that Redis should have beside all that it has; those that are too old are let go."""
        oldest = self.oldest()
        for tenant in [tenant for tenant, known in self.tombstones.items() if known < oldest]:
            if tenant not in found:
                del self.tombstones[tenant]
        return {tenant: known for tenant, known in self.tombstones.items() if known > found.get(tenant, 0)}

    def _bury(self, news: dict[str, int]) -> None:
        if not news:
            return
        self.tombstones |= news
        self.counts.purges += len(news)
        dead = self.outbox.keep(lambda one: one.generation >= news.get(one.tenant, 0))
        if dead:
            self.counts.dropped["purged"] += dead
        # Records since then too: the receiver forgets all, and reads again what the stream holds.
        self.memory.keep(lambda one: one.tenant not in news)
        for tenant in news:
            self.left.pop(tenant, None)
            if tenant in self.followed:
                self.followed[tenant].anew()
            self._on_purge(tenant)

    def enter(self, epoch: Epoch) -> None:
        """Take the epoch that Redis is in: another one is read again, one that has lost all is refilled."""
        before, self.epoch = self.epoch, epoch
        if epoch.value:
            self.refill_due |= bool(self._value) and epoch.value != self._value
            self._value = epoch.value
        if before is None or before == epoch:
            return
        self.counts.epochs += 1
        self.left.clear()
        for cursor in self.followed.values():
            cursor.again()

    # What is read.

    def receive(self, cursor: Cursor, read: Sequence[Read]) -> Received:
        """Take entries of a stream in their order.

        Returns:
            What is new. Outputs that are together were written within a hundredth of the retention.
        """
        found: dict[int, list[tuple[int, Record]]] = {}
        span, now = max(1000, 10 * self.options.retention_seconds), self.now()
        for entry in read:
            record = entry.record
            if isinstance(record, Refusal) or entry.digest is None:
                cursor.passed(entry.id, None)
                self.counts.skipped[str(record)] += 1
                continue
            new = cursor.passed(entry.id, entry.digest)
            # What was written while the clock was ahead is as new as now, and not left to ids that lie too.
            created = min(record.created, now)
            cursor.finished(entry.id, created if record.created - now < AHEAD_MS else 0)
            if not new:
                self.counts.duplicates += 1
                continue
            if entry.digest in self.memory or self._sealer.is_own(cursor.tenant, record.origin):
                self.counts.duplicates += 1
                continue
            cursor.numbered(record.origin, record.number)
            reason = self._fault_of(cursor.tenant, record.generation, created)
            if reason is not None:
                self.counts.skipped[reason] += 1
                continue
            self._remember(cursor.tenant, record.generation, created, entry.raw, entry.digest)
            self.counts.received_records += 1
            self.counts.received_tokens += record.tokens
            found.setdefault(created // span, []).append((created, record))
        return [
            (
                tuple(output for _, record in records for output in record.outputs),
                min(created for created, _ in records) // 1000,
            )
            for records in found.values()
        ]

    def _remember(self, tenant: str, generation: int, created: int, raw: bytes, number: int) -> None:
        created = min(created, self.now())
        self.memory.put(number, Remembered(tenant, generation, created, raw, self._value))

    # What is written.

    def take(self) -> bool:
        """Take what has waited longest to be made into records; whether there is anything."""
        if not self.taken:
            self.taken = self.outbox.take(TAKEN_TOKENS)
        return bool(self.taken)

    def made(self, groups: list[Group]) -> None:
        """What was taken has become records."""
        for group in groups:
            for at in range(0, len(group.payloads), BATCHED):
                payloads = group.payloads[at : at + BATCHED]
                batch = self._sealer.seal(group.tenant, group.generation, group.created, payloads)
                self.pending.append(batch)
        self.taken = []

    def groups(self) -> list[Group]:
        """What was taken, by what one record may hold together."""
        found: dict[tuple[str, int], Group] = {}
        for output in self.taken:
            created = int(1000 * (output.at + self._clock))
            fresh = Group(output.tenant, output.generation, created)
            found.setdefault((output.tenant, output.generation), fresh).outputs.append(output.tokens)
        return list(found.values())

    def next_batch(self) -> Batch | None:
        """What is to be written now; what is dead by now never is."""
        while self.pending:
            batch = self.pending[0]
            reason = self._fault_of(batch.tenant, batch.generation, batch.created)
            if reason is None:
                return batch
            self.drop(batch, reason)
        return None

    def drop(self, batch: Batch, reason: str) -> None:
        """Give the first batch up."""
        self.pending.popleft()
        self.counts.dropped[reason] += batch.outputs

    def settled(self, batch: Batch) -> None:
        """The first batch was certainly written."""
        self.unwritten.end()
        self.pending.popleft()
        self.counts.published_records += len(batch.records)
        self.counts.published_tokens += batch.tokens
        if batch.generation >= self.generation(batch.tenant):
            for record in batch.records:
                self._remember(batch.tenant, batch.generation, batch.created, record.raw, record.digest)

    # What is written again.

    def lost(self) -> list[tuple[int, Remembered]]:
        """Records that were in an earlier epoch, are alive, and were not seen in this one."""
        return [
            (number, record)
            for number, record in self.memory.items()
            if record.epoch != self._value
            and self._fault_of(record.tenant, record.generation, record.created) is None
            and not (record.tenant in self.followed and self.followed[record.tenant].is_there(number))
        ]

    def refilled(self, records: Sequence[tuple[int, Remembered]], written: int) -> None:
        """They are in this epoch now, by whoever wrote them."""
        self.counts.refilled_records += written
        for number, record in records:
            if number in self.memory:
                self._remember(record.tenant, record.generation, record.created, record.raw, number)
