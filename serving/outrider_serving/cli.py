"""The `outrider` command. Bad input ends with status 2 and one line that says what is allowed."""

from __future__ import annotations

import argparse
import logging
import math
import os
import sys
from collections.abc import Callable, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import NoReturn, get_args

from outrider_serving import logs, watch
from outrider_serving.api.options import DType, ServeOptions, StartError
from outrider_serving.models.errors import ModelError
from outrider_serving.models.source import DirectorySource, HubSource, Source, check_source, parse_source
from outrider_serving.settings import PodSettings, default_settings

logger = logging.getLogger(__name__)

TEMPLATE_VARIABLE = "OUTRIDER_CHAT_TEMPLATE"
"""Environment variable that holds a chat template's text, empty for none; --chat-template comes first."""

TERMINATION_LOG = Path("/dev/termination-log")
"""What a container writes here shows up as the reason of its end in `kubectl describe pod`."""


class _Parser(argparse.ArgumentParser):
    """Says what is wrong in one line."""

    def error(self, message: str) -> NoReturn:
        self.exit(2, f"{self.prog}: error: {message}\n")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    parser = _parser()
    chosen = parser.parse_args(arguments)
    if chosen.command == "version":
        print(f"outrider {_version()}")
        return 0
    return _serve(chosen)


def _version() -> str:
    try:
        return version("outrider")
    except PackageNotFoundError:
        return "(run from a source tree, not installed)"


def _serve(chosen: argparse.Namespace) -> int:
    logs.configure(chosen.log_level)
    try:
        options, settings = _options(chosen)
        # Everything heavy is behind this import, so that --help and bad input are answered at once.
        from outrider_serving.api.server import run

        run(options, settings)
    except StartError as error:
        _explain(f"outrider serve: error: {error}")
        return 2
    except Exception as error:
        logger.exception("the server failed")
        _explain(f"outrider serve: failed: {type(error).__name__}: {error}")
        return 1


def _explain(message: str) -> None:
    """Say why nothing is served, to the terminal and to Kubernetes."""
    line = " ".join(message.split())
    print(line, file=sys.stderr)
    if TERMINATION_LOG.exists() and os.access(TERMINATION_LOG, os.W_OK):
        TERMINATION_LOG.write_text(line + "\n", encoding="utf-8")


def _options(chosen: argparse.Namespace) -> tuple[ServeOptions, PodSettings]:
    """Checked options; StartError naming the flag, what came and what is allowed."""
    if chosen.admin_port and chosen.admin_port == chosen.port:
        raise StartError(f"--admin-port {chosen.admin_port} must differ from --port")
    if chosen.drain_delay >= chosen.grace_period:
        raise StartError(
            f"--drain-delay {chosen.drain_delay:g} must be less than --grace-period {chosen.grace_period:g}"
        )
    if chosen.api_keys is not None and not chosen.api_keys.is_dir():
        raise StartError(f"--api-keys {chosen.api_keys} must be a directory with one file a tenant")
    source = _source(chosen.model)
    options = ServeOptions(
        model=chosen.model,
        served_name=chosen.served_name or _served_name(source),
        host=chosen.host,
        port=chosen.port,
        admin_port=chosen.admin_port,
        settings_file=chosen.settings,
        keys_directory=chosen.api_keys,
        revision=chosen.revision,
        dtype=chosen.dtype,
        context_length=chosen.context_length,
        chat_template=_chat_template(chosen.chat_template),
        max_waiting=chosen.max_waiting,
        max_running=chosen.max_running,
        drain_delay=chosen.drain_delay,
        grace_period=chosen.grace_period,
    )
    return options, _settings(chosen.settings)


def _source(model: str) -> Source:
    """What MODEL means, as far as it can be told before anything heavy is imported."""
    try:
        source = parse_source(model)
        check_source(source)
    except ModelError as error:
        raise StartError(str(error)) from error
    return source


def _served_name(source: Source) -> str:
    """The name of a model that was given none: its hub id, its directory's or its package's name."""
    if isinstance(source, HubSource):
        return source.repository
    return source.path.resolve().name if isinstance(source, DirectorySource) else source.name


def _settings(file: Path | None) -> PodSettings:
    if file is None:
        return default_settings()
    try:
        return watch.parse_settings(watch.read_settings(file))
    except watch.SettingsError as error:
        raise StartError(f"--settings {file}: {error}") from error


def _chat_template(file: Path | None) -> str | None:
    if file is None:
        text, origin = os.environ.get(TEMPLATE_VARIABLE), TEMPLATE_VARIABLE
        if not text:
            return None
    else:
        text, origin = _template_text(file), f"--chat-template {file}"
    if not text.strip():
        raise StartError(f"{origin}: the chat template is empty")
    return text


def _template_text(file: Path) -> str:
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise StartError(f"--chat-template {file}: cannot be read as UTF-8 text: {error}") from error


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="outrider", description="Speculative decoding as a thing you operate.")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    commands.add_parser("version", help="print the version")
    serve = commands.add_parser(
        "serve",
        help="serve a model over an OpenAI-compatible API",
        formatter_class=argparse.ArgumentDefaultsHelpFormatter,
    )
    add = serve.add_argument
    add("model", metavar="MODEL", type=_text, help="a directory, a hub id, or package:NAME")
    add("--host", default="127.0.0.1", type=_text, help="address to listen on; 0.0.0.0 for all")
    add("--port", default=8000, type=_port, help="port of the API; 0 for any free one")
    add("--admin-port", default=0, type=_port, help="port of the admin endpoints; 0 for none")
    add("--settings", metavar="FILE", type=Path, help="settings file, re-read while serving")
    add("--revision", type=_text, help="branch, tag or commit of a hub id")
    add(
        "--dtype",
        default="auto",
        choices=get_args(DType),
        help="dtype of the weights in memory; auto: the config's, bfloat16 for a GGUF",
    )
    add(
        "--context-length",
        type=_count,
        metavar="N",
        help="most tokens of prompt and output; the model's own by default",
    )
    add("--served-name", type=_text, metavar="NAME", help="name in requests; made from MODEL by default")
    add(
        "--chat-template",
        type=Path,
        metavar="FILE",
        help=f"replaces the model's own; or its text in {TEMPLATE_VARIABLE}",
    )
    add("--api-keys", type=Path, metavar="DIR", help="one file a tenant, keys one a line; open without it")
    add(
        "--max-waiting",
        default=256,
        type=_count,
        metavar="N",
        help="requests that may wait before others get 429",
    )
    add("--max-running", default=32, type=_count, metavar="N", help="requests in one step at most")
    add("--drain-delay", default=5.0, type=_seconds, metavar="SECONDS", help="still accepting after SIGTERM")
    add(
        "--grace-period",
        default=30.0,
        type=_seconds,
        metavar="SECONDS",
        help="from SIGTERM to the exit at most",
    )
    add("--log-level", default="info", choices=logs.LEVELS, help="least severe records to log")
    return parser


def _number(minimum: int, maximum: int, allowed: str) -> Callable[[str], int]:
    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return parse


_port = _number(0, 65535, "a port (0 to 65535)")
_count = _number(1, 2**31 - 1, "a whole number of at least 1")


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 <= value < 86_400:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds (0 to 86400)")
    return value


def _text(text: str) -> str:
    if not text.strip() or len(text) > 1024:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a text of 1 to 1024 characters")
    return text
