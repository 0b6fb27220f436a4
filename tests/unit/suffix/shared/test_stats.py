"""What is told of trouble: the same words while it lasts, nothing of what heals at once."""

from __future__ import annotations

import logging

import pytest

from outrider_serving.suffix.shared import stats
from outrider_serving.suffix.shared.stats import TROUBLE_SECONDS, Telling, Trouble


def test_trouble_has_the_same_words_while_it_lasts(monkeypatch: pytest.MonkeyPatch) -> None:
    now = 100.0
    monkeypatch.setattr(stats.time, "monotonic", lambda: now)
    trouble = Trouble()
    assert trouble.words is None
    trouble.begin("timeout", TimeoutError())
    assert trouble.words is None
    now += TROUBLE_SECONDS
    assert trouble.words == "timeout: there was no answer"
    trouble.begin("timeout", TimeoutError("another text"))
    assert trouble.words == "timeout: there was no answer"
    trouble.begin("auth", ValueError("wrong\npassword" + "!" * 500))
    assert trouble.words is not None
    assert trouble.words.startswith("auth: wrong password!")
    assert len(trouble.words) == 206
    trouble.end()
    assert trouble.words is None
    trouble.begin("timeout", TimeoutError())
    assert trouble.words is None


def test_faults_are_told_the_first_the_second_and_the_fourth_time(caplog: pytest.LogCaptureFixture) -> None:
    telling = Telling(logging.getLogger("test"))
    for _ in range(9):
        telling.fault("it failed", "timeout", TimeoutError("x" * 500))
    telling.fault("it failed", "auth", ValueError("no"))
    told = [record.fields for record in caplog.records]  # type: ignore[attr-defined]
    assert [(one["kind"], one["times"]) for one in told] == [
        *(("timeout", times) for times in (1, 2, 4, 8)),
        ("auth", 1),
    ]
    assert max(len(one["error"]) for one in told) == 200
    telling.forget()
    telling.fault("it failed", "auth", ValueError("no"))
    assert caplog.records[-1].fields["times"] == 1  # type: ignore[attr-defined]
