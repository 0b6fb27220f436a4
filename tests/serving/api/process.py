"""Runs the real command as a process of its own, and reads what it logs."""

from __future__ import annotations

import json
import os
import queue
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import httpx
import openai
from prometheus_client.parser import text_string_to_metric_families

from outrider_local.ports import free_port

ROOT = Path(__file__).parents[3]
START_SECONDS = 60.0


def _environment() -> dict[str, str]:
    """This process's, so that the command finds the package and starts as fast as it does for a user."""
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    return inherited | {"PYTHONPATH": str(ROOT / "serving"), "OMP_NUM_THREADS": "1"}


class ServerProcess:
    """`outrider serve` with these arguments on a free port; `ready` waits for the model."""

    def __init__(self, *arguments: str, env: dict[str, str] | None = None) -> None:
        self.admin_port = free_port()
        command = [sys.executable, "-m", "outrider_serving", "serve", *arguments]
        self._process = subprocess.Popen(
            [*command, "--port", "0", "--admin-port", str(self.admin_port)],
            cwd=ROOT,
            env=_environment() | (env or {}),
            stderr=subprocess.PIPE,
            text=True,
        )
        self.lines: list[str] = []
        self.log_is_read = threading.Event()
        self.log_is_read.set()
        self._ports: queue.SimpleQueue[int] = queue.SimpleQueue()
        self._reader = threading.Thread(target=self._read, daemon=True)
        self._reader.start()
        self._port: int | None = None

    def _read(self) -> None:
        assert self._process.stderr is not None
        for line in self._process.stderr:
            self.log_is_read.wait()
            self.lines.append(line)
            if '"listening"' in line:
                self._ports.put(json.loads(line)["port"])

    @property
    def pid(self) -> int:
        """Of the process."""
        return self._process.pid

    @property
    def engine_pid(self) -> int:
        """Of the newest process of the engine."""
        return int(self.events("the engine's process has started")[-1]["pid"])

    @property
    def url(self) -> str:
        """Where the API is."""
        if self._port is None:
            self._port = self._ports.get(timeout=START_SECONDS)
        return f"http://127.0.0.1:{self._port}"

    @property
    def admin_url(self) -> str:
        """Where the admin endpoints are."""
        return f"http://127.0.0.1:{self.admin_port}"

    def ready(self) -> ServerProcess:
        """Wait until it is."""
        deadline = time.monotonic() + START_SECONDS
        while self.get("/readyz").status_code != 200:
            assert self._process.poll() is None, self.log
            assert time.monotonic() < deadline, self.log
            time.sleep(0.05)
        return self

    @property
    def log(self) -> str:
        """Everything on stderr so far."""
        return "".join(self.lines)

    def events(self, message: str) -> list[dict[str, Any]]:
        """The log's events of one kind so far."""
        return [event for event in map(json.loads, list(self.lines)) if event["message"] == message]

    def get(self, path: str, **headers: str) -> httpx.Response:
        """GET from the API."""
        return httpx.get(self.url + path, headers=headers, timeout=10)

    def state(self) -> dict[str, Any]:
        """What the admin port reports."""
        answer = httpx.get(self.admin_url + "/admin/state", timeout=10)
        assert answer.status_code == 200
        return dict(answer.json())

    def metric(self, sample: str, **labels: str) -> float:
        """The sum of a sample's series that have these labels."""
        return sum(
            found.value
            for family in text_string_to_metric_families(self.get("/metrics").text)
            for found in family.samples
            if found.name == sample and labels.items() <= found.labels.items()
        )

    def client(self, key: str = "none", **options: Any) -> openai.OpenAI:
        """The stock client."""
        return openai.OpenAI(base_url=self.url + "/v1", api_key=key, max_retries=0, timeout=30, **options)

    def signal(self, number: int = signal.SIGTERM) -> None:
        """Send a signal."""
        self._process.send_signal(number)

    def wait(self, seconds: float = START_SECONDS) -> int:
        """Wait for its end; the exit status."""
        status = self._process.wait(seconds)
        self._reader.join(5)
        return status

    def end(self) -> None:
        """End it, however it does."""
        if self._process.poll() is None:
            self._process.kill()
        self._process.wait()


def eventually(condition: Any, seconds: float = 10.0) -> None:
    """Wait until `condition()` holds."""
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it did not come true in time"
        time.sleep(0.05)
