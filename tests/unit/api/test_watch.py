"""Files that change: applied once each, and never fatal."""

import asyncio
import json
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from outrider_serving.settings import default_settings
from outrider_serving.watch import SettingsError, follow, parse_settings, read_settings

FAST = 0.01


async def until(condition: Callable[[], object]) -> None:
    for _ in range(500):
        if condition():
            return
        await asyncio.sleep(FAST)
    pytest.fail("it did not come true in time")


async def test_every_change_is_applied_once(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1")
    applied: list[bytes] = []
    failures: list[Exception] = []
    task = asyncio.create_task(
        follow(lambda: read_settings(file), applied.append, failures.append, interval=FAST)
    )
    await until(lambda: applied == [b"1"])
    await asyncio.sleep(5 * FAST)
    file.write_bytes(b"2")
    await until(lambda: applied == [b"1", b"2"])
    file.unlink()
    await until(lambda: failures)
    await asyncio.sleep(5 * FAST)
    assert len(failures) == 1
    file.write_bytes(b"2")
    await until(lambda: applied == [b"1", b"2", b"2"])
    task.cancel()


async def test_a_change_waits_for_no_other_work(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.write_bytes(b"1")
    end, pool = threading.Event(), ThreadPoolExecutor(1)
    asyncio.get_running_loop().set_default_executor(pool)
    busy = asyncio.create_task(asyncio.to_thread(end.wait, 60))
    applied: list[bytes] = []
    task = asyncio.create_task(
        follow(lambda: read_settings(file), applied.append, lambda error: None, interval=FAST)
    )
    try:
        await until(lambda: applied == [b"1"])
        assert not busy.done()
    finally:
        end.set()
        await busy
        task.cancel()


async def test_its_thread_ends_with_it(tmp_path: Path) -> None:
    threads: list[threading.Thread] = []

    def read() -> bytes:
        threads.append(threading.current_thread())
        return b""

    task = asyncio.create_task(follow(read, lambda content: None, lambda error: None, interval=FAST))
    await until(lambda: len(threads) > 1)
    task.cancel()
    await asyncio.wait([task])
    await until(lambda: not threads[-1].is_alive())
    assert len(set(threads)) == 1


async def test_a_moved_link_is_a_change(tmp_path: Path) -> None:
    for name in ("first", "second"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "settings.json").write_text(name)
    (tmp_path / "..data").symlink_to("first")
    applied: list[bytes] = []
    task = asyncio.create_task(
        follow(
            lambda: read_settings(tmp_path / "..data" / "settings.json"),
            applied.append,
            lambda error: None,
            interval=FAST,
        )
    )
    await until(lambda: applied == [b"first"])
    (tmp_path / "..next").symlink_to("second")
    (tmp_path / "..next").rename(tmp_path / "..data")
    await until(lambda: applied == [b"first", b"second"])
    task.cancel()


def test_settings_as_the_operator_writes_them() -> None:
    settings = default_settings()
    assert parse_settings(settings.model_dump_json(by_alias=True).encode()) == settings


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"generation": -1}, "generation: Input should be greater than or equal to 0"),
        ({"inForce": "candidate"}, "is not one of the arms"),
        ({"surprise": 1}, "surprise"),
        ({"arms": {"stable": {"proposer": {"maxDepth": 65}}}}, "arms.stable.proposer.maxDepth"),
    ],
)
def test_bad_settings_name_the_field(change: dict[str, object], says: str) -> None:
    good = json.loads(default_settings().model_dump_json(by_alias=True))
    with pytest.raises(SettingsError) as refused:
        parse_settings(json.dumps(good | change).encode())
    assert says in str(refused.value)


@pytest.mark.parametrize("raw", [b"", b"{", b"[]", b"\xff"])
def test_settings_that_are_no_object(raw: bytes) -> None:
    with pytest.raises(SettingsError, match="the settings: "):
        parse_settings(raw)


def test_a_missing_settings_file(tmp_path: Path) -> None:
    with pytest.raises(SettingsError, match="No such file"):
        read_settings(tmp_path / "none")
