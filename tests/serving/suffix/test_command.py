"""`outrider suffix`: what people see, copy and delete, as they type it."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
from collections.abc import Callable
from pathlib import Path

import pytest
import redis

from outrider_serving.flags import make_parser
from outrider_serving.suffix.shared import cli
from outrider_serving.suffix.shared.keys import TENANT_RULE, identity_of
from outrider_serving.suffix.shared.log import ADMIN_COMMANDS
from serving.suffix.pods import IDENTITY, KEYS, Pod, eventually, running, settled, text
from serving.suffix.redis_server import RedisServer, Servers
from serving.suffix.test_connections import add_user, secret

Say = Callable[..., "tuple[int, str, str]"]


@pytest.fixture
def say(capsys: pytest.CaptureFixture[str]) -> Say:
    """Run the command; its status, what it printed, and what it complained of."""

    def run(*words: str | Path) -> tuple[int, str, str]:
        parser = argparse.ArgumentParser()
        cli.add_parser(parser.add_subparsers())
        capsys.readouterr()
        status = cli.run(parser.parse_args(["suffix", *map(str, words)]))
        return status, *capsys.readouterr()

    return run


async def filled(
    server: RedisServer, *, prefix: str = "outrider:", retention_seconds: int = 604_800, **numbers: int
) -> Pod:
    """A pod that has published for tenants and runs no more."""
    pod = Pod(server, prefix=prefix, retention_seconds=retention_seconds)
    async with running(pod):
        for tenant, number in numbers.items():
            pod.publish(number, tenant="" if tenant == "single" else tenant)
        await settled(pod)
    return pod


def test_stats_are_a_table_or_json(server: RedisServer, say: Say) -> None:
    asyncio.run(filled(server, a=1, b=2, single=3))
    with server.client() as client:
        raw = client.xrange(KEYS.log("a"))[0][1][b"r"]
        client.xadd(KEYS.log("a"), {"r": raw})
        client.xadd(KEYS.log("a"), {"r": b"foreign"})
    status, table, _ = say("stats", "--url", server.url)
    lines = table.splitlines()
    assert status == 0
    assert lines[0].split()[:4] == ["identity", "tenant", "entries", "bytes"]
    assert [line.split()[1] for line in lines[1:]] == ["(single)", "a", "b"]
    words = lines[2].split()
    assert words[:3] == [IDENTITY, "a", "3"]
    assert (words[4:6], words[9]) == (["1", "12"], "duplicate=1,foreign=1")
    status, answer, _ = say("stats", "--url", server.url, "--json", "--tenant", "a", "--identity", IDENTITY)
    (row,) = json.loads(answer)
    assert (row["entries"], row["outputs"], row["tokens"], row["tombstone"]) == (3, 1, 12, 0)
    assert row["bytes"] > 100
    assert row["skipped"] == {"duplicate": 1, "foreign": 1}
    assert row["oldest"] == row["newest"] > 1_000_000_000_000


def test_text_is_copied_from_one_redis_to_another(
    some: Servers, say: Say, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    here, there = some.redis(), some.redis()
    asyncio.run(filled(here, a=1, b=2))
    status, lines, _ = say("export", "--url", here.url, "--all")
    assert status == 0
    first = json.loads(lines.splitlines()[0])
    assert set(first) == {"tenant", "generation", "created", "tokens"}
    assert (first["tenant"], first["generation"], first["tokens"]) == ("a", 0, text(1))
    file = tmp_path / "text"
    file.write_text(lines + "\n")
    to = ("--url", there.url, "--identity", IDENTITY)
    status, told, _ = say("import", *to, "--from", file)
    assert (status, told) == (
        0,
        "2 outputs imported, 0 refused (purged), 0 refused (expired), 0 refused (future)\n",
    )
    with file.open() as source:
        monkeypatch.setattr("sys.stdin", source)
        assert say("import", *to)[1].startswith("2 outputs imported")
    # What came twice is told once.
    assert sorted(say("export", *to, "--all")[1].splitlines()) == sorted((lines + lines).splitlines())

    async def read() -> list[int]:
        async with running(pod := Pod(there)):
            assert await pod.log.warmed(5.0)
            return sorted(set(pod.numbers("a") + pod.numbers("b")))

    assert asyncio.run(read()) == [1, 2]


def test_an_import_honours_what_was_purged_and_what_is_too_old(
    server: RedisServer, say: Say, tmp_path: Path
) -> None:
    asyncio.run(filled(server, a=1, b=2))
    lines = say("export", "--url", server.url, "--all")[1]
    old = json.dumps(json.loads(lines.splitlines()[1]) | {"created": 1000})
    (tmp_path / "text").write_text(f"{lines}{old}\n")
    status, told, _ = say("purge", "--url", server.url, "--tenant", "a")
    assert status == 0
    assert told.startswith(f"{IDENTITY} a: 1 entries deleted, tombstone 1")
    assert "kept for 604800 seconds" in told
    status, told, _ = say("import", "--url", server.url, "--from", tmp_path / "text")
    assert (status, told) == (
        0,
        "1 outputs imported, 1 refused (purged), 1 refused (expired), 0 refused (future)\n",
    )
    with server.client() as client:
        assert client.xlen(KEYS.log("a")) == 0
    row = json.loads(say("stats", "--url", server.url, "--json", "--tenant", "a")[1])[0]
    assert (row["entries"], row["tombstone"] > 0) == (0, True)


def test_what_is_imported_is_never_of_the_future(server: RedisServer, say: Say, tmp_path: Path) -> None:
    asyncio.run(filled(server, a=1))
    line = {"tenant": "f", "generation": 2**53, "created": 2**53, "tokens": [1, 2, 3, 4]}
    (tmp_path / "text").write_text(json.dumps(line) + "\n" + json.dumps(line | {"generation": 0}))
    into = ("import", "--url", server.url, "--from", tmp_path / "text")
    told = say(*into)[1]
    assert told == "1 outputs imported, 0 refused (purged), 0 refused (expired), 1 refused (future)\n"
    with server.client() as client:
        now = 1000 * client.time()[0]
    row = json.loads(say("export", "--url", server.url, "--tenant", "f")[1])
    assert abs(row["created"] - now) < 60_000
    assert say("purge", "--url", server.url, "--tenant", "f")[0] == 0
    told = say(*into)[1]
    assert told == "0 outputs imported, 1 refused (purged), 0 refused (expired), 1 refused (future)\n"


def test_what_pods_keep_is_exported_and_what_is_left_out_is_told(
    server: RedisServer, say: Say, tmp_path: Path
) -> None:
    """The command need not be told how long pods keep text."""
    year = 365 * 24 * 3600
    asyncio.run(filled(server, retention_seconds=year, a=1))
    with server.client() as client:
        client.xadd(KEYS.log("a"), {"r": b"foreign"})
        month_ago = 1000 * (client.time()[0] - 30 * 24 * 3600)
    line = {"tenant": "a", "generation": 0, "created": month_ago, "tokens": [1, 2, 3, 4]}
    (tmp_path / "text").write_text(json.dumps(line))
    told = say("import", "--url", server.url, "--from", tmp_path / "text")[1]
    assert told.startswith("1 outputs imported, 0 refused (purged), 0 refused (expired)")
    export = ("export", "--url", server.url, "--tenant", "a")
    status, lines, notes = say(*export)
    assert (status, len(lines.splitlines())) == (0, 2)
    assert notes == "outrider suffix export: note: a: 1 entries left out (foreign)\n"
    status, lines, notes = say(*export, "--retention", 604_800)
    assert (status, len(lines.splitlines())) == (0, 1)
    assert "note: a: 1 entries left out (expired)\n" in notes
    assert f"kept for {year} seconds" in say("purge", *export[1:], "--retention", 60)[1]


def test_another_prefix_or_model_is_told_and_never_looks_like_a_success(
    server: RedisServer, say: Say, tmp_path: Path
) -> None:
    asyncio.run(filled(server, prefix="outrider:team:model:", a=1))
    (tmp_path / "text").write_text("")
    actions = {"purge": ("--tenant", "a"), "stats": ("--all",), "export": ("--all",)}
    actions["import"] = ("--from", str(tmp_path / "text"))
    for action, words in actions.items():
        for identity in ((), ("--identity", IDENTITY)):
            status, out, told = say(action, "--url", server.url, *words, *identity)
            assert (status, out.partition(" ")[0]) == (2, "0" if action == "import" else "")
            assert told == (
                f"outrider suffix {action}: error: --prefix 'outrider:': no model has it; "
                "there are outrider:team:model:\n"
            )
        right = ("--prefix", "outrider:team:model:")
        status, _, told = say(action, "--url", server.url, *words, *right, "--identity", "0" * 32)
        assert (status, f"--identity {'0' * 32} must be one of {IDENTITY}\n" in told) == (2, True)
    status, told, notes = say("purge", "--url", server.url, "--tenant", "a", *right)
    assert (status, f"{IDENTITY} a: 1 entries deleted" in told, notes) == (0, True, "")
    # A pod that is cut off may hold what Redis does not: no error, but no success without a word either.
    status, told, notes = say("purge", "--url", server.url, "--tenant", "A", *right)
    assert (status, f"{IDENTITY} A: 0 entries deleted" in told) == (0, True)
    assert notes == "outrider suffix purge: note: nothing of A was stored; stats --all shows whose text is\n"
    asyncio.run(filled(server, a=1))
    status, told, notes = say("purge", "--url", server.url, "--tenant", "a")
    assert (status, f"{IDENTITY} a: 1 entries deleted" in told) == (0, True)
    assert notes == (
        "outrider suffix purge: note: only for --prefix 'outrider:'; there are also outrider:team:model:\n"
    )


def test_all_tenants_of_all_models_are_purged(server: RedisServer, say: Say) -> None:
    asyncio.run(filled(server, a=1, single=2))
    other = KEYS.tenants.replace(IDENTITY, identity_of("another"))
    with server.client() as client:
        client.zadd(other, {"c": 1})
        client.set("outrider:{short}:tenants", "not ours")
    status, told, _ = say("purge", "--url", server.url, "--all")
    assert status == 0
    assert sorted(line.split(":")[0] for line in told.splitlines()) == sorted(
        [f"{IDENTITY} (single)", f"{IDENTITY} a", identity_of("another")]
    )
    with server.client() as client:
        assert client.keys(KEYS.logs) == []
        assert {b"a", b"=single"} <= set(client.hkeys(KEYS.tombstones))


def test_a_cluster_is_searched_on_all_its_servers(some: Servers, say: Say, tmp_path: Path) -> None:
    nodes = some.cluster()
    identities = sorted(identity_of(str(number)) for number in range(8))
    url = f"redis-cluster://127.0.0.1:{nodes[0].port}"
    line = '{"tenant":"a","generation":0,"created":9007199254740992,"tokens":[1,2,3,4]}'
    (tmp_path / "text").write_text(line)
    for node in nodes:
        with node.client() as client:
            for identity in identities:
                with contextlib.suppress(redis.ResponseError):  # it is another's
                    client.set(KEYS.epoch.replace(IDENTITY, identity), "x")
    for identity in identities:
        assert say("import", "--url", url, "--identity", identity, "--from", tmp_path / "text")[0] == 0
    status, told, _ = say("stats", "--url", url)
    assert status == 0
    assert [line.split()[:2] for line in told.splitlines()[1:]] == [[one, "a"] for one in identities]


async def test_pods_forget_what_the_command_purges(server: RedisServer, say: Say) -> None:
    pod = Pod(server)
    async with running(pod):
        pod.publish(1)
        await settled(pod)
        assert (await asyncio.to_thread(say, "purge", "--url", server.url, "--tenant", "a"))[0] == 0
        await eventually(lambda: pod.purged == ["a"], 5.0)


def test_a_user_needs_few_rights_and_nothing_secret_is_printed(
    server: RedisServer, say: Say, tmp_path: Path
) -> None:
    asyncio.run(filled(server, a=1))
    add_user(server, "admin", "pass word", *ADMIN_COMMANDS)
    auth = secret(tmp_path / "auth", username="admin", password="pass word")
    common = ("--url", server.url, "--auth", auth)
    lines = say("export", *common, "--all")[1]
    (tmp_path / "text").write_text(lines)
    assert say("stats", *common)[0] == 0
    assert say("import", *common, "--from", tmp_path / "text")[0] == 0
    assert say("purge", *common, "--all")[0] == 0
    with server.client() as client:
        assert client.acl_log() == []
    secret(auth, password="another word")
    status, out, complaint = say("stats", *common)
    assert (status, out) == (1, "")
    assert complaint.startswith("outrider suffix stats: failed: AuthenticationError: ")
    assert "word" not in complaint.replace("password", "")


def test_a_redis_that_is_not_there_is_status_1_and_one_line(say: Say) -> None:
    status, _, complaint = say("stats", "--url", "redis://127.0.0.1:1")
    assert (status, complaint.count("\n")) == (1, 1)
    assert complaint.startswith("outrider suffix stats: failed: ConnectionError: ")


def test_a_password_that_is_not_there_is_told_until_it_comes(
    server: RedisServer, say: Say, tmp_path: Path
) -> None:
    with server.client() as client:
        client.config_set("requirepass", "word")
    auth = secret(tmp_path / "auth")
    status, _, complaint = say("stats", "--url", server.url, "--auth", auth)
    assert status == 1
    assert complaint.endswith(f"Authentication required.; there is no file password in {auth}\n")
    secret(auth, password="other")
    assert "there is no" not in say("stats", "--url", server.url, "--auth", auth)[2]
    assert "there is no" not in say("stats", "--url", server.url)[2]
    secret(auth, password="word")
    assert "AuthenticationError" not in say("stats", "--url", server.url, "--auth", auth)[2]


def test_certificates_without_tls_are_refused(say: Say, tmp_path: Path) -> None:
    (tmp_path / "ca.crt").touch()
    status, _, told = say("stats", "--url", "redis://x", "--ca", tmp_path / "ca.crt")
    assert (status, told) == (
        2,
        "outrider suffix stats: error: --ca: certificates are for a URL of TLS: rediss://, "
        "rediss-sentinel:// or rediss-cluster:// (it is redis://)\n",
    )


async def test_a_server_tells_of_a_directory_that_is_not_there_until_it_comes(
    server: RedisServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("outrider_serving.suffix.shared.stats.TROUBLE_SECONDS", 0.0)
    with server.client() as client:
        client.config_set("requirepass", "word")
    pod = Pod(server, auth=tmp_path / "auth")
    async with running(pod):
        await eventually(lambda: pod.log.stats.faults.get("auth", 0) >= 2)
        said = f"auth: Authentication required.; there is no directory {tmp_path / 'auth'}"
        assert pod.log.trouble == said
        secret(tmp_path / "auth", password="word")
        await pod.connected()
        await eventually(lambda: pod.log.trouble is None)


@pytest.mark.parametrize(
    ("words", "complaint"),
    [
        ("stats --url http://x", "--url: 'http://x' is none of redis://host:port/db"),
        ("stats --url redis://me:hunter2@x", "--url: it holds a user or a password"),
        ("stats --url redis://x --auth /nowhere", "--auth /nowhere must be a directory"),
        ("stats --url redis://x --ca /nowhere", "--ca /nowhere must be a file"),
        ("stats --url redis://x --prefix {}", "--prefix: '{}' must be 1 to 128 of"),
        ("stats --url redis://x --identity ab", "--identity 'ab' must be 32 hexadecimal digits"),
        ("stats --url redis://x --tenant a/b", "--tenant 'a/b' must be 1 to 253 of"),
        ("stats --url redis://x --retention 99999999", "--retention: 99999999 must be at most 31536000"),
        ("stats --url redis://x --retention-size 15Ki", "--retention-size: 15360 must be at least 16384"),
        ("purge --url redis://x", "--tenant or --all must say whose text"),
        ("export --url redis://x", "--tenant or --all must say whose text"),
        ("purge --url redis://x --all --tenant a", "--all says all tenants, and --tenant says one"),
    ],
)
def test_bad_input_is_status_2_and_one_line(words: str, complaint: str, say: Say) -> None:
    status, out, told = say(*words.split())
    assert (status, out, told.count("\n")) == (2, "", 1)
    assert told.startswith(f"outrider suffix {words.split()[0]}: error: {complaint}")
    assert "hunter2" not in told


def test_what_is_kept_is_said_as_it_is_to_a_server(capsys: pytest.CaptureFixture[str]) -> None:
    told, flag = [], ["--retention-size", "64MB"]
    for words in (["serve", "model"], ["suffix", "import", "--url", "redis://x"]):
        with pytest.raises(SystemExit, match="2"):
            make_parser().parse_args(words + flag)
        told.append(capsys.readouterr().err.partition(": error: ")[2])
    assert told[0] == told[1]
    assert told[0].startswith(f"argument {flag[0]}: '{flag[1]}' is not a ")


def test_a_model_must_be_named_where_there_is_not_just_one(server: RedisServer, say: Say) -> None:
    for action in (("export", "--all"), ("purge", "--all"), ("import",)):
        status, _, told = say(action[0], "--url", server.url, *action[1:])
        assert (status, told) == (
            2,
            f"outrider suffix {action[0]}: error: --prefix 'outrider:': no model has it, "
            "and no other begins so\n",
        )
    with server.client() as client:
        for name in ("one", "two"):
            client.set(KEYS.epoch.replace(IDENTITY, identity_of(name)), "x")
    status, _, told = say("export", "--url", server.url, "--all")
    assert status == 2
    both = ", ".join(sorted(map(identity_of, ("one", "two"))))
    assert f"--identity was not given: it must be one of {both}" in told


OBJECT = "it must be a JSON object with tenant, generation, created and tokens, not"
COUNT = "must be an integer from 0 to 2**53, not"
TOKEN = "must be an integer from 0 to 2**31 - 1, not"


@pytest.mark.parametrize(
    ("line", "told"),
    [
        ("{", f'{OBJECT} "{{"'),
        ("[]", f'{OBJECT} "[]'),
        ("{}", f"tenant must be {TENANT_RULE}, not nothing"),
        ('{"tenant":"a/b"}', f'tenant must be {TENANT_RULE}, not "a/b"'),
        ('{"tenant":"a","generation":-1,"tokens":[1]}', f"generation {COUNT} -1"),
        ('{"tenant":"a","generation":0,"created":true,"tokens":[1]}', f"created {COUNT} true"),
        ('{"tenant":"a","generation":0,"tokens":[1]}', f"created {COUNT} nothing"),
        ('{"tenant":[1,2]}', f"tenant must be {TENANT_RULE}, not an array"),
        ('{"tenant":"a","tokens":[]}', "tokens must be at least 1 integer, not []"),
        ('{"tenant":"a","tokens":"' + "x" * 99 + '"}', f'integer, not "{"x" * 79}...'),
        ('{"tenant":"a","generation":0,"created":1,"tokens":[7,-1]}', f"tokens[1] {TOKEN} -1"),
        ('{"tenant":"a","generation":0,"created":1,"tokens":[2147483648]}', f"tokens[0] {TOKEN} 2147483648"),
        ('{"tenant":"a","generation":0,"created":1,"tokens":[7,"x"]}', f'tokens[1] {TOKEN} "x"'),
        ("[" * 100_000, f'{OBJECT} "{"[" * 79}...'),
        ("\udcff\udcfe", f'{OBJECT} "\\ufffd'),  # bytes that are no UTF-8
    ],
    ids=lambda text: ascii(text[:60]),
)
def test_a_bad_line_ends_an_import(
    line: str, told: str, server: RedisServer, say: Say, tmp_path: Path
) -> None:
    asyncio.run(filled(server, a=1))
    good = say("export", "--url", server.url, "--tenant", "a")[1]
    (tmp_path / "text").write_text(f"{good}\n{line}\n{good}", encoding="utf-8", errors="surrogateescape")
    status, counted, complaint = say("import", "--url", server.url, "--from", tmp_path / "text")
    assert (status, counted.split(",")[0]) == (2, "1 outputs imported")
    assert complaint.startswith("outrider suffix import: error: line 3: ")
    assert told in complaint
    assert complaint.count("\n") == 1


def test_a_file_that_is_not_there_is_bad_input(server: RedisServer, say: Say) -> None:
    with server.client() as client:
        client.set(KEYS.epoch, "x")
    status, _, told = say("import", "--url", server.url, "--from", "/nowhere")
    assert status == 2
    assert "--from /nowhere cannot be read: No such file or directory" in told


def test_a_standard_input_that_is_closed_is_bad_input(
    server: RedisServer, say: Say, monkeypatch: pytest.MonkeyPatch
) -> None:
    with server.client() as client:
        client.set(KEYS.epoch, "x")
    monkeypatch.setattr("sys.stdin", None)
    status, _, told = say("import", "--url", server.url)
    assert (status, told) == (
        2,
        "outrider suffix import: error: --from must be given: standard input is closed\n",
    )
