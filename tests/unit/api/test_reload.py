"""What a broken file leaves in force."""

import asyncio
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from outrider_serving import watch
from outrider_serving.api import reload
from outrider_serving.api.keys import NO_KEYS
from outrider_serving.api.state import Serving
from outrider_serving.settings import PodSettings, default_settings

SETTINGS = default_settings()


@pytest.fixture
def serving() -> Iterator[Serving]:
    made = Serving(served_name="m", settings=SETTINGS, keys=None)
    yield made
    made.close()


def test_without_a_directory_the_api_is_open() -> None:
    assert reload.first_keys(None) is None


@pytest.mark.parametrize("content", ["two words\n", "schlüssel", None])
def test_a_broken_or_empty_directory_admits_nobody(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "red").write_text(content)
    assert reload.first_keys(tmp_path) == NO_KEYS
    assert "every request is refused" in caplog.text
    assert "words" not in caplog.text


def test_an_unreadable_directory_admits_nobody(tmp_path: Path) -> None:
    assert reload.first_keys(tmp_path / "none") == NO_KEYS


async def test_removing_all_keys_admits_nobody(
    tmp_path: Path, serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.follow, "__kwdefaults__", {"interval": 0.01})
    (tmp_path / "red").write_text("one")
    serving.keys = reload.first_keys(tmp_path)
    (watcher,) = reload.watchers(serving, settings_file=None, keys_directory=tmp_path)
    task = asyncio.create_task(watcher)
    (tmp_path / "red").unlink()
    for _ in range(500):
        if serving.keys == NO_KEYS:
            break
        await asyncio.sleep(0.01)
    task.cancel()
    assert serving.keys == NO_KEYS
    assert "there are no keys: every request is refused" in caplog.text


def test_settings_come_into_force_once(serving: Serving, caplog: pytest.LogCaptureFixture) -> None:
    fresh = PodSettings(generation=5, arms=SETTINGS.arms, in_force="stable")
    with caplog.at_level(logging.INFO):
        serving.apply_settings(fresh)
        serving.apply_settings(fresh)
    assert caplog.text.count("settings in force") == 1
    assert serving.pod_state.generation == 5


def test_good_settings_clear_the_error(serving: Serving) -> None:
    serving.refuse_settings("generation: must be 0 or more")
    assert serving.pod_state.settings_error == "generation: must be 0 or more"
    serving.apply_settings(SETTINGS)
    assert serving.pod_state.settings_error is None
