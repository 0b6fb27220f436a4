"""`outrider bench`: one clear line and status 2 for what cannot be; two servers compared to the end."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from outrider_serving import cli
from outrider_serving.settings import Method, Proposer, default_settings
from unit.bench.server import Script, serving, text, usage

GOOD = [text("one two"), text(" three"), usage(4), "[DONE]"]


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    try:
        status = cli.main(["bench", *arguments])
    except SystemExit as exit_:
        status = int(exit_.code or 0)
    out, err = capsys.readouterr()
    assert status == 2
    assert out == ""
    assert err.count("\n") == 1
    assert err.startswith("outrider bench: error: ")
    return err


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        ([], "give either MODEL or --http"),
        (["m", "--http", "a=http://h:1", "b=http://h:2"], "give either MODEL or --http"),
        (["m", "--compare", "off"], "'off' is not two sides: A,B of off, ngram, suffix, hf"),
        (["m", "--compare", "off,eagle"], "'eagle' is not a side: off, ngram, suffix, hf"),
        (["m", "--compare", "off,no_such_file.json"], "no_such_file.json: cannot read"),
        (["--http", "http://h:1", "b=http://h:2"], "'http://h:1' is not a server as NAME=http://HOST:PORT"),
        (["--http", "a=h:1", "b=http://h:2"], "'h:1' is not an address as http://HOST:PORT"),
        (["--http", "a", "b=http://h:2"], "'a' is not a server as NAME=http://HOST:PORT"),
        (["--http", "a=http://h:1", "a=http://h:2"], "both servers are called 'a'"),
        (["m", "--workloads", "open,chat"], "'chat' is not a workload: open, repeat or code"),
        (["m", "--workloads", "open,open"], "names a workload twice"),
        (["m", "--tokens", "0"], "'0' is not a whole number of at least 1"),
        (["m", "--temperature", "-1"], "'-1' is not a temperature (0 to 2)"),
        (["m", "--temperature", "nan"], "'nan' is not a temperature"),
        (["m", "--top-p", "0"], "'0' is not over 0 and at most 1"),
        (["m", "--seed", "1"], "--seed and --top-p are for a --temperature over 0"),
        (["m", "--top-p", "0.5"], "--seed and --top-p are for a --temperature over 0"),
        (["m", "--pairs", "1"], "'1' is not MIN..MAX pairs"),
        (["m", "--pairs", "20..10"], "'20..10' is not MIN..MAX pairs"),
        (["m", "--bar", "0"], "'0' is not a ratio over 0"),
        (["m", "--json", "/no/such/folder/file"], "--json /no/such/folder/file: there is no such directory"),
        (["/no/such/folder"], "there is no such directory"),
        (["package:no_such_package"], "there is no Python package 'no_such_package'"),
    ],
)
def test_bad_input(capsys: pytest.CaptureFixture[str], arguments: list[str], says: str) -> None:
    assert says in refusal(capsys, *arguments)


def test_a_settings_file_with_a_mistake(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = tmp_path / "deep.json"
    settings = default_settings(Proposer(method=Method.NGRAM)).model_dump_json(by_alias=True)
    file.write_text(settings.replace('"maxDepth":16', '"maxDepth":0'))
    assert f"{file}: arms.stable.proposer.maxDepth" in refusal(capsys, "m", "--compare", f"{file},off")


def test_a_server_that_is_not_there(capsys: pytest.CaptureFixture[str]) -> None:
    said = refusal(capsys, "--http", "a=http://127.0.0.1:9", "b=http://127.0.0.1:9")
    assert "--http: a: http://127.0.0.1:9 cannot be reached" in said


def test_help_and_bad_input_need_nothing_heavy() -> None:
    code = (
        "import sys; from outrider_serving.cli import main\n"
        "try: sys.exit(main(['bench', *sys.argv[1:]]))\n"
        "finally: assert not {'torch', 'transformers', 'fastapi'} & sys.modules.keys()"
    )
    root = Path(cli.__file__).parent.parent
    for arguments, status in ((["--help"], 0), (["package:no_such_package"], 2)):
        command = [sys.executable, "-c", code, *arguments]
        done = subprocess.run(command, cwd=root, capture_output=True, text=True, check=False)
        assert done.returncode == status, done.stderr


def test_two_servers(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    one, other = Script(GOOD), Script([text("one too"), *GOOD[1:]])
    file = tmp_path / "pairs.json"
    with serving(one) as a, serving(other) as b:
        flags = ["--workloads", "open,batch2", "--tokens", "4", "--pairs", "2..4", "--json", str(file)]
        assert cli.main(["bench", "--http", f"ours={a}", f"theirs={b}", *flags]) == 0
    out, _ = capsys.readouterr()
    assert "ours / theirs" in out
    assert "differs in 4 of 4 pairs, first at 5 of request 0" in out
    found = json.loads(file.read_text())
    assert [side["name"] for side in found["sides"]] == ["ours", "theirs"]
    assert found["rule"]["half_width"] == 0.05
    assert found["versions"]["python"]
    assert [one["workload"] for one in found["comparisons"]] == ["open", "batch2"]
    for comparison in found["comparisons"]:
        assert [pair["order"] for pair in comparison["pairs"]] == ["AB", "BA", "AB", "BA"]
        assert not comparison["settled"]
    assert "secret" not in file.read_text()
    assert {headers.get("Authorization") for _, headers, _ in one.asked} == {"Bearer secret"}
    # For each workload a run to warm up and four that count; a batch has two requests.
    assert len(one.bodies) == len(other.bodies) == 5 + 10


def test_a_bar_that_is_not_settled_is_not_met(capsys: pytest.CaptureFixture[str]) -> None:
    with serving(Script(GOOD)) as address:
        servers = ["--http", f"a={address}", f"b={address}"]
        flags = ["--workloads", "open", "--tokens", "4", "--pairs", "2..2", "--bar", "1e-9"]
        assert cli.main(["bench", *servers, *flags]) == 1
    assert "not settled" in capsys.readouterr().out


def test_a_run_that_fails_keeps_what_was_measured(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    script, file = Script(GOOD), tmp_path / "pairs.json"
    with serving(script) as address:
        servers = ["--http", f"a={address}", f"b={address}"]
        flags = ["--workloads", "open", "--pairs", "2..2", "--json", str(file)]
        assert cli.main(["bench", *servers, *flags, "--tokens", "4"]) == 0
        measured = file.read_text()
        assert cli.main(["bench", *servers, *flags, "--tokens", "5"]) == 1
    said = capsys.readouterr().err.splitlines()[-1]
    assert said == "outrider bench: failed: a, workload open: request 0 gave 4 tokens, but 5 were asked for"
    assert file.read_text() == measured
