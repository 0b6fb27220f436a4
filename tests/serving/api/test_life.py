"""Start and end of a server process."""

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
