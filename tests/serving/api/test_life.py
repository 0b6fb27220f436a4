"""Start and end of a server process."""

import contextlib
import json
import socket
import time
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from outrider_serving import cli
from serving.api.conftest import Start
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
    """A model without a chat template."""
    path = tmp_path_factory.mktemp("models") / "plain"
    return make_tiny_model(path, context_length=100_000, chat_template=None)


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


@pytest.mark.parametrize(("drain_delay", "grace_period"), [("1", "6"), ("0", "1")])
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


def test_a_signal_while_the_model_loads(start: Start, plain: Path) -> None:
    server = start(str(plain))
    assert server.get("/healthz").status_code == 200
    server.signal()
    assert server.wait(10) == 0


@pytest.mark.usefixtures("quiet_logging")
class TestRefusedModels:
    """In this process, which has torch already: the command's own function, up to its exit status."""

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
