"""A tiny model, and one server that most tests share."""

from __future__ import annotations

import logging
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from outrider_serving.settings import Objective, PodSettings, Workload, default_settings
from serving.api.process import ServerProcess, eventually
from serving.tiny import make_tiny_model

KEY = "red-key-1"
"""A key of tenant red."""

SETTINGS = PodSettings(
    generation=1,
    arms=default_settings().arms,
    in_force="stable",
    workloads=[
        Workload(name="easy", objective=Objective(ttft_milliseconds=60_000, tpot_milliseconds=60_000)),
        Workload(name="hard", objective=Objective(ttft_milliseconds=60_000, tpot_milliseconds=1)),
    ],
)

Start = Callable[..., ServerProcess]


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model with a chat template, and a context that takes a while to fill."""
    return make_tiny_model(tmp_path_factory.mktemp("models") / "tiny", context_length=8192)


@pytest.fixture(scope="session")
def settings_file(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("settings") / "settings.json"
    file.write_text(SETTINGS.model_dump_json(by_alias=True))
    return file


@pytest.fixture(scope="session")
def keys_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    (directory / "red").write_text(f"{KEY}\n")
    return directory


@pytest.fixture(scope="session")
def server(tiny: Path, settings_file: Path, keys_directory: Path) -> Iterator[ServerProcess]:
    """A server with settings and keys. In the end it is told to stop twice, which ends it at once."""
    process = ServerProcess(str(tiny), "--settings", str(settings_file), "--api-keys", str(keys_directory))
    try:
        yield process.ready()
        process.signal(signal.SIGTERM)
        eventually(lambda: process.get("/readyz").status_code == 503)
        process.signal(signal.SIGINT)
        assert process.wait(5) == 128 + signal.SIGINT
    finally:
        process.end()


@pytest.fixture
def start() -> Iterator[Start]:
    """Starts servers that end with the test."""
    started: list[ServerProcess] = []

    def start_one(*arguments: str, env: dict[str, str] | None = None) -> ServerProcess:
        started.append(ServerProcess(*arguments, env=env))
        return started[-1]

    yield start_one
    for process in started:
        process.end()


@pytest.fixture
def quiet_logging() -> Iterator[None]:
    """Undoes what the command does to this process's logging."""
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(capture=False)
