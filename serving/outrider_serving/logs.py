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
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import Any, TextIO

LEVELS = ("debug", "info", "warning", "error")
"""Levels that `--log-level` accepts."""

UNWRITTEN_LINES = 10_000
"""Lines that may wait to be written."""

LAST_LINES_SECONDS = 1.0
"""How long the end of the process waits for them."""

STRANGERS_DOING = ("Invalid HTTP request received", "Unsupported upgrade request")
"""What uvicorn says of what anybody may send, without a key and as often as they like."""

STRANGERS_GONE = ("socket.send() raised exception",)
"""What asyncio says where clients went away while something was written to them."""

POINTLESS = ("No supported WebSocket library detected",)
"""uvicorn's advice to install one, after each of the latter: there is nothing here that would use it."""


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
        if record.exc_info:
            line["exception"] = self.formatException(record.exc_info)
        # Beside the frame, which no field replaces.
        return json.dumps(line | getattr(record, "fields", {}) | line, default=str, allow_nan=False)


class LineHandler(logging.Handler):
    """Writes lines in a thread of its own: whoever logs never waits for whoever reads.

    Lines that find UNWRITTEN_LINES before them are dropped; the log counts them once there is room, or at
    the end.
    """

    def __init__(self, stream: TextIO) -> None:
        """Write to `stream`, which may block."""
        super().__init__()
        self.setFormatter(JsonFormatter())
        self._stream = stream
        # It takes a line even while the same thread puts one: what the garbage collector ends may log.
        self._lines: queue.SimpleQueue[str | threading.Event] = queue.SimpleQueue()
        self._dropped = 0
        threading.Thread(target=self._write, name="log", daemon=True).start()

    def emit(self, record: logging.LogRecord) -> None:
        """Let a record's line wait to be written; called one record at a time, as logging does."""
        if self._lines.qsize() >= UNWRITTEN_LINES:
            self._dropped += 1
            return
        self._tell_dropped()
        try:
            self._lines.put(self.format(record))
        except Exception as error:
            self._lines.put(self.format(_unformatted(record, error)))

    def flush(self) -> None:
        """Wait until all lines so far are written, or LAST_LINES_SECONDS are over."""
        written = threading.Event()
        self.acquire()
        try:
            self._tell_dropped()
        finally:
            self.release()
        self._lines.put(written)
        written.wait(LAST_LINES_SECONDS)

    def _tell_dropped(self) -> None:
        dropped, self._dropped = self._dropped, 0
        if dropped:
            self._lines.put(self.format(_told(__name__, "lines of the log were dropped", lines=dropped)))

    def _write(self) -> None:
        while True:
            line = self._lines.get()
            if isinstance(line, threading.Event):
                line.set()
                continue
            try:
                self._stream.write(line + "\n")
                self._stream.flush()
            except (OSError, ValueError):
                pass  # nobody will ever read it: there is no one to tell


def _unformatted(record: logging.LogRecord, error: Exception) -> logging.LogRecord:
    return _told(
        record.name,
        "a line of the log could not be formatted",
        error=type(error).__name__,
        at=f"{record.filename}:{record.lineno}",
    )


def _told(logger: str, message: str, **fields: object) -> logging.LogRecord:
    """What the log has to say about itself."""
    return logging.makeLogRecord({"name": logger, "levelname": "WARNING", "msg": message, "fields": fields})


def configure(level: str) -> None:
    """Send every log record of this process to stderr as JSON, from `level` (one of LEVELS) upwards."""
    handler = LineHandler(sys.stderr)
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(level.upper())
    # Libraries repeat what we log ourselves, or talk to a person at a terminal.
    for name in ("uvicorn.error", "uvicorn.access", "httpx", "httpcore", "asyncio"):
        logging.getLogger(name).setLevel(max(logging.WARNING, root.level))
    logging.getLogger("uvicorn.error").filters[:] = [SeldomFilter(STRANGERS_DOING, POINTLESS)]
    logging.getLogger("asyncio").filters[:] = [SeldomFilter(STRANGERS_GONE, ())]
    logging.captureWarnings(capture=True)


def flush() -> None:
    """Wait until what was logged so far is written, or LAST_LINES_SECONDS are over."""
    for handler in logging.getLogger().handlers:
        handler.flush()


def adopt_libraries() -> None:
    """Let transformers and the hub's client log as everything else does; imports them, but not torch.

    By themselves they write to stderr, in the thread that logs.
    """
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    logging.getLogger("huggingface_hub").handlers.clear()


def event(logger: logging.Logger, message: str, /, level: int = logging.INFO, **fields: object) -> None:
    """Log `message` with `fields` beside it."""
    logger.log(level, message, extra={"fields": fields})


class Seldom:
    """Lets what may happen thousands of times a second be told once a minute."""

    SECONDS = 60.0

    def __init__(self) -> None:
        self._next = -math.inf
        self._unsaid = 0

    def due(self) -> int | None:
        """None where this is not to be told, else the number of those that were not since the last one."""
        now = time.monotonic()
        if now < self._next:
            self._unsaid += 1
            return None
        unsaid, self._next, self._unsaid = self._unsaid, now + self.SECONDS, 0
        return unsaid

    def event(self, logger: logging.Logger, message: str, /, **fields: object) -> None:
        """Log a warning, with the number of those that were not logged since the last one, or count it."""
        unsaid = self.due()
        if unsaid is not None:
            event(logger, message, logging.WARNING, unsaid=unsaid, **fields)


class SeldomFilter(logging.Filter):
    """Makes events of a library seldom, by how their messages begin."""

    def __init__(self, seldom: Iterable[str], never: Iterable[str]) -> None:
        """Log each of `seldom` as `Seldom` does, and none of `never`."""
        super().__init__()
        self._seldom = {beginning: Seldom() for beginning in seldom}
        self._never = tuple(never)

    def filter(self, record: logging.LogRecord) -> bool:
        """Whether to log a record; to one of those that are seldom, the number of the others is added."""
        message = str(record.msg)
        for beginning, seldom in self._seldom.items():
            if message.startswith(beginning):
                unsaid = seldom.due()
                record.fields = {"unsaid": unsaid}
                return unsaid is not None
        return not message.startswith(self._never)
