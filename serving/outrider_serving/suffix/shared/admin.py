"""What `outrider suffix` does with one model's log: count, copy out, copy in, delete."""

from __future__ import annotations

from array import array
from collections.abc import AsyncIterator, Sequence
from dataclasses import dataclass, field

from outrider_serving.suffix.shared import keys as names
from outrider_serving.suffix.shared import replies, scripts
from outrider_serving.suffix.shared.connection import Link, connected_to, masters
from outrider_serving.suffix.shared.cursor import format_id
from outrider_serving.suffix.shared.keys import Keys, spell
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.suffix.shared.outbox import Sealer
from outrider_serving.suffix.shared.record import Record, Refusal, compress, decode, digest

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


async def identities(options: LogOptions) -> list[str]:
    """All models whose logs this Redis, or any server of this Cluster, holds."""
    found: set[str] = set()
    for address in await masters(options):
        async with connected_to(options, address) as link:
            for rest in ("epoch", "tenants", "tombstones"):
                for key in await _scan(link, names.pattern(options.prefix, rest)):
                    found.add(names.identity_in(options.prefix, key) or "")
    return sorted(found - {""})


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
        with_log = {tenant for key in scanned if (tenant := self._keys.tenant_of(key)) is not None}
        return sorted(with_log | (await self._look()).tombstones.keys())

    async def stats(self, tenant: str) -> TenantStats:
        """Count what a tenant's stream holds; reads all of it."""
        looked = await self._look()
        found = TenantStats(tenant, tombstone=looked.tombstones.get(tenant, 0))
        used = await self._link.call("MEMORY", "USAGE", self._keys.log(tenant))
        found.bytes = 0 if used is None else replies.number(used)
        async for record in self._records(tenant, looked):
            found.entries += 1
            if isinstance(record, str):
                found.skipped[record] = found.skipped.get(record, 0) + 1
                continue
            found.outputs += len(record.outputs)
            found.tokens += record.tokens
            found.oldest = min(found.oldest or record.created, record.created)
            found.newest = max(found.newest or record.created, record.created)
        return found

    async def export(self, tenant: str) -> AsyncIterator[Text]:
        """The outputs of a tenant that readers would take."""
        async for record in self._records(tenant, await self._look()):
            if isinstance(record, Record):
                for output in record.outputs:
                    yield Text(tenant, record.generation, record.created, output)

    async def put(self, texts: list[Text]) -> str:
        """Copy in what has one tenant, generation and time; empty, or why it is refused: purged, expired."""
        tenant, generation, created = texts[0].tenant, texts[0].generation, texts[0].created
        looked = await self._look()
        if created < looked.now - 1000 * self._options.retention_seconds:
            return "expired"
        payloads = compress([text.tokens for text in texts])
        batch = self._sealer.seal(tenant, generation, created, payloads)
        about = (spell(tenant), generation, self._options.entries, self._options.retention_seconds)
        keys = [self._keys.tombstones, self._keys.log(tenant), self._keys.tenants, self._keys.epoch]
        answer = await self._eval(scripts.PUBLISH, keys, (*about, *(record.raw for record in batch.records)))
        return "purged" if replies.written(answer)[1] else ""

    async def purge(self, tenant: str) -> tuple[int, int]:
        """Delete a tenant's text here, and wherever it was copied; tombstone, and entries that went."""
        keys = self._keys
        answer = await self._eval(
            scripts.PURGE,
            [keys.tombstones, keys.log(tenant), keys.tenants],
            [spell(tenant), self._options.retention_seconds],
        )
        tombstone, entries = replies.items(answer, 2)
        return replies.number(tombstone), replies.number(entries)

    async def _look(self) -> replies.Looked:
        answer = await self._eval(scripts.LOOK, [self._keys.tombstones, self._keys.epoch])
        return replies.looked(answer, 0)

    async def _records(self, tenant: str, looked: replies.Looked) -> AsyncIterator[Record | str]:
        """Each record of a stream once, or why it is skipped."""
        oldest = looked.now - 1000 * self._options.retention_seconds
        tombstone = looked.tombstones.get(tenant, 0)
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
