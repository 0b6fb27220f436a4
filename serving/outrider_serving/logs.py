"""Structured logs: one JSON object a line on stderr, so that a cluster's collector needs no parser.

Prompts, completions and API keys are never logged. A record's own fields are passed as
`extra={"fields": {...}}`; everything else is the frame around them.
"""

from __future__ import annotations

import json
import logging
import math
import sys
import time
from datetime import UTC, datetime
from typing import Any

LEVELS = ("debug", "info", "warning", "error")
"""Levels that `--log-level` accepts."""


class JsonFormatter(logging.Formatter):
    """One JSON object a record: time, level, logger, message, the record's fields, the exception if any."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        line: dict[str, Any] = {
            "time": datetime.fromtimestamp(record.created, UTC).isoformat(timespec="milliseconds"),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        line.update(getattr(record, "fields", {}))
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        return json.dumps(line, default=str)


def configure(level: str) -> None:
    """Send every log record of this process to stderr as JSON, from `level` (one of LEVELS) upwards."""
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(JsonFormatter())
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries repeat what we log ourselves, or talk to a person at a terminal.
    for name in ("uvicorn.error", "uvicorn.access", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.captureWarnings(capture=True)


def event(logger: logging.Logger, message: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log `message` with `fields` beside it."""
    logger.log(level, message, extra={"fields": fields})


class Seldom:
    """Logs what may happen thousands of times a second once a minute."""

    SECONDS = 60.0

    def __init__(self) -> None:
        self._next = -math.inf
        self._unsaid = 0

    def event(self, logger: logging.Logger, message: str, /, **fields: object) -> None:
        """Log a warning, with the number of those that were not logged since the last one, or count it."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return
        event(logger, message, logging.WARNING, unsaid=self._unsaid, **fields)
        self._next, self._unsaid = now + self.SECONDS, 0
