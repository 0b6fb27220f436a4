"""What is known of a node and its forwarders, also when the files that say it are spoilt."""

from __future__ import annotations

import fcntl
import subprocess
import sys
import time
from pathlib import Path
from typing import TextIO

import pytest

from outrider_local import cgroups, forward, node
from outrider_local.layout import Layout
from outrider_local.processes import write_json
from outrider_local.report import ProblemError
from outrider_local.settings import Settings

SPOILT = ("", "{", "[]", "{}", '{"cgroups": 1}', '{"process": []}', "\udcff")


@pytest.fixture
def settings(tmp_path: Path) -> Settings:
    return Settings(tmp_path, tmp_path, tmp_path / "state" / "outrider", "mine")


@pytest.fixture
def layout(settings: Settings) -> Layout:
    layout = Layout(settings.state)
    layout.make()
    return layout


def spoil(path: Path, text: str) -> None:
    path.write_text(text, errors="surrogateescape")


def sleeper(*words: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(10)", *words])


def test_a_name_in_two_state_folders_has_two_cgroups() -> None:
    one, two = Layout(Path("/home/a/outrider")), Layout(Path("/home/b/outrider"))
    assert one.cgroup != two.cgroup
    assert one.cgroup == Layout(Path("/home/a/outrider")).cgroup
    assert one.cgroup.startswith("outrider-")


def test_a_record_survives_a_file(layout: Layout) -> None:
    assert node.read_record(layout) is None
    record = node.Record(("/sys/fs/cgroup/mine",), None, None, True)
    write_json(layout.record, record.to_json())
    assert node.read_record(layout) == record


@pytest.mark.parametrize("text", SPOILT)
def test_a_spoilt_record_is_a_node_that_was_not_ended(
    text: str, layout: Layout, settings: Settings, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Its processes are found through the cgroups of its name."""
    spoil(layout.record, text)
    spoil(layout.forwards / "api.json", text)
    folder = layout.root.parents[2] / layout.cgroup
    folder.mkdir()
    monkeypatch.setattr(cgroups, "find_here", lambda name: [str(folder)] if name == layout.cgroup else [])
    monkeypatch.setattr(cgroups, "remove", lambda _: [])
    assert node.running(settings) is None
    with sleeper() as process:
        (folder / "cgroup.procs").write_text(str(process.pid))
        assert node.down(settings)
        assert process.wait(5)
    assert not settings.state_home.exists()


@pytest.mark.parametrize("text", SPOILT)
def test_the_forwarder_of_a_spoilt_record_is_known_while_it_runs(
    text: str, layout: Layout, tmp_path: Path
) -> None:
    path = layout.forwards / "api.json"
    spoil(path, text)
    assert forward.running(layout) == {}

    program = tmp_path / "outrider_local" / "forwarder.py"
    program.parent.mkdir()
    program.write_text("import time; time.sleep(10)")
    route = "16443:127.0.0.1:6443"
    command = [sys.executable, "-m", "outrider_local.forwarder", "3", str(path), "4711", route]
    with subprocess.Popen(command, cwd=tmp_path, env={"PYTHONPATH": str(tmp_path)}) as process:
        end = time.monotonic() + 5
        while not forward.running(layout) and time.monotonic() < end:  # it is still a copy of this one
            time.sleep(0.01)
        found = forward.running(layout)["api"]
        assert (found.process.pid, found.into, found.routes) == (process.pid, 4711, (route,))
        forward.stop_all(layout)
        assert process.wait(5)
    assert not list(layout.forwards.iterdir())


def test_a_lock_that_was_removed_is_none(settings: Settings, monkeypatch: pytest.MonkeyPatch) -> None:
    """A `down` ends between another command's opening the lock file and its locking it."""
    path = settings.state_home / ".mine.lock"
    flock, calls = fcntl.flock, []

    def after_a_down(file: TextIO, operation: int) -> None:
        calls.append(path)
        if len(calls) == 1:
            path.unlink()
            settings.state_home.rmdir()
        flock(file, operation)

    with monkeypatch.context() as patched:
        patched.setattr(fcntl, "flock", after_a_down)
        with node._locked(settings) as lock:
            assert len(calls) == 2
            assert lock == path
            patched.undo()
            another = "another command is starting or ending the node mine"
            with pytest.raises(ProblemError, match=another), node._locked(settings):
                pass
