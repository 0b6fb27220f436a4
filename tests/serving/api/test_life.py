"""Start and end of a server process."""

import contextlib
import json
import os
import resource
import signal
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider_serving import cli
from serving.api.conftest import SETTINGS, Start
from serving.api.process import ServerProcess, eventually
from serving.tiny import make_tiny_model

ENDLESS: dict[str, Any] = {
    "model": "plain",
    "prompt": "one two three",
    "stream": True,
    "extra_body": {"ignore_eos": True, "speculation": {"proposer": "none"}},
}


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model without a chat template, whose tokenizer has its own idea of what is long."""
    path = tmp_path_factory.mktemp("models") / "plain"
    make_tiny_model(path, context_length=100_000, chat_template=None)
    config = path / "tokenizer_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"model_max_length": 8}))
    return path


def accepts(server: ServerProcess) -> bool:
    try:
        return server.get("/healthz").status_code == 200
    except httpx.TransportError:  # refused, or reset where it was not accepted before the socket closed
        return False


def connect(port: int) -> socket.socket:
    """A connection that holds little of what is sent to it."""
    connection = socket.socket()
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 2048)
    connection.connect(("127.0.0.1", port))
    return connection


def test_from_loading_to_a_drained_end(start: Start, plain: Path) -> None:
    server = start(str(plain), "--drain-delay", "4", "--grace-period", "60")
    assert server.get("/healthz").status_code == 200
    assert server.get("/readyz").text == "the model is loading\n"
    with pytest.raises(openai.APIStatusError) as refused:
        server.client().completions.create(model="plain", prompt="a")
    assert refused.value.status_code == 503
    assert server.state() == {
        "ready": False,
        "generation": 0,
        "inForce": "stable",
        "settingsError": None,
        "keysError": None,
        "proposerError": None,
        "sharedCacheError": None,
        "model": None,
    }

    server.ready()
    assert server.metric("outrider_requests_total", outcome="refused") == 1
    turn: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match=r"spec\.model\.chatTemplate.*--chat-template FILE"):
        server.client().chat.completions.create(model="plain", messages=turn)

    stream = server.client().completions.create(max_tokens=2000, **ENDLESS)
    next(stream)
    server.signal()
    eventually(lambda: server.get("/readyz").status_code == 503)
    assert server.get("/readyz").text == "the server is draining\n"
    assert server.get("/healthz").status_code == 200
    assert server.client().completions.create(model="plain", prompt="still accepted").choices
    eventually(lambda: not accepts(server))
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.wait() == 0


def test_a_log_that_nobody_reads_holds_nothing_up(start: Start, plain: Path) -> None:
    server = start(str(plain), "--drain-delay", "0").ready()
    server.log_is_read.clear()
    with httpx.Client(base_url=server.url, timeout=10) as client:
        for _ in range(1500):
            assert client.post("/v1/completions", json={"model": "x" * 100, "prompt": "a"}).status_code == 404
    assert server.client().completions.create(model="plain", prompt="still answered " * 10).choices
    server.signal()
    eventually(lambda: not accepts(server))
    server.log_is_read.set()
    assert server.wait() == 0
    # What fills a pipe was written, and the rest when somebody read again.
    assert len(server.log) > 1500 * 100
    assert len(server.events("drained")) == 1
    assert "longer than" not in server.log


def test_the_grace_period_ends_what_still_runs(start: Start, plain: Path) -> None:
    template = "{{ raise_exception('only robots may speak') }}"
    server = start(
        str(plain), "--drain-delay", "0", "--grace-period", "6", env={"OUTRIDER_CHAT_TEMPLATE": template}
    ).ready()
    turn: Any = [{"role": "user", "content": "x"}]
    with pytest.raises(openai.BadRequestError, match="only robots may speak"):
        server.client().chat.completions.create(model="plain", messages=turn)

    stream = server.client().completions.create(max_tokens=99_000, **ENDLESS)
    next(stream)
    server.signal()
    signalled = time.monotonic()
    with pytest.raises(openai.APIError, match="shut down before the answer was complete"):
        list(stream)
    assert server.wait() == 0
    assert 4 < time.monotonic() - signalled < 6
    assert server.events("request")[-1]["outcome"] == "failed"


@pytest.mark.parametrize(("drain_delay", "grace_period"), [("1", "6"), ("0", "2")])
def test_nobody_outstays_the_grace_period(
    start: Start, plain: Path, drain_delay: str, grace_period: str
) -> None:
    """Clients that do not read, and one whose body does not come: the process ends, without a traceback."""
    server = start(str(plain), "--drain-delay", drain_delay, "--grace-period", grace_period).ready()
    port = int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as held:
        unread = [connect(port), connect(server.admin_port), connect(port), connect(port)]
        for connection in unread:
            held.enter_context(connection)
        for connection in unread[:2]:
            connection.sendall(b"GET /metrics HTTP/1.1\r\nhost: x\r\n\r\n" * 300)
        unread[2].sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: 500\r\n\r\n{")
        asked = {name: value for name, value in ENDLESS.items() if name != "extra_body"}
        body = json.dumps(asked | ENDLESS["extra_body"] | {"max_tokens": 90_000})
        unread[3].sendall(
            f"POST /v1/completions HTTP/1.1\r\nhost: x\r\ncontent-length: {len(body)}\r\n\r\n{body}".encode()
        )
        eventually(lambda: server.metric("outrider_requests_running") == 1)
        time.sleep(1)
        server.signal()
        signalled = time.monotonic()
        assert server.wait(20) == 0
        assert time.monotonic() - signalled < float(grace_period)
    assert server.events("drained")
    assert "Traceback" not in server.log


def gone(pid: int) -> bool:
    """A process has ended and is reaped."""
    return not Path(f"/proc/{pid}").exists()


def test_the_engines_process_is_killed_under_load(start: Start, plain: Path, tmp_path: Path) -> None:
    """Streams end with an error, whole answers with 503; it is not ready, alive, and serves again."""
    settings = tmp_path / "settings.json"
    settings.write_text(SETTINGS.model_copy(update={"generation": 5}).model_dump_json(by_alias=True))
    server = start(str(plain), "--settings", str(settings)).ready()
    first, pages = server.engine_pid, server.metric("outrider_pages_total")
    streams = [server.client().completions.create(max_tokens=90_000, **ENDLESS) for _ in range(3)]
    for stream in streams:
        next(stream)
    settings.write_text(SETTINGS.model_copy(update={"generation": 6}).model_dump_json(by_alias=True))
    eventually(lambda: server.state()["generation"] == 6)
    os.kill(first, signal.SIGKILL)
    for stream in streams:
        with pytest.raises(openai.APIError, match="ended by signal 9"):
            list(stream)
    assert server.get("/readyz").status_code == 503
    assert "signal 9" in server.get("/readyz").text
    assert server.get("/healthz").status_code == 200
    with pytest.raises(openai.APIStatusError, match="is being restarted") as refused:
        server.client().completions.create(model="plain", prompt="a")
    assert refused.value.status_code == 503
    assert refused.value.response.headers["retry-after"]

    server.ready()
    assert gone(first)
    assert server.engine_pid != first
    assert server.client().completions.create(model="plain", prompt="a").choices
    assert server.metric("outrider_engine_restarts_total", reason="died") == 1
    assert server.metric("outrider_requests_running") == 0
    assert server.metric("outrider_pages_total") == pages > 0
    assert server.metric("outrider_settings_generation") == 6
    server.signal()
    assert server.wait() == 0


def test_the_engines_process_is_stopped_under_load(start: Start, plain: Path) -> None:
    server = start(str(plain)).ready()
    first = server.engine_pid
    stream = server.client().completions.create(max_tokens=90_000, **ENDLESS)
    next(stream)
    os.kill(first, signal.SIGSTOP)
    with pytest.raises(openai.APIError, match="no sign of life for 10 s"):
        list(stream)
    server.ready()
    assert gone(first)
    assert server.client().completions.create(model="plain", prompt="a").choices
    assert server.metric("outrider_engine_restarts_total", reason="stalled") == 1


def test_a_stop_that_signals_every_process_still_drains(start: Start, plain: Path) -> None:
    server = start(str(plain), "--drain-delay", "0", "--grace-period", "30").ready()
    stream = server.client().completions.create(max_tokens=300, **ENDLESS)
    next(stream)
    os.kill(server.engine_pid, signal.SIGTERM)
    server.signal()
    assert list(stream)[-1].choices[0].finish_reason == "length"
    assert server.wait() == 0


def test_no_page_is_held_once_the_last_client_has_hung_up(start: Start, plain: Path) -> None:
    server = start(str(plain)).ready()
    stream = server.client().completions.create(max_tokens=90_000, **ENDLESS)
    next(stream)
    eventually(lambda: server.metric("outrider_pages_held") > 0)
    stream.close()
    eventually(lambda: server.metric("outrider_requests_running") == 0)
    eventually(lambda: server.metric("outrider_pages_held") == 0)


def test_connections_that_say_nothing_do_not_flood_the_log_nor_hide_the_health(
    start: Start, plain: Path
) -> None:
    server = start(str(plain)).ready()
    resource.prlimit(server.pid, resource.RLIMIT_NOFILE, (64, 64))
    port = int(server.url.rpartition(":")[2])
    with contextlib.ExitStack() as held:
        before = len(server.lines)
        for _ in range(200):
            held.enter_context(connect(port))
        for _ in range(3):
            assert httpx.get(server.admin_url + "/healthz", timeout=5).status_code == 200
        assert len(server.events("too many connections: closing new ones")) == 1
        assert len(server.lines) - before < 10
    eventually(lambda: accepts(server))
    assert server.client().completions.create(model="plain", prompt="a").choices


def test_it_takes_all_the_descriptors_that_it_may_have(start: Start, plain: Path) -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (hard - 1, hard))
    try:
        server = start(str(plain)).ready()
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))
    assert resource.prlimit(server.pid, resource.RLIMIT_NOFILE) == (hard, hard)


def test_the_server_is_killed(start: Start, plain: Path) -> None:
    """Nothing of it stays behind."""
    server = start(str(plain)).ready()
    server.signal(signal.SIGKILL)
    server.wait()
    eventually(lambda: gone(server.engine_pid))


def test_the_engine_dies_while_the_model_loads(start: Start, plain: Path) -> None:
    server = start(str(plain))
    eventually(lambda: server.events("the engine's process has started"))
    os.kill(server.engine_pid, signal.SIGKILL)
    assert server.wait() == 1
    assert server.lines[-1] == (
        "outrider serve: failed: EngineError: the engine's process was ended by signal 9 (Killed)\n"
    )


def test_the_api_has_no_torch(start: Start, plain: Path) -> None:
    """It is the engine's: the API holds neither weights nor torch's libraries, also after it has answered."""
    server = start(str(plain)).ready()
    assert (
        server.client()
        .completions.create(
            model="plain", prompt="a", logprobs=2, extra_body={"structured_outputs": {"regex": "a+"}}
        )
        .choices
    )
    maps = {pid: Path(f"/proc/{pid}/maps").read_text() for pid in (server.pid, server.engine_pid)}
    assert "libtorch" not in maps[server.pid]
    assert "libtorch" in maps[server.engine_pid]


def test_a_signal_while_the_model_loads(start: Start, plain: Path) -> None:
    server = start(str(plain))
    assert server.get("/healthz").status_code == 200
    server.signal()
    assert server.wait(10) == 0


@pytest.mark.usefixtures("quiet_logging")
class TestRefusedModels:
    """In this process: the command's own function, up to its exit status."""

    def refusal(self, capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
        assert cli.main(["serve", *arguments, "--port", "0"]) == 2
        return capsys.readouterr().err.splitlines()[-1]

    def test_a_malformed_template(
        self, capsys: pytest.CaptureFixture[str], plain: Path, tmp_path: Path
    ) -> None:
        template = tmp_path / "template.jinja"
        template.write_text("line one\n{% for message in %}")
        line = self.refusal(capsys, str(plain), "--chat-template", str(template))
        assert line.startswith("outrider serve: error: the chat template is malformed: line 2: ")

    def test_no_weights(self, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
        line = self.refusal(capsys, str(tmp_path))
        assert line.startswith("outrider serve: error: ")
        assert str(tmp_path) in line

    def test_a_context_beyond_the_models(self, capsys: pytest.CaptureFixture[str], plain: Path) -> None:
        line = self.refusal(capsys, str(plain), "--context-length", "100001")
        assert "100001" in line
        assert "100000" in line

    def test_a_revision_that_is_another(self, capsys: pytest.CaptureFixture[str], plain: Path) -> None:
        assert "revision" in self.refusal(capsys, str(plain), "--revision", "sha256:" + "0" * 64)

    def test_a_port_that_is_taken(self, capsys: pytest.CaptureFixture[str], plain: Path) -> None:
        with socket.create_server(("127.0.0.1", 0)) as taken:
            port = str(taken.getsockname()[1])
            line = self.refusal(capsys, str(plain), "--admin-port", port)
        assert f"--admin-port {port}: cannot listen on 127.0.0.1: " in line
