"""A process is known by its id and its start, so that no stranger is ever ended."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

from outrider_local import processes
from outrider_local.processes import Identity


def sleeper() -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])


def test_identity_survives_a_file_and_ends_its_process(tmp_path: Path) -> None:
    with sleeper() as process:
        identity = processes.identify(process.pid)
        assert identity is not None
        processes.write_json(tmp_path / "record.json", identity.to_json())
        again = Identity.from_json(json.loads((tmp_path / "record.json").read_text()))
        assert again == identity
        assert again.alive
        again.end(5)
        assert not again.alive
        assert process.wait(5) == -signal.SIGTERM


def test_another_process_with_the_same_id_is_left_alone() -> None:
    with sleeper() as process:
        identity = processes.identify(process.pid)
        assert identity is not None
        for stranger in (
            replace(identity, started=identity.started - 1),
            replace(identity, boot="another boot"),
        ):
            assert not stranger.alive
            stranger.end(0)
        assert process.poll() is None
        process.kill()


def test_a_zombie_is_not_alive() -> None:
    process = subprocess.Popen(["/bin/true"])
    identity = processes.identify(process.pid)
    os.waitid(os.P_PID, process.pid, os.WEXITED | os.WNOWAIT)
    assert identity is None or not identity.alive
    process.wait()


def test_start_time_with_an_odd_command_name() -> None:
    stat = "42 (a) b (c)) S " + " ".join(str(number) for number in range(4, 53))
    assert processes.parse_start_time(stat) == 22
    assert processes.parse_start_time(stat.replace(") S ", ") Z ")) is None
