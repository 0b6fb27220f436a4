"""The `outrider` command. Bad input ends with status 2 and one line that says what is allowed."""

from __future__ import annotations

import argparse
import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import fields
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from outrider_serving import logs, watch
from outrider_serving.api.options import ServeOptions, StartError
from outrider_serving.bench import cli as bench
from outrider_serving.engine.options import EngineOptions
from outrider_serving.flags import TEMPLATE_VARIABLE, make_parser
from outrider_serving.models.errors import ModelError
from outrider_serving.models.source import DirectorySource, HubSource, Source, check_source, parse_source
from outrider_serving.settings import PodSettings, TenantMode, default_settings
from outrider_serving.suffix.shared import cli as suffix
from outrider_serving.suffix.shared.options import PREFIX, RETENTION_BYTES, WARM_SECONDS, LogOptions
from outrider_serving.tenancy import Tenancy, TenancyError, tenancy_of

logger = logging.getLogger(__name__)

TERMINATION_LOG = Path("/dev/termination-log")
"""What a container writes here shows up as the reason of its end in `kubectl describe pod`."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; the exit status."""
    chosen = make_parser().parse_args(arguments)
    if chosen.command == "version":
        print(f"outrider {_version()}")
        return 0
    if chosen.command == "bench":
        return bench.run(chosen)
    if chosen.command == "suffix":
        return suffix.run(chosen)
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
    logs.flush()  # what is still to be written would come in between
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
    if chosen.step_tokens is not None and chosen.step_tokens < chosen.max_running:
        raise StartError(
            f"--step-tokens {chosen.step_tokens} must be at least --max-running {chosen.max_running}: "
            "each request needs one in every step"
        )
    source, tenancy = _source(chosen.model), _tenancy(chosen)
    options = ServeOptions(
        engine=_engine_options(chosen),
        served_name=chosen.served_name or _served_name(source),
        host=chosen.host,
        port=chosen.port,
        admin_port=chosen.admin_port,
        settings_file=chosen.settings,
        keys_directory=chosen.api_keys,
        tenancy=tenancy,
        shared_cache=_shared_cache(chosen, tenancy),
        retention=chosen.retention,
        warm_seconds=WARM_SECONDS if chosen.warm_seconds is None else chosen.warm_seconds,
        chat_template=_chat_template(chosen.chat_template),
        step_timeout=chosen.step_timeout,
        drain_delay=chosen.drain_delay,
        grace_period=chosen.grace_period,
    )
    return options, _settings(chosen.settings)


def _tenancy(chosen: argparse.Namespace) -> Tenancy:
    try:
        return tenancy_of(
            chosen.tenant_mode, chosen.trusted_gateways, keys=chosen.api_keys is not None, host=chosen.host
        )
    except TenancyError as error:
        raise StartError(str(error)) from error


def _shared_cache(chosen: argparse.Namespace, tenancy: Tenancy) -> LogOptions | None:
    """What is shared through which Redis, None where there is none."""
    if chosen.shared_cache is None:
        for name in (
            "shared_cache_auth",
            "shared_cache_ca",
            "shared_cache_prefix",
            "retention_size",
            "warm_seconds",
        ):
            if getattr(chosen, name) is not None:
                raise StartError(f"--{name.replace('_', '-')} is for a --shared-cache")
        return None
    if tenancy.mode is TenantMode.REQUEST:
        raise StartError(
            "--shared-cache does nothing where each request sees only its own text: give --api-keys, or "
            "--tenant-mode single or header"
        )
    size = chosen.retention_size
    try:
        return LogOptions(
            url=chosen.shared_cache,
            auth=chosen.shared_cache_auth,
            ca=chosen.shared_cache_ca,
            prefix=PREFIX if chosen.shared_cache_prefix is None else chosen.shared_cache_prefix,
            retention_seconds=chosen.retention,
            retention_bytes=RETENTION_BYTES if size is None else size,
        )
    except ValueError as error:
        field, _, what = str(error).partition(": ")
        raise StartError(f"{_SHARING_FLAGS[field]}: {what}") from error


_SHARING_FLAGS = {
    "url": "--shared-cache",
    "ca": "--shared-cache-ca",
    "prefix": "--shared-cache-prefix",
    "retention_seconds": "--retention",
    "retention_bytes": "--retention-size",
}
"""By field of `LogOptions`."""


def _engine_options(chosen: argparse.Namespace) -> EngineOptions:
    """What the engine's process is told: options of the same names."""
    names = [field.name for field in fields(EngineOptions)]
    return EngineOptions(**{name: getattr(chosen, name) for name in names})


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
