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


def test_what_happens_too_often_is_logged_seldom_and_counted(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    seldom = logs.Seldom()
    for now in (1000.0, 1001.0, 1059.0, 1061.0, 1062.0):
        with monkeypatch.context() as clock:
            clock.setattr("time.monotonic", lambda now=now: now)
            seldom.event(logging.getLogger("x"), "refused", port=80)
    lines = [line_of(record) for record in caplog.records]
    assert [(line["message"], line["port"], line["unsaid"]) for line in lines] == [
        ("refused", 80, 0),
        ("refused", 80, 2),
    ]
