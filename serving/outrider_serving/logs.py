"""Structured logs: one JSON object a line on stderr, so that a cluster's collector needs no parser.

Prompts, completions and API keys are never logged. A record's own fields are passed as
`extra={"fields": {...}}`; everything else is the frame around them. A collector that stops reading costs
lines, never a request.
"""

from __future__ import annotations

import json
import logging
import math
import queue
import sys
import threading
import time
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
"""Levels that `--log-level` accepts."""

UNWRITTEN_LINES = 10_000
"""Lines that may wait to be written."""

LAST_LINES_SECONDS = 1.0
"""How long the end of the process waits for them."""


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


class LineHandler(logging.Handler):
    """Writes lines in a thread of its own: whoever logs never waits for whoever reads.

    Lines that find UNWRITTEN_LINES before them are dropped, and counted in the log once there is room.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, which may block."""
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._stream = stream
        self._lines: queue.Queue[str] = queue.Queue(UNWRITTEN_LINES)
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Let a record's line wait to be written; called one record at a time, as logging does."""
        try:
            if self._dropped and not self._lines.full():
                self._lines.put_nowait(self.format(_dropped(self._dropped)))
                self._dropped = 0
            self._lines.put_nowait(self.format(record))
        except queue.Full:
            self._dropped += 1
        except Exception:
            self.handleError(record)

    def flush(self) -> None:
        """Wait until all lines are written, or LAST_LINES_SECONDS are over."""
        with self._lines.all_tasks_done:
            self._lines.all_tasks_done.wait_for(lambda: not self._lines.unfinished_tasks, LAST_LINES_SECONDS)

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody will ever read it: there is no one to tell
            finally:
                self._lines.task_done()


def _dropped(lines: int) -> logging.LogRecord:
    return logging.makeLogRecord(
        {
            "name": __name__,
            "levelname": "WARNING",
            "msg": "lines of the log were dropped",
            "fields": {"lines": lines},
        }
    )


def configure(level: str) -> None:
    """Send every log record of this process to stderr as JSON, from `level` (one of LEVELS) upwards."""
    handler = LineHandler(sys.stderr)
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
