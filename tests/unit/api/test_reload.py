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


@pytest.mark.parametrize("content", ["two words\n", "schlüssel", None])
def test_a_broken_or_empty_directory_admits_nobody(
    tmp_path: Path, serving: Serving, caplog: pytest.LogCaptureFixture, content: str | None
) -> None:
    if content is not None:
        (tmp_path / "red").write_text(content)
    reload.load_keys(serving, tmp_path)
    assert serving.keys == NO_KEYS
    assert "every request is refused" in caplog.text
    assert (serving.pod_state.keys_error is None) == (content is None)
    assert "words" not in caplog.text + str(serving.pod_state)


def test_an_unreadable_directory_admits_nobody(tmp_path: Path, serving: Serving) -> None:
    reload.load_keys(serving, tmp_path / "none")
    assert serving.keys == NO_KEYS
    assert "cannot be read" in str(serving.pod_state.keys_error)


def test_one_tenants_mistake_is_reported_once_and_stops_nobody(
    tmp_path: Path, serving: Serving, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "red").write_text("one")
    (tmp_path / "blue").write_text("revoked")
    reload.load_keys(serving, tmp_path)
    (tmp_path / "red").write_text("two words")
    (tmp_path / "blue").write_text("fresh")
    for _ in range(2):
        reload.load_keys(serving, tmp_path)
    assert serving.keys is not None
    assert [serving.keys.tenant_of(key) for key in ("one", "revoked", "fresh")] == ["red", None, "blue"]
    assert str(serving.pod_state.keys_error).startswith("'red': line 1: ")
    assert [record.message for record in caplog.records].count("keys refused") == 1
    (tmp_path / "red").unlink()
    reload.load_keys(serving, tmp_path)
    assert serving.keys.tenants == ["blue"]
    assert serving.pod_state.keys_error is None


def test_what_is_wrong_with_many_tenants_is_counted(tmp_path: Path, serving: Serving) -> None:
    for number in range(100):
        (tmp_path / f"tenant-{number}").write_text("two words")
    reload.load_keys(serving, tmp_path)
    assert str(serving.pod_state.keys_error).endswith("; and 92 more")


async def test_removing_all_keys_admits_nobody(
    tmp_path: Path, serving: Serving, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(watch.follow, "__kwdefaults__", {"interval": 0.01})
    (tmp_path / "red").write_text("one")
    reload.load_keys(serving, tmp_path)
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
