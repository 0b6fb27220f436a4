"""What changes under a running server: keys, settings, clients that hang up; and what it counts."""

import json
import socket
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest

from serving.api.conftest import KEY, SETTINGS
from serving.api.process import ServerProcess, eventually

LONG: dict[str, Any] = {
    "model": "tiny",
    "prompt": "one two three",
    "max_tokens": 6000,
    "stream": True,
    "extra_body": {"ignore_eos": True, "speculation": {"proposer": "none"}},
}


def replace(file: Path, text: str) -> None:
    """Change a file at once, as a mounted volume changes."""
    fresh = file.with_name("..next")
    fresh.write_text(text)
    fresh.replace(file)


def ask(server: ServerProcess, key: str = KEY, prompt: str = "a b c", **options: Any) -> None:
    server.client(key).completions.create(
        model="tiny", prompt=prompt, max_tokens=4, extra_body={"ignore_eos": True}, **options
    )


def test_keys_are_required_and_errors_are_openais(server: ServerProcess) -> None:
    for key in ("wrong", KEY + "x", KEY[:-1]):
        with pytest.raises(openai.AuthenticationError) as refused:
            ask(server, key)
        assert refused.value.code == "invalid_api_key"
    for headers in ({}, {"authorization": "Basic abc"}, {"authorization": "Bearer"}):
        answer = server.get("/v1/models", **headers)
        assert answer.status_code == 401
        assert answer.headers["www-authenticate"] == "Bearer"
        assert "Bearer KEY" in answer.json()["error"]["message"]


def test_health_and_metrics_need_no_key(server: ServerProcess) -> None:
    for path in ("/healthz", "/readyz", "/metrics"):
        assert server.get(path).status_code == 200
        assert httpx.get(server.admin_url + path).status_code == 200


def test_the_public_port_has_no_admin_endpoints(server: ServerProcess) -> None:
    assert server.get("/admin/state").status_code == 404


def test_keys_are_read_again(server: ServerProcess, keys_directory: Path) -> None:
    def admitted(key: str) -> bool:
        return server.get("/v1/models", authorization=f"Bearer {key}").status_code == 200

    replace(keys_directory / "blue", "blue-key-1\n\nblue-key-2\n")
    eventually(lambda: admitted("blue-key-2"))
    assert admitted("blue-key-1")
    assert admitted(KEY)
    # A key of two tenants would charge one for the other: it stays with the one that has it.
    replace(keys_directory / "green", f"{KEY}\ngreen-key\n")
    eventually(lambda: admitted("green-key"))
    assert admitted(KEY)
    assert "'green', line 1 and 'red', line 1" in server.state()["keysError"]
    # Nor does one tenant's mistake keep another's revoked key valid.
    replace(keys_directory / "green", "two words\n")
    replace(keys_directory / "blue", "blue-key-2\n")
    eventually(lambda: not admitted("blue-key-1"))
    assert admitted("blue-key-2")
    assert admitted("green-key")
    assert "'green': line 1" in server.state()["keysError"]
    (keys_directory / "green").unlink()
    eventually(lambda: server.state()["keysError"] is None)
    assert not admitted("green-key")
    assert "blue-key" not in server.log
    assert KEY not in server.log


def test_settings_are_read_again(server: ServerProcess, settings_file: Path) -> None:
    assert server.state()["generation"] == 1
    good = json.loads(SETTINGS.model_dump_json(by_alias=True))
    replace(settings_file, json.dumps(good | {"generation": 2}))
    eventually(lambda: server.state()["generation"] == 2)
    replace(settings_file, json.dumps(good | {"generation": 3, "inForce": "nobody"}))
    eventually(lambda: server.state()["settingsError"])
    state = server.state()
    assert "nobody" in state["settingsError"]
    assert (state["generation"], state["inForce"], state["ready"]) == (2, "stable", True)
    ask(server)
    assert server.metric("outrider_requests_total", generation="2") >= 1
    assert server.metric("outrider_settings_generation") == 2
    none = {"stable": {"proposer": {"method": "none"}}}
    replace(settings_file, json.dumps(good | {"generation": 4, "arms": none}))
    eventually(lambda: server.state()["generation"] == 4)
    assert server.state()["settingsError"] is None
    proposed = server.metric("outrider_tokens_proposed_total")
    server.client(KEY).completions.create(model="tiny", prompt="a b a b a b a b", max_tokens=8)
    assert server.metric("outrider_tokens_proposed_total") == proposed


def test_what_strangers_send_does_not_flood_the_log(server: ServerProcess) -> None:
    kinds = ("Invalid HTTP request received.", "Unsupported upgrade request.")
    before = {kind: len(server.events(kind)) for kind in kinds}
    port = int(server.url.rpartition(":")[2])
    for _ in range(20):
        with socket.create_connection(("127.0.0.1", port), timeout=10) as stranger:
            stranger.sendall(b"what?\r\n\r\n")
            assert stranger.recv(1000).startswith(b"HTTP/1.1 400 ")
        assert server.get("/healthz", connection="upgrade", upgrade="h2c").status_code == 200
    requests = len(server.events("request"))
    ask(server)
    eventually(lambda: len(server.events("request")) > requests)  # what came before it is logged by then
    for kind in kinds:
        events = server.events(kind)
        assert events
        assert len(events) - before[kind] <= 1
        assert "unsaid" in events[-1]
    assert "WebSocket" not in server.log


def test_state_names_the_model(server: ServerProcess) -> None:
    model = server.state()["model"]
    assert model["name"] == "tiny"
    assert model["revision"].startswith("sha256:")
    assert (model["dtype"], model["contextLength"]) == ("float32", 8192)


@pytest.mark.parametrize("stream", [True, False])
def test_a_client_that_hangs_up(server: ServerProcess, stream: bool) -> None:
    cancelled = server.metric("outrider_requests_total", outcome="cancelled")
    if stream:
        with server.client(KEY).completions.create(**LONG) as chunks:
            next(iter(chunks))
    else:
        with pytest.raises(openai.APITimeoutError):
            server.client(KEY).with_options(timeout=0.5).completions.create(**LONG | {"stream": False})
    cancels = {"outcome": "cancelled", "objective": "none"}
    eventually(lambda: server.metric("outrider_requests_total", **cancels) == cancelled + 1)
    eventually(lambda: server.metric("outrider_requests_running") == 0)
    ask(server)


def test_objectives_are_counted_by_workload(server: ServerProcess) -> None:
    def count(**labels: str) -> float:
        return server.metric("outrider_requests_total", outcome="completed", **labels)

    def header(name: str) -> dict[str, Any]:
        return {"extra_headers": {"X-Outrider-Workload": name}}

    before = [count(workload=name) for name in ("easy", "hard", "other")]
    ask(server, **header("easy"))
    ask(server, prompt="a b c " * 1000, **header("hard"))
    ask(server, **header("undeclared"))
    assert [count(workload=name) for name in ("easy", "hard", "other")] == [n + 1 for n in before]
    assert count(workload="easy", objective="missed") == 0
    assert count(workload="easy", objective="met") >= 1
    # No machine reads that prompt within a millisecond.
    assert count(workload="hard", objective="met") == 0
    assert count(workload="hard", objective="missed") >= 1
    assert count(workload="other") == count(workload="other", objective="none")
    assert server.metric("outrider_request_tokens_total", workload="easy", objective="met") >= 4


def test_a_stream_is_timed_by_its_writes(server: ServerProcess) -> None:
    list(server.client(KEY).completions.create(**LONG | {"max_tokens": 32}))
    eventually(lambda: server.events("request")[-1]["completion_tokens"] == 32)
    event = server.events("request")[-1]
    assert event["stream"] is True
    assert event["tenant"] == "red"
    assert 0 < event["ttft"] < event["duration"]
    assert 0 < event["tpot"] <= event["max_gap"] < event["duration"]


def test_the_log_is_json_and_quotes_nobody(server: ServerProcess) -> None:
    with pytest.raises(openai.BadRequestError):
        server.client(KEY).completions.create(model="tiny", prompt="my-secret-prompt", temperature=9)
    server.client(KEY).completions.create(model="tiny", prompt="my-secret-prompt")
    lines = [json.loads(line) for line in list(server.lines)]
    assert all({"time", "level", "logger", "message"} <= line.keys() for line in lines)
    assert "my-secret-prompt" not in server.log
