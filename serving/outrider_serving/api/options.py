"""What the command line asks of a serving process, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from outrider_serving.engine.options import EngineOptions
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.tenancy import Tenancy


class StartError(ValueError):
    """The process cannot serve as it was told to; the message is for the person who told it."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `outrider serve`; `cli.py` says what each means.

    `admin_port` 0 is off, `port` 0 is any free one; `chat_template` is the template's text; times are in
    seconds.
    """

    engine: EngineOptions
    served_name: str
    host: str
    port: int
    admin_port: int
    settings_file: Path | None
    keys_directory: Path | None
    tenancy: Tenancy
    shared_cache: LogOptions | None
    retention: int
    warm_seconds: float
    chat_template: str | None
    step_timeout: float
    drain_delay: float
    grace_period: float
