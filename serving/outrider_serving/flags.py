"""The flags of the `outrider` command, and what each accepts."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any, NoReturn, get_args

from outrider_serving import flagvalues, logs
from outrider_serving.bench import arguments as bench
from outrider_serving.engine import options as engine
from outrider_serving.engine.process.child import DEFAULT_PATIENCE
from outrider_serving.settings import TenantMode
from outrider_serving.suffix.shared import cli as suffix
from outrider_serving.suffix.shared.options import FORMS, PREFIX, RETENTION_SECONDS, WARM_SECONDS

TEMPLATE_VARIABLE = "OUTRIDER_CHAT_TEMPLATE"
"""Environment variable that holds a chat template's text, empty for none; --chat-template comes first."""


LEAST_RETENTION = 60
"""Seconds: engines erase what is too old once a minute."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line, and takes no flag for another that begins so; subcommands too."""

    def __init__(self, **options: Any) -> None:
        """Take argparse's options."""
        super().__init__(allow_abbrev=False, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def make_parser() -> argparse.ArgumentParser:
    """The command's parser; it ends the process with status 2 where a flag is wrong."""
    parser = _Parser(prog="outrider", description="Speculative decoding as a thing you operate.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the version")
    bench.add_parser(commands)
    suffix.add_parser(commands)
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serve.add_argument
    add("model", metavar="MODEL", type=flagvalues.text, help="a directory, a hub id, or package:NAME")
    add("--host", default="127.0.0.1", type=flagvalues.text, help="address to listen on; 0.0.0.0 for all")
    add("--port", default=8000, type=flagvalues.port, help="port of the API; 0 for any free one")
    add("--admin-port", default=0, type=flagvalues.port, help="port of the admin endpoints; 0 for none")
    add("--settings", metavar="FILE", type=Path, help="settings file, re-read while serving")
    add("--revision", type=flagvalues.text, help="branch, tag or commit of a hub id")
    add(
        "--dtype",
        default="auto",
        choices=get_args(engine.DType),
        help="dtype of the weights in memory; auto: the config's, bfloat16 for a GGUF",
    )
    add(
        "--context-length",
        type=flagvalues.count,
        metavar="N",
        help="most tokens of prompt and output; the model's own by default",
    )
    add(
        "--served-name",
        type=flagvalues.text,
        metavar="NAME",
        help="name in requests; made from MODEL by default",
    )
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help=f"replaces the model's own; or its text in {TEMPLATE_VARIABLE}",
    )
    add("--api-keys", type=Path, metavar="DIR", help="one file a tenant, keys one a line; open without it")
    add(
        "--tenant-mode",
        type=flagvalues.one_of(TenantMode),
        metavar="MODE",
        help="whose finished outputs may be proposed to a request: key (those of its key's tenant), single "
        "(everybody's), header (those of the tenant that a trusted gateway names) or request (only its own "
        "text); by default key with --api-keys, else single on loopback and request elsewhere",
    )
    add(
        "--trusted-gateways",
        default=[],
        action="append",
        type=flagvalues.text,
        metavar="NETWORK",
        help="from where X-Outrider-Tenant is believed, as 10.1.0.0/16; may be given several times",
    )
    _add_sharing_options(serve)
    _add_engine_options(serve)
    add(
        "--drain-delay",
        default=5.0,
        type=flagvalues.seconds,
        metavar="SECONDS",
        help="still accepting after SIGTERM",
    )
    add(
        "--grace-period",
        default=30.0,
        type=flagvalues.seconds,
        metavar="SECONDS",
        help="from SIGTERM to the exit at most",
    )
    add("--log-level", default="info", choices=logs.LEVELS, help="least severe records to log")
    return parser


def _add_sharing_options(serve: argparse.ArgumentParser) -> None:
    """Options of what pods share of finished outputs, and how long it is kept."""
    add = serve.add_argument
    add(
        "--shared-cache",
        type=flagvalues.text,
        metavar="URL",
        help=f"Redis through which pods share finished outputs: {FORMS}",
    )
    add(
        "--shared-cache-auth",
        type=Path,
        metavar="DIR",
        help="directory with the files `password` and `username`, read again at each connection",
    )
    add("--shared-cache-ca", type=Path, metavar="FILE", help="certificates (PEM) that may sign Redis' own")
    add(
        "--shared-cache-prefix",
        type=flagvalues.text,
        metavar="PREFIX",
        help=f"what its keys begin with; {PREFIX} by default",
    )
    add(
        "--retention",
        default=RETENTION_SECONDS,
        type=flagvalues.number(
            LEAST_RETENTION,
            flagvalues.LARGEST,
            f"a whole number of at least {LEAST_RETENTION}: what is too old is erased once a minute",
        ),
        metavar="SECONDS",
        help=f"how long a finished output is kept, here and there; at least {LEAST_RETENTION}",
    )
    add(
        "--retention-size",
        type=flagvalues.size,
        metavar="BYTES",
        help="how much of a tenant is kept there, compressed, as 64Mi, which is the default",
    )
    add(
        "--warm-seconds",
        type=flagvalues.seconds,
        metavar="SECONDS",
        help=f"how long the start waits at most for what others have shared; {WARM_SECONDS:g} by default",
    )


def _add_engine_options(serve: argparse.ArgumentParser) -> None:
    """Options of how much the engine does at once, and with what."""
    add = serve.add_argument
    add(
        "--max-waiting",
        default=engine.DEFAULT_MAX_WAITING,
        type=flagvalues.count,
        metavar="N",
        help="requests that may wait before others get 429",
    )
    add(
        "--max-running",
        default=engine.DEFAULT_MAX_RUNNING,
        type=flagvalues.count,
        metavar="N",
        help="requests in one step at most",
    )
    add(
        "--step-tokens",
        type=flagvalues.count,
        metavar="N",
        help=f"tokens in one target pass at most; by default {engine.STEP_TOKENS_GPU} on a GPU, "
        f"{engine.STEP_TOKENS_CPU} on a CPU, or --max-running if that is more",
    )
    add(
        "--page-size",
        default=engine.DEFAULT_PAGE_SIZE,
        type=flagvalues.number(1, engine.MAX_PAGE_SIZE, f"a whole number from 1 to {engine.MAX_PAGE_SIZE}"),
        metavar="N",
        help="tokens in a page of keys and values; texts share whole pages only",
    )
    add(
        "--memory-share",
        type=flagvalues.share,
        metavar="SHARE",
        help="share of the GPU's memory, or of the container's on a CPU, for weights, pages and proposers; "
        f"by default {engine.MEMORY_SHARE_GPU} on a GPU, {engine.MEMORY_SHARE_CPU} on a CPU",
    )
    add(
        "--proposer-memory",
        default=0,
        type=flagvalues.size,
        metavar="BYTES",
        help="of that, kept free for proposers, as 512Mi",
    )
    add(
        "--step-timeout",
        default=DEFAULT_PATIENCE.step,
        type=flagvalues.positive_seconds,
        metavar="SECONDS",
        help="a step that takes longer is a hang: the engine's process is killed and started again",
    )
