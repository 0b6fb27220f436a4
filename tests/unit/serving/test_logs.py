"""The log: one JSON object a line, and nobody who logs waits for whoever reads."""

import io
import json
import logging
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
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


def test_a_reader_that_stops_costs_lines_and_their_number_is_told() -> None:
    reading, writing = os.pipe()
    room = 2 * LINES
    with os.fdopen(reading) as reader, os.fdopen(writing, "w") as stream, logger_to(stream) as logger:
        started = time.monotonic()
        for number in range(room):
            logger.info("line %d of many %s", number, "x" * 200)
        assert time.monotonic() - started < 60  # nobody has read: a handler that waited would never end

        lines: list[dict[str, Any]] = []
        while len(lines) < LINES:  # of those that were not dropped some more are in the pipe
            lines.append(json.loads(reader.readline()))
        logger.info("after")
        while (line := json.loads(reader.readline()))["message"] != "after":
            lines.append(line)

    dropped = lines.pop()
    assert dropped["message"] == "lines of the log were dropped"
    assert dropped["lines"] == room - len(lines) > 0
    assert [line["message"].split()[1] for line in lines] == [str(number) for number in range(len(lines))]


def test_a_stream_that_is_closed_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    stream.close()
    with logger_to(stream) as logger:
        logger.info("lost")
    assert capsys.readouterr().err == ""


def test_a_record_that_cannot_be_formatted_fails_nobody(capsys: pytest.CaptureFixture[str]) -> None:
    stream = io.StringIO()
    with logger_to(stream) as logger:
        logger.info("%d", "no number")
        logger.info("next")
    assert json.loads(stream.getvalue())["message"] == "next"
    assert "Logging error" in capsys.readouterr().err
