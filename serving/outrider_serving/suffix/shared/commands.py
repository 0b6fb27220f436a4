"""What `outrider suffix` prints and does, with checked options."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import asynccontextmanager
from dataclasses import asdict
from datetime import UTC, datetime
from typing import IO

from redis.exceptions import RedisError

from outrider_serving.suffix.shared import keys as names
from outrider_serving.suffix.shared.admin import Admin, TenantStats, Text, identities
from outrider_serving.suffix.shared.connection import connected
from outrider_serving.suffix.shared.keys import Keys
from outrider_serving.suffix.shared.options import InputError, LogOptions
from outrider_serving.suffix.shared.replies import NonsenseError

MAX_LINE = 64 << 20
"""Characters of a line that is imported."""

_TOGETHER = 1000  # lines that are imported at a time


def run(chosen: argparse.Namespace, options: LogOptions) -> int:
    """Do what was chosen; the exit status."""
    try:
        asyncio.run(_ACTIONS[chosen.action](chosen, options))
    except (RedisError, OSError, NonsenseError, UnicodeDecodeError) as error:
        said = " ".join(str(error).split()) or "it did not answer in time"
        print(f"outrider suffix {chosen.action}: failed: {type(error).__name__}: {said}", file=sys.stderr)
        return 1
    return 0


@asynccontextmanager
async def _admin(options: LogOptions, identity: str) -> AsyncIterator[Admin]:
    keys = Keys(options.prefix, identity)
    async with connected(options, keys.tenants) as link:
        yield Admin(link, keys, options)


async def _identities(chosen: argparse.Namespace, options: LogOptions) -> list[str]:
    return [chosen.identity] if chosen.identity else await identities(options)


async def _one_identity(chosen: argparse.Namespace, options: LogOptions) -> str:
    found = await _identities(chosen, options)
    if len(found) != 1:
        known = f"one of {', '.join(found)}" if found else f"given: no key begins with {options.prefix!r}"
        raise InputError(f"--identity must be {known}")
    return found[0]


async def _tenants(chosen: argparse.Namespace, admin: Admin) -> list[str]:
    return [chosen.tenant] if chosen.tenant is not None else await admin.tenants()


async def _stats(chosen: argparse.Namespace, options: LogOptions) -> None:
    rows: list[tuple[str, TenantStats]] = []
    for identity in await _identities(chosen, options):
        async with _admin(options, identity) as admin:
            rows += [(identity, await admin.stats(tenant)) for tenant in await _tenants(chosen, admin)]
    if chosen.json:
        print(json.dumps([{"identity": identity} | asdict(stats) for identity, stats in rows], indent=1))
        return
    print(_table([_HEAD, *(_row(identity, stats) for identity, stats in rows)]))


_HEAD = "identity tenant entries bytes outputs tokens oldest newest purged skipped".split()  # noqa: SIM905


def _row(identity: str, stats: TenantStats) -> list[str]:
    numbers = (stats.entries, stats.bytes, stats.outputs, stats.tokens)
    times = (stats.oldest, stats.newest, stats.tombstone)
    skipped = ",".join(f"{reason}={count}" for reason, count in sorted(stats.skipped.items()))
    return [identity, _named(stats.tenant), *map(str, numbers), *map(_time, times), skipped or "-"]


def _named(tenant: str) -> str:
    return tenant or "(single)"


def _time(milliseconds: int | None) -> str:
    if not milliseconds:
        return "-"
    try:
        return datetime.fromtimestamp(milliseconds / 1000, UTC).isoformat(timespec="seconds")
    except (ValueError, OverflowError, OSError):
        return str(milliseconds)


def _table(rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    lines = ("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)
    return "\n".join(lines)


async def _export(chosen: argparse.Namespace, options: LogOptions) -> None:
    async with _admin(options, await _one_identity(chosen, options)) as admin:
        for tenant in await _tenants(chosen, admin):
            async for text in admin.export(tenant):
                about = {"tenant": text.tenant, "generation": text.generation, "created": text.created}
                print(json.dumps(about | {"tokens": text.tokens.tolist()}, separators=(",", ":")))


async def _import(chosen: argparse.Namespace, options: LogOptions) -> None:
    counts: Counter[str] = Counter()
    try:
        async with _admin(options, await _one_identity(chosen, options)) as admin:
            if chosen.source is None:
                await _put_all(admin, sys.stdin, counts)
            else:
                with _opened(chosen) as file:
                    await _put_all(admin, file, counts)
    finally:
        refused = "".join(f", {counts[reason]} refused ({reason})" for reason in ("purged", "expired"))
        print(f"{counts['']} outputs imported{refused}")


def _opened(chosen: argparse.Namespace) -> IO[str]:
    try:
        return chosen.source.open(encoding="utf-8")  # type: ignore[no-any-return]
    except OSError as error:
        raise InputError(f"--from {chosen.source} cannot be read: {error.strerror}") from error


async def _put_all(admin: Admin, lines: IO[str], counts: Counter[str]) -> None:
    for group in _groups(lines):
        counts[await admin.put(group)] += len(group)


def _groups(lines: IO[str]) -> Iterator[list[Text]]:
    """What may be written together; what comes before a bad line too, before that is told."""
    group: list[Text] = []
    try:
        for text in _texts(lines):
            if group and (len(group) == _TOGETHER or _about(text) != _about(group[0])):
                yield group
                group = []
            group.append(text)
    except InputError:
        if group:
            yield group
        raise
    if group:
        yield group


def _about(text: Text) -> tuple[str, int, int]:
    return text.tenant, text.generation, text.created


def _texts(lines: IO[str]) -> Iterator[Text]:
    for number, line in enumerate(_bounded(lines), start=1):
        if line.strip():
            try:
                yield _text(json.loads(line))
            except (ValueError, TypeError, KeyError, OverflowError, RecursionError) as error:
                raise InputError(
                    f"line {number} must be a JSON object with tenant ({names.TENANT_RULE}), generation and "
                    "created (integers from 0 to 2**53) and tokens (at least 1 integer from 0 to 2**31 - 1)"
                ) from error


def _bounded(lines: IO[str]) -> Iterable[str]:
    while line := lines.readline(MAX_LINE):
        yield line


def _text(value: dict[str, object]) -> Text:
    tenant, generation, created = value["tenant"], value["generation"], value["created"]
    tokens = value["tokens"]
    if not (isinstance(tenant, str) and names.is_tenant(tenant) and isinstance(tokens, list) and tokens):
        raise ValueError("tenant or tokens")
    numbers = array("i", tokens)
    if min(numbers) < 0:
        raise ValueError("tokens")
    return Text(tenant, _count(generation), _count(created), numbers)


def _count(value: object) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value <= 2**53:
        raise ValueError("generation or created")
    return value


async def _purge(chosen: argparse.Namespace, options: LogOptions) -> None:
    found = await _identities(chosen, options)
    if not found:
        raise InputError(f"--identity must be given: no key begins with {options.prefix!r}")
    for identity in found:
        async with _admin(options, identity) as admin:
            tenants = await _tenants(chosen, admin)
            for tenant in tenants:
                tombstone, entries = await admin.purge(tenant)
                print(
                    f"{identity} {_named(tenant)}: {entries} entries deleted, tombstone {tombstone}"
                    f" ({_time(tombstone)}), kept for {options.retention_seconds} seconds"
                )
            if not tenants:
                print(f"{identity}: no tenant has anything to delete")


_ACTIONS = {"stats": _stats, "export": _export, "import": _import, "purge": _purge}
