"""Log lines are JSON, whatever they carry."""

import json
import logging

import pytest

from outrider_serving import logs


def line_of(record: logging.LogRecord) -> dict[str, object]:
    text = logs.JsonFormatter().format(record)
    assert "\n" not in text
    parsed = json.loads(text)
    assert isinstance(parsed, dict)
    return parsed


def test_an_event_has_its_fields(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO):
        logs.event(logging.getLogger("x"), "request", tokens=3, tenant="red")
    line = line_of(caplog.records[0])
    assert (line["level"], line["logger"], line["message"]) == ("info", "x", "request")
    assert (line["tokens"], line["tenant"]) == (3, "red")


def test_an_exception_stays_on_the_line(caplog: pytest.LogCaptureFixture) -> None:
    try:
        raise ValueError("broken\nin two")
    except ValueError:
        logging.getLogger("x").exception("it failed")
    assert "ValueError: broken" in str(line_of(caplog.records[0])["exception"])
