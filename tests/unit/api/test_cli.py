"""The command line: one clear line and status 2 for what cannot be."""

import subprocess
import sys
from pathlib import Path

import pytest

from outrider_serving import cli
from outrider_serving.engine.options import EngineOptions
from outrider_serving.flags import make_parser
from outrider_serving.settings import default_settings


@pytest.fixture
def model(tmp_path: Path) -> str:
    (tmp_path / "model").mkdir()
    for name in ("config.json", "model.safetensors"):
        (tmp_path / "model" / name).touch()
    return str(tmp_path / "model")


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = cli.main(arguments)
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    return err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["--port", "70000"], "argument --port: '70000' is not a port (0 to 65535)"),
        (["--port", "x"], "argument --port: 'x' is not a port"),
        (["--admin-port", "-1"], "argument --admin-port: '-1' is not a port"),
        (["--admin-port", "8000"], "--admin-port 8000 must differ from --port"),
        (["--tenant-mode", "two"], "argument --tenant-mode: 'two' is none of key, single, header, request"),
        (["--proposer", "suffix"], "unrecognized arguments: --proposer suffix"),
        (["--retention", "59"], "argument --retention: '59' is not a whole number of at least 60: what is"),
        (["--tenant-mode", "key"], "--tenant-mode key needs --api-keys"),
        (
            ["--trusted-gateways", "10.0.0.0/8"],
            "--trusted-gateways is for --tenant-mode header, not for single",
        ),
        (
            ["--shared-cache", "http://redis"],
            "--shared-cache: 'http://redis' is none of redis://host:port/db",
        ),
        (["--shared-cache", "redis://u:secret@h"], "--shared-cache: it holds a user or a password"),
        (["--shared-cache-prefix", "x:"], "--shared-cache-prefix is for a --shared-cache"),
        (["--shared-cache-ca", "/ca"], "--shared-cache-ca is for a --shared-cache"),
        (
            ["--shared-cache", "redis-cluster://h", "--shared-cache-ca", "/ca"],
            "--shared-cache-ca: certificates are for a URL of TLS: rediss://, rediss-sentinel:// or "
            "rediss-cluster:// (it is redis-cluster://)",
        ),
        (["--retention-size", "1Mi"], "--retention-size is for a --shared-cache"),
        (["--warm-seconds", "1"], "--warm-seconds is for a --shared-cache"),
        (
            ["--shared-cache", "redis://h", "--shared-cache-prefix", "a b"],
            "--shared-cache-prefix: 'a b' must be",
        ),
        (
            ["--shared-cache", "redis://h", "--retention-size", "1"],
            "--retention-size: 1 must be at least 16384",
        ),
        (
            ["--shared-cache", "redis://h", "--host", "0.0.0.0"],
            "--shared-cache does nothing where each request sees only its own text",
        ),
        (["--dtype", "int8"], "argument --dtype: invalid choice: 'int8' (choose from"),
        (["--context-length", "0"], "argument --context-length: '0' is not a whole number of at least 1"),
        (["--max-waiting", "many"], "argument --max-waiting: 'many'"),
        (["--max-running", "0"], "argument --max-running: '0'"),
        (["--step-tokens", "0"], "argument --step-tokens: '0' is not a whole number of at least 1"),
        (["--step-tokens", "31"], "--step-tokens 31 must be at least --max-running 32"),
        (["--page-size", "0"], "argument --page-size: '0' is not a whole number from 1 to 1024"),
        (["--memory-share", "0"], "argument --memory-share: '0' is not a share (over 0, at most 1)"),
        (["--memory-share", "1.01"], "argument --memory-share: '1.01'"),
        (["--memory-share", "nan"], "argument --memory-share: 'nan'"),
        (["--proposer-memory", "-1"], "argument --proposer-memory: '-1' is not a number of bytes"),
        (["--proposer-memory", "1.5Gi"], "argument --proposer-memory: '1.5Gi' is not a number of bytes"),
        (["--proposer-memory", "1GB"], "argument --proposer-memory: '1GB' is not a number of bytes"),
        (["--step-timeout", "0"], "argument --step-timeout: '0' is not a number of seconds over 0"),
        (["--drain-delay", "nan"], "argument --drain-delay: 'nan' is not a number of seconds"),
        (["--drain-delay", "-1"], "argument --drain-delay"),
        (["--drain-delay", "30"], "--drain-delay 30 must be less than --grace-period 30"),
        (["--grace-period", "inf"], "argument --grace-period: 'inf'"),
        (["--served-name", " "], "argument --served-name"),
        (["--settings", "/no/such/file"], "--settings /no/such/file: cannot read"),
        (["--chat-template", "/no/such/file"], "--chat-template /no/such/file: cannot be read"),
        (["--api-keys", "/no/such/folder"], "--api-keys /no/such/folder must be a directory"),
        (["--log-level", "loud"], "argument --log-level: invalid choice"),
        (["--no-such-flag"], "unrecognized arguments: --no-such-flag"),
    ],
)
def test_bad_flags(capsys: pytest.CaptureFixture[str], model: str, arguments: list[str], says: str) -> None:
    assert says in refusal(capsys, "serve", model, *arguments)


def test_bad_models(capsys: pytest.CaptureFixture[str]) -> None:
    assert "there is no such directory" in refusal(capsys, "serve", "/no/such/folder")
    assert "is not understood" in refusal(capsys, "serve", "neither")
    assert "is not a Python package's name" in refusal(capsys, "serve", "package:a/b")


def test_an_empty_template(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, model: str, tmp_path: Path
) -> None:
    file = tmp_path / "template.jinja"
    for text in ("", " \n"):
        file.write_text(text)
        says = f"--chat-template {file}: the chat template is empty"
        assert says in refusal(capsys, "serve", model, "--chat-template", str(file))
    monkeypatch.setenv(cli.TEMPLATE_VARIABLE, " \n")
    assert f"{cli.TEMPLATE_VARIABLE}: the chat template is empty" in refusal(capsys, "serve", model)


def test_a_template_variable_set_to_nothing_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(cli.TEMPLATE_VARIABLE, "")
    assert cli._chat_template(None) is None
    monkeypatch.setenv(cli.TEMPLATE_VARIABLE, "{{ x }}")
    assert cli._chat_template(None) == "{{ x }}"


def test_what_the_engine_is_told(model: str) -> None:
    def told(*arguments: str) -> EngineOptions:
        return cli._options(make_parser().parse_args(["serve", model, *arguments]))[0].engine

    assert told() == EngineOptions(model)
    flags = {"--max-waiting": "9", "--max-running": "8", "--step-tokens": "64", "--page-size": "32"}
    flags |= {"--memory-share": "0.5", "--proposer-memory": "512Mi", "--dtype": "float32"}
    flags |= {"--revision": "main", "--context-length": "4096"}
    assert told(*(word for flag in flags.items() for word in flag)) == EngineOptions(
        model, "main", "float32", 4096, 9, 8, 64, 32, 0.5, 512 * 1024**2
    )
    assert [told("--proposer-memory", text).proposer_memory for text in ("0", "5", "3Ki", "2Gi")] == [
        0,
        5,
        3 * 1024,
        2 * 1024**3,
    ]


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["version"]) == 0
    assert capsys.readouterr().out.startswith("outrider ")


def test_no_command(capsys: pytest.CaptureFixture[str]) -> None:
    assert "COMMAND" in refusal(capsys)


def test_bad_settings_name_file_and_field(
    capsys: pytest.CaptureFixture[str], model: str, tmp_path: Path
) -> None:
    file = tmp_path / "settings.json"
    file.write_text(default_settings().model_dump_json(by_alias=True).replace(":0", ":-1"))
    assert f"--settings {file}: generation: " in refusal(capsys, "serve", model, "--settings", str(file))


def test_why_it_ended_is_shown_by_kubernetes(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    log = tmp_path / "termination-log"
    log.touch()
    monkeypatch.setattr(cli, "TERMINATION_LOG", log)
    assert log.read_text() != refusal(capsys, "serve", "/no/such/folder")
    assert "there is no such directory" in log.read_text()


def light(*arguments: str) -> subprocess.CompletedProcess[str]:
    """What the command does with these arguments, in a process that has imported nothing heavy by its end."""
    code = (
        "import sys; from outrider_serving.cli import main\n"
        "try: sys.exit(main(sys.argv[1:]))\n"
        "finally: assert not {'torch', 'transformers', 'fastapi'} & sys.modules.keys()"
    )
    command = [sys.executable, "-c", code, *arguments]
    root = Path(cli.__file__).parent.parent
    return subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)


def test_help_needs_nothing_heavy() -> None:
    done = light("serve", "--help")
    assert done.returncode == 0, done.stderr
    assert "--grace-period SECONDS" in done.stdout


def test_a_model_that_is_not_there_needs_nothing_heavy(tmp_path: Path) -> None:
    for model, says in (("package:no_such_package", "'no_such_package'"), (str(tmp_path), "has no weights")):
        done = light("serve", model)
        assert done.returncode == 2, done.stderr
        assert done.stderr.startswith("outrider serve: error: ")
        assert says in done.stderr
        assert done.stderr.count("\n") == 1
