"""Clients that keep their connections while the server drains."""

import os
import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import httpx
import pytest

from serving.api.conftest import Start
from serving.api.process import eventually
from serving.tiny import make_tiny_model


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain", context_length=10_000)


def test_an_answer_that_was_asked_for_before_the_drain_is_the_last(start: Start, model: Path) -> None:
    server = start(str(model), "--drain-delay", "30", "--grace-period", "60").ready()
    asked = {"model": model.name, "prompt": "a", "max_tokens": 5000, "ignore_eos": True}
    with httpx.Client(base_url=server.url, timeout=30) as client, ThreadPoolExecutor(1) as thread:
        answer = thread.submit(client.post, "/v1/completions", json=asked)
        eventually(lambda: server.metric("outrider_requests_running") == 1)
        os.kill(server.engine_pid, signal.SIGSTOP)  # it could be too fast for what follows
        time.sleep(1.5)  # uvicorn has made new headers for later answers meanwhile
        assert not answer.done()
        server.signal()
        eventually(lambda: server.get("/readyz").status_code == 503)
        os.kill(server.engine_pid, signal.SIGCONT)
        assert answer.result().headers["connection"] == "close"


def test_a_kept_connection_is_told_that_the_server_drains(start: Start, model: Path) -> None:
    """So that its client goes elsewhere before the server closes under its next request."""
    server = start(str(model), "--drain-delay", "30", "--grace-period", "60").ready()
    asked = {"model": model.name, "prompt": "a", "max_tokens": 1}
    with httpx.Client(base_url=server.url, timeout=10) as client:
        assert "connection" not in client.post("/v1/completions", json=asked).headers
        server.signal()
        eventually(lambda: server.get("/readyz").status_code == 503)
        answer = client.post("/v1/completions", json=asked)
        assert (answer.status_code, answer.headers["connection"]) == (200, "close")
        with client.stream("POST", "/v1/completions", json=asked | {"stream": True}) as stream:
            assert stream.headers["connection"] == "close"
