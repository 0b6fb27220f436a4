"""Flags of `outrider suffix`, for people who must see, move or delete shared text. Imports nothing heavy."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import Any

from outrider_serving import flagvalues
from outrider_serving.suffix.shared import keys
from outrider_serving.suffix.shared.options import (
    FORMS,
    PREFIX,
    RETENTION_BYTES,
    RETENTION_SECONDS,
    InputError,
    LogOptions,
)

_COMMANDS = {
    "stats": "tenants, their entries, bytes and tokens",
    "export": "write a tenant's outputs as JSON lines: tenant, generation, created (ms), tokens",
    "import": "read such lines; what was purged since, or is older than the retention, is refused",
    "purge": "delete a tenant's text, and let each connected pod forget its copies within 5 seconds",
}


def add_parser(commands: Any) -> None:
    """Add the command to those of `outrider` (what `add_subparsers` gave)."""
    parser = commands.add_parser(
        "suffix",
        help="what the pods share of finished outputs: count, copy, delete",
        description="Exit status: 1 if Redis cannot be used, 2 for bad input or a model that is not there, "
        "else 0.",
    )
    actions = parser.add_subparsers(dest="action", required=True, metavar="ACTION")
    for name, purpose in _COMMANDS.items():
        add = actions.add_parser(name, help=purpose, description=purpose).add_argument
        add("--url", required=True, help=FORMS)
        add("--auth", type=Path, metavar="DIR", help="directory with files `password` and `username`")
        add("--ca", type=Path, metavar="FILE", help="certificates that may sign the servers'")
        prefix = "what keys begin with (%(default)s); a SpeculativeModel's with outrider:NAMESPACE:NAME:"
        add("--prefix", default=PREFIX, help=prefix)
        identity = "one model's, as keys have it in braces"
        add("--identity", metavar="HEX", help=f"{identity}; all that are found without it")
        if name != "import":
            add("--tenant", metavar="T", help="one tenant; empty for that of a server with only one")
            add("--all", action="store_true", help="all tenants that are found")
        if name == "stats":
            add("--json", action="store_true", help="as JSON")
        if name == "import":
            add("--from", dest="source", type=Path, metavar="FILE", help="instead of standard input")
        seconds = f"seconds that text is kept, by default as pods told Redis, else {RETENTION_SECONDS}"
        add("--retention", type=flagvalues.count, metavar="SECONDS", help=seconds)
        size = f"how much of a tenant is kept, as the pods have it; {RETENTION_BYTES >> 20}Mi by default"
        add("--retention-size", type=flagvalues.size, default=RETENTION_BYTES, metavar="BYTES", help=size)


def run(chosen: argparse.Namespace) -> int:
    """Run the command with its parsed flags; the exit status."""
    try:
        options = _options(chosen)
        # What is heavy is behind this import.
        from outrider_serving.suffix.shared import commands

        return commands.run(chosen, options)
    except InputError as error:
        print(f"outrider suffix {chosen.action}: error: {' '.join(str(error).split())}", file=sys.stderr)
        return 2


def _options(chosen: argparse.Namespace) -> LogOptions:
    """Checked options."""
    if chosen.auth is not None and not chosen.auth.is_dir():
        raise InputError(f"--auth {chosen.auth} must be a directory with a file `password`")
    if chosen.ca is not None and not chosen.ca.is_file():
        raise InputError(f"--ca {chosen.ca} must be a file with certificates (PEM)")
    if chosen.identity is not None and not keys.is_identity(chosen.identity):
        raise InputError(f"--identity {chosen.identity!r} must be {keys.IDENTITY_RULE}")
    if chosen.action != "import":
        if chosen.tenant is not None and not keys.is_tenant(chosen.tenant):
            raise InputError(f"--tenant {chosen.tenant!r} must be {keys.TENANT_RULE}")
        if chosen.tenant is not None and chosen.all:
            raise InputError("--all says all tenants, and --tenant says one: give one of them")
        if chosen.action != "stats" and chosen.tenant is None and not chosen.all:
            raise InputError("--tenant or --all must say whose text")
    seconds = chosen.retention
    try:
        return LogOptions(
            url=chosen.url,
            auth=chosen.auth,
            ca=chosen.ca,
            prefix=chosen.prefix,
            retention_seconds=RETENTION_SECONDS if seconds is None else seconds,
            retention_bytes=chosen.retention_size,
        )
    except ValueError as error:
        field, _, what = str(error).partition(": ")
        raise InputError(f"{_FLAGS.get(field, f'--{field}')}: {what}") from error


_FLAGS = {"retention_seconds": "--retention", "retention_bytes": "--retention-size"}
"""By field of `LogOptions`, of those that have another name there."""
