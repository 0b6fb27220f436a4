"""What `outrider suffix` does with one model's log: count, copy out, copy in, delete."""

from __future__ import annotations

from array import array
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider_serving.suffix.shared import keys as names
from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.connection import Link, connected_to, masters
from outrider_serving.suffix.shared.cursor import format_id
from outrider_serving.suffix.shared.keys import Keys, spell
from outrider_serving.suffix.shared.options import LONGEST_RETENTION, LogOptions
from outrider_serving.suffix.shared.outbox import Sealer
from outrider_serving.suffix.shared.record import Record, Refusal, compress, decode, digest
from outrider_serving.suffix.shared.tombstones import new_version, tombstones

ANY_TOKEN = 2**31
"""A size of vocabulary, where none is known."""

_ENTRIES = 32  # read at a time


@dataclass(slots=True)
class TenantStats:
    """What a tenant's stream holds."""

    tenant: str
    entries: int = 0
    bytes: int = 0
    """Of Redis' memory, as it estimates."""
    outputs: int = 0
    tokens: int = 0
    oldest: int | None = None
    """When its oldest output was finished (ms)."""
    newest: int | None = None
    tombstone: int = 0
    """Its last purge (ms); 0 without one."""
    skipped: dict[str, int] = field(default_factory=dict)
    """Entries that readers skip, by reason."""


@dataclass(frozen=True, slots=True)
class Text:
    """An output as it is copied out and in."""

    tenant: str
    generation: int
    created: int
    tokens: array[int]


async def models(options: LogOptions) -> dict[str, list[str]]:
    """Identities of all models whose logs this Redis, or any server of this Cluster, holds, by prefix.

    All prefixes are looked at that begin with that of the options, which itself need not be among them.
    """
    found: dict[str, set[str]] = {}
    for address in await masters(options):
        async with connected_to(options, address) as link:
            for key in await _scan(link, names.pattern(options.prefix)):
                if (model := names.model_in(key)) is not None:
                    found.setdefault(model[0], set()).add(model[1])
    return {prefix: sorted(found[prefix]) for prefix in sorted(found)}


async def _scan(link: Link, pattern: str) -> list[bytes]:
    found: list[bytes] = []
    cursor = b"0"
    while True:
        following, some = replies.items(await link.call("SCAN", cursor, "MATCH", pattern, "COUNT", 1000), 2)
        found += map(replies.text, replies.items(some))
        cursor = replies.text(following)
        if cursor == b"0":
            return found


class Admin:
    """One model's log, through a connection to the server that has it."""

    def __init__(self, link: Link, keys: Keys, options: LogOptions) -> None:
        """Use a connection."""
        self._link = link
        self._keys = keys
        self._options = options
        self._sealer = Sealer()

    async def tenants(self) -> list[str]:
        """All that have a stream or a tombstone."""
        scanned = await _scan(self._link, self._keys.logs)
        found = {tenant for key in scanned if (tenant := self._keys.tenant_of(key)) is not None}
        async for some in tombstones(self._link, self._keys):
            found |= some.keys()
        return sorted(found)

    async def retention(self) -> int | None:
        """For how many seconds pods keep text, as they told; None where none did."""
        told = await self._link.call("HGET", self._keys.tombstones, names.RETENTION)
        return None if told is None else max(1, min(replies.number(told), LONGEST_RETENTION))

    async def stats(self, tenant: str) -> TenantStats:
        """Count what a tenant's stream holds; reads all of it."""
        now, tombstone = await self._about(tenant)
        found = TenantStats(tenant, tombstone=tombstone)
        used = await self._link.call("MEMORY", "USAGE", self._keys.log(tenant))
        found.bytes = 0 if used is None else replies.number(used)
        async for record in self._records(tenant, now, tombstone):
            found.entries += 1
            if isinstance(record, str):
                found.skipped[record] = found.skipped.get(record, 0) + 1
                continue
            found.outputs += len(record.outputs)
            found.tokens += record.tokens
            found.oldest = min(found.oldest or record.created, record.created)
            found.newest = max(found.newest or record.created, record.created)
        return found

    async def export(self, tenant: str, skipped: Counter[str]) -> AsyncIterator[Text]:
        """The outputs of a tenant that readers would take; entries that they skip are counted, by reason."""
        now, tombstone = await self._about(tenant)
        async for record in self._records(tenant, now, tombstone):
            if isinstance(record, Record):
                for output in record.outputs:
                    yield Text(tenant, record.generation, min(record.created, now), output)
            else:
                skipped[record] += 1

    async def put(self, texts: list[Text]) -> str:
        """Copy in what has one tenant, generation and time; empty, or why it is refused.

        That is `purged`, `expired`, or `future`: it claims to have come after a purge that has not been.
        """
        tenant, generation = texts[0].tenant, texts[0].generation
        now, tombstone = await self._about(tenant)
        created = min(texts[0].created, now)
        if created < now - 1000 * self._options.retention_seconds:
            return "expired"
        if generation > max(now, tombstone):
            return "future"
        payloads = compress([text.tokens for text in texts])
        batch = self._sealer.seal(tenant, generation, created, payloads)
        about = (spell(tenant), generation, self._options.entries, self._options.retention_seconds)
        keys = [self._keys.tombstones, self._keys.log(tenant), self._keys.tenants, self._keys.epoch]
        answer = await self._eval(scripts.PUBLISH, keys, (*about, *(record.raw for record in batch.records)))
        return "purged" if replies.written(answer)[1] else ""

    async def purge(self, tenant: str) -> tuple[int, int, int]:
        """Delete a tenant's text here, and wherever it was copied.

        Returns:
            The tombstone, the entries that went, and for how many seconds the tombstone is kept.
        """
        keys = self._keys
        answer = await self._eval(
            scripts.PURGE,
            [keys.tombstones, keys.log(tenant), keys.tenants],
            [spell(tenant), self._options.retention_seconds, new_version()],
        )
        tombstone, entries, seconds = replies.items(answer, 3)
        return replies.number(tombstone), replies.number(entries), replies.number(seconds)

    async def _about(self, tenant: str) -> tuple[int, int]:
        """What time it is for Redis (ms), and a tenant's tombstone or 0."""
        now, name = replies.clock(await self._link.call("TIME")), spell(tenant)
        value = await self._link.call("HGET", self._keys.tombstones, name)
        known = {} if value is None else replies.tombstones([name.encode(), value])
        return now, known.get(tenant, 0)

    async def _records(self, tenant: str, now: int, tombstone: int) -> AsyncIterator[Record | str]:
        """Each record of a stream once, or why it is skipped."""
        oldest = now - 1000 * self._options.retention_seconds
        seen: set[int] = set()
        position = 0
        while entries := replies.entries(
            await self._link.call(
                "XRANGE", self._keys.log(tenant), format_id(position), "+", "COUNT", _ENTRIES
            )
        ):
            for number, raw in entries:
                position = number + 1
                record = Refusal.FOREIGN if raw is None else decode(raw, ANY_TOKEN)
                if isinstance(record, Refusal) or raw is None:
                    yield str(record)
                elif digest(raw) in seen:
                    yield "duplicate"
                elif record.generation < tombstone:
                    yield "purged"
                elif record.created < oldest:
                    yield "expired"
                else:
                    seen.add(digest(raw))
                    yield record

    async def _eval(
        self, script: str, keys: Sequence[str], arguments: Sequence[str | int | bytes] = ()
    ) -> object:
        return await self._link.call("EVAL", script, len(keys), *keys, *arguments)
