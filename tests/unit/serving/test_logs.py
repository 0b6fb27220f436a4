"""The log: one JSON object a line, and nobody who logs waits for whoever reads."""

import io
import json
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import pytest

from outrider_serving import logs

LINES = logs.UNWRITTEN_LINES


@contextmanager
def logger_to(stream: Any) -> Iterator[logging.Logger]:
    logger = logging.Logger("test", logging.INFO)
    handler = logs.LineHandler(stream)
    logger.addHandler(handler)
    try:
        yield logger
        handler.flush()
    finally:
        handler.close()


def test_a_record_is_one_object_a_line_with_its_fields_and_exception() -> None:
    stream = io.StringIO()
    with logger_to(stream) as logger:
        logs.event(logger, "it\nhappened", logging.WARNING, tenants=3)
        try:
            raise ValueError("so it is")
        except ValueError:
            logger.exception("failed")

    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "it\nhappened"
    assert (first["level"], first["logger"], first["tenants"]) == ("warning", "test", 3)
    assert "exception" not in first
    assert "ValueError: so it is" in second["exception"]


def told(lines: Iterable[str], logged: int) -> tuple[list[str], int]:
    """The messages and the number of dropped lines, read until each that was logged is one or the other."""
    messages: list[str] = []
    dropped = 0
    for line in map(json.loads, lines):
        if line["message"] == "lines of the log were dropped":
            dropped += line["lines"]
        else:
            messages.append(line["message"])
        if len(messages) + dropped >= logged:
            break
    return messages, dropped


def test_a_reader_that_stops_costs_lines_and_their_number_is_told() -> None:
    reading, writing = os.pipe()
    room = 2 * LINES
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream, logger_to(stream) as logger:
        started = time.monotonic()
        for number in range(room):
            logger.info("%d of many %s", number, "x" * 200)
        assert time.monotonic() - started < 60  # nobody has read: a handler that waited would never end

        first = [reader.readline() for _ in range(LINES)]  # now there is room
        logger.info("after")
        messages, dropped = told(chain(first, reader), room + 1)

    assert dropped == room + 1 - len(messages) > 0
    assert messages.pop() == "after"
    numbers = [int(message.split()[0]) for message in messages]
    assert numbers == sorted(set(numbers))


def test_lines_that_were_dropped_are_told_also_at_the_end() -> None:
    reading, writing = os.pipe()
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream:
        logger = logging.Logger("test", logging.INFO)
        handler = logs.LineHandler(stream)
        logger.addHandler(handler)
        for _ in range(2 * LINES):
            logger.info("x" * 200)
        ending = threading.Thread(target=handler.flush)
        ending.start()
        messages, dropped = told(reader, 2 * LINES)
        ending.join()
        handler.close()
    assert dropped == 2 * LINES - len(messages) > 0


def test_a_line_may_be_logged_in_the_middle_of_another() -> None:
    """The garbage collector runs at any moment, in whatever thread, and what it ends may log."""
    stream = io.StringIO()
    with logger_to(stream) as logger:

        def interrupt(*_: object) -> None:
            logger.info("within")

        def work() -> None:
            sys.setprofile(interrupt)  # at each call and each return of a function
            logger.info("around")
            sys.setprofile(None)

        working = threading.Thread(target=work, daemon=True)
        working.start()
        working.join(60)
        assert not working.is_alive()
    messages = [json.loads(line)["message"] for line in stream.getvalue().splitlines()]
    assert messages.count("around") == 1
    assert messages.count("within") == len(messages) - 1 > 20


def test_a_stream_that_is_closed_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    with logger_to(stream) as logger:
        logger.info("lost")
    assert capsys.readouterr().err == ""


def test_a_record_that_cannot_be_formatted_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with logger_to(stream) as logger:
        logger.info("%d", "a secret")
        logger.info("next")
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert first["message"] == "a line of the log could not be formatted"
    assert (first["logger"], first["level"], first["error"]) == ("test", "warning", "TypeError")
    assert first["at"].startswith("test_logs.py:")
    assert "secret" not in str(first)
    assert second["message"] == "next"
    assert capsys.readouterr().err == ""


def test_no_field_replaces_the_frame_and_what_is_no_number_breaks_no_line() -> None:
    stream = io.StringIO()
    with logger_to(stream) as logger:
        logs.event(logger, "it happened", level=logging.INFO, time=5, message="other", seconds=1)
        logs.event(logger, "it happened", seconds=float("nan"))
    first, second = map(json.loads, stream.getvalue().splitlines())
    assert (first["message"], first["seconds"]) == ("it happened", 1)
    assert first["time"] != 5
    assert (second["message"], second["error"]) == ("a line of the log could not be formatted", "ValueError")


def test_events_of_a_library_are_made_seldom(monkeypatch: pytest.MonkeyPatch) -> None:
    stream = io.StringIO()
    with logger_to(stream) as logger:
        logger.addFilter(logs.SeldomFilter(["Bad request", "Bad head"], ["Buy this"]))
        for now in (1000.0, 1001.0, 1059.0, 1061.0):
            monkeypatch.setattr("time.monotonic", lambda now=now: now)
            logger.warning("Bad request. Say it so.")
            logger.warning("Buy this.")
        logger.warning("Bad header")
        logger.warning("Another")
        monkeypatch.undo()
    lines = [json.loads(line) for line in stream.getvalue().splitlines()]
    assert [(line["message"], line.get("unsaid")) for line in lines] == [
        ("Bad request. Say it so.", 0),
        ("Bad request. Say it so.", 2),
        ("Bad header", 0),
        ("Another", None),
    ]


def test_libraries_log_as_everything_else_does() -> None:
    """In a process of its own: they are set up once in a process."""
    program = """
from outrider_serving import logs
logs.configure("info")
logs.adopt_libraries()
from transformers.utils.logging import get_logger
from huggingface_hub.utils.logging import get_logger as get_hub_logger
get_logger("transformers.some.module").warning("of transformers")
get_hub_logger("huggingface_hub.some.module").warning("of the hub")
import sys
assert "torch" not in sys.modules
"""
    done = subprocess.run([sys.executable, "-c", program], stderr=subprocess.PIPE, text=True, check=True)
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert [(line["logger"], line["message"]) for line in lines] == [
        ("transformers.some.module", "of transformers"),
        ("huggingface_hub.some.module", "of the hub"),
    ]
