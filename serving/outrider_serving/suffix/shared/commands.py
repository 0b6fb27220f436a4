"""What `outrider suffix` prints and does, with checked options."""

from __future__ import annotations

import argparse
import asyncio
import json
import sys
from array import array
from collections import Counter
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import AbstractContextManager, asynccontextmanager, nullcontext
from dataclasses import asdict, replace
from datetime import UTC, datetime
from typing import IO, Any

from redis.exceptions import RedisError

from outrider_serving.suffix.shared import keys as names
from outrider_serving.suffix.shared.admin import Admin, TenantStats, Text, models
from outrider_serving.suffix.shared.connection import connected
from outrider_serving.suffix.shared.keys import Keys
from outrider_serving.suffix.shared.options import InputError, LogOptions
from outrider_serving.suffix.shared.replies import NonsenseError

MAX_LINE = 64 << 20
"""Bytes of a line that is imported."""

_TOGETHER = 1000  # lines that are imported at a time
_NAMED = 20  # prefixes, of more not all
_REPEATED = 80  # characters of what is wrong


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
async def _admin(chosen: argparse.Namespace, options: LogOptions, identity: str) -> AsyncIterator[Admin]:
    """For a model, with the retention that was chosen, or that its pods told."""
    keys = Keys(options.prefix, identity)
    async with connected(options, keys.tenants) as link:
        told = await Admin(link, keys, options).retention()
        if chosen.retention is None and told is not None:
            options = replace(options, retention_seconds=told)
        yield Admin(link, keys, options)


def _note(chosen: argparse.Namespace, text: str) -> None:
    print(f"outrider suffix {chosen.action}: note: {text}", file=sys.stderr)


async def _identities(chosen: argparse.Namespace, options: LogOptions) -> list[str]:
    """The models that are meant: never none, so that a prefix or identity that is wrong is told."""
    found = await models(options)
    here = found.pop(options.prefix, [])
    others = ", ".join([*found][:_NAMED]) + (", ..." if len(found) > _NAMED else "")
    if not here and not others and chosen.action == "import" and chosen.identity:
        _note(chosen, f"nothing is shared under --prefix {options.prefix!r} yet; pods with it will find this")
        return [chosen.identity]
    if not here:
        those = f"; there are {others}" if others else ", and no other begins so"
        raise InputError(f"--prefix {options.prefix!r}: no model has it{those}")
    if chosen.identity and chosen.identity not in here:
        raise InputError(f"--identity {chosen.identity} must be one of {', '.join(here)}")
    if others:
        _note(chosen, f"only for --prefix {options.prefix!r}; there are also {others}")
    return [chosen.identity] if chosen.identity else here


async def _one_identity(chosen: argparse.Namespace, options: LogOptions) -> str:
    found = await _identities(chosen, options)
    if len(found) != 1:
        raise InputError(f"--identity was not given: it must be one of {', '.join(found)}")
    return found[0]


async def _tenants(chosen: argparse.Namespace, admin: Admin) -> list[str]:
    return [chosen.tenant] if chosen.tenant is not None else await admin.tenants()


async def _stats(chosen: argparse.Namespace, options: LogOptions) -> None:
    rows: list[tuple[str, TenantStats]] = []
    for identity in await _identities(chosen, options):
        async with _admin(chosen, options, identity) as admin:
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
    async with _admin(chosen, options, await _one_identity(chosen, options)) as admin:
        for tenant in await _tenants(chosen, admin):
            skipped: Counter[str] = Counter()
            async for text in admin.export(tenant, skipped):
                about = {"tenant": text.tenant, "generation": text.generation, "created": text.created}
                print(json.dumps(about | {"tokens": text.tokens.tolist()}, separators=(",", ":")))
            del skipped["duplicate"]  # its text is there
            for reason, count in sorted(skipped.items()):
                _note(chosen, f"{_named(tenant)}: {count} entries left out ({reason})")


async def _import(chosen: argparse.Namespace, options: LogOptions) -> None:
    counts: Counter[str] = Counter()
    try:
        async with _admin(chosen, options, await _one_identity(chosen, options)) as admin:
            with _opened(chosen) as file:
                await _put_all(admin, file, counts)
    finally:
        refused = "".join(f", {counts[reason]} refused ({reason})" for reason in _REFUSED)
        print(f"{counts['']} outputs imported{refused}")


_REFUSED = ("purged", "expired", "future")


def _opened(chosen: argparse.Namespace) -> AbstractContextManager[IO[bytes]]:
    if chosen.source is None:
        if sys.stdin is None:
            raise InputError("--from must be given: standard input is closed")
        return nullcontext(sys.stdin.buffer)
    try:
        return chosen.source.open("rb")  # type: ignore[no-any-return]
    except OSError as error:
        raise InputError(f"--from {chosen.source} cannot be read: {error.strerror}") from error


async def _put_all(admin: Admin, lines: IO[bytes], counts: Counter[str]) -> None:
    for group in _groups(lines):
        counts[await admin.put(group)] += len(group)


def _groups(lines: IO[bytes]) -> Iterator[list[Text]]:
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


def _texts(lines: IO[bytes]) -> Iterator[Text]:
    for number, line in enumerate(_bounded(lines), start=1):
        if line.strip():
            try:
                yield _text(_object(line))
            except ValueError as error:
                raise InputError(f"line {number}: {error}") from error


def _bounded(lines: IO[bytes]) -> Iterable[bytes]:
    while line := lines.readline(MAX_LINE):
        yield line


def _object(line: bytes) -> dict[str, object]:
    try:
        value = json.loads(line.decode())
    except (ValueError, RecursionError) as error:
        raise _no_object(line) from error
    if not isinstance(value, dict):
        raise _no_object(line)
    return value


def _no_object(line: bytes) -> ValueError:
    began = line[:_REPEATED].strip().decode(errors="replace")
    return _bad("it", "a JSON object with tenant, generation, created and tokens", began)


def _text(value: dict[str, object]) -> Text:
    tenant, tokens = value.get("tenant"), value.get("tokens")
    if not (isinstance(tenant, str) and names.is_tenant(tenant)):
        raise _bad("tenant", names.TENANT_RULE, tenant)
    if not (isinstance(tokens, list) and tokens):
        raise _bad("tokens", "at least 1 integer", tokens)
    return Text(tenant, _count(value, "generation"), _count(value, "created"), _ids(tokens))


def _count(value: dict[str, object], field: str) -> int:
    count = value.get(field)
    if isinstance(count, bool) or not isinstance(count, int) or not 0 <= count <= 2**53:
        raise _bad(field, "an integer from 0 to 2**53", count)
    return count


def _ids(tokens: list[Any]) -> array[int]:
    try:
        ids = array("i", tokens)
    except (TypeError, OverflowError):
        ids = array("i")
    if not ids or min(ids) < 0:
        at, first = next(
            (at, one) for at, one in enumerate(tokens) if not isinstance(one, int) or not 0 <= one < 2**31
        )
        raise _bad(f"tokens[{at}]", "an integer from 0 to 2**31 - 1", first)
    return ids


def _bad(field: str, allowed: str, came: object) -> ValueError:
    """A field of a line is not what is allowed; of what came, which may be text, little is repeated."""
    match came:
        case None:
            said = "nothing"
        case [_, *_]:
            said = "an array"
        case dict():
            said = "an object"
        case _:
            said = json.dumps(came)
    more = "..." if len(said) > _REPEATED else ""
    return ValueError(f"{field} must be {allowed}, not {said[:_REPEATED]}{more}")


async def _purge(chosen: argparse.Namespace, options: LogOptions) -> None:
    for identity in await _identities(chosen, options):
        async with _admin(chosen, options, identity) as admin:
            tenants = await _tenants(chosen, admin)
            for tenant in tenants:
                tombstone, entries, seconds = await admin.purge(tenant)
                print(
                    f"{identity} {_named(tenant)}: {entries} entries deleted, tombstone {tombstone}"
                    f" ({_time(tombstone)}), kept for {seconds} seconds"
                )
                if not entries:
                    _note(chosen, f"nothing of {_named(tenant)} was stored; stats --all shows whose text is")
            if not tenants:
                print(f"{identity}: no tenant has anything to delete")


_ACTIONS = {"stats": _stats, "export": _export, "import": _import, "purge": _purge}
