"""What the command line asks of a serving process, checked."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]


class StartError(ValueError):
    """The process cannot serve as it was told to; the message is for the person who told it."""


@dataclass(frozen=True, slots=True)
class ServeOptions:
    """Options of `outrider serve`; `cli.py` says what each means.

    `admin_port` 0 is off, `port` 0 is any free one; `chat_template` is the template's text.
    """

    model: str
    served_name: str
    host: str
    port: int
    admin_port: int
    settings_file: Path | None
    keys_directory: Path | None
    revision: str | None
    dtype: DType
    context_length: int | None
    chat_template: str | None
    max_waiting: int
    max_running: int
    drain_delay: float
    grace_period: float
