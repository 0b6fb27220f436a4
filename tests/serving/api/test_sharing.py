"""Real servers that learn from each other through a real Redis."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from outrider_serving.settings import Method, Proposer, default_settings
from serving.api.process import ROOT, ServerProcess, eventually
from serving.suffix.redis_server import RedisServer, servers

PROMPT = "the quick brown fox jumps over"
TOKENS = 60

WORDS = [list(range(first, first + 60)) for first in (20, 80, 140, 200)]
"""Allowed tokens. What is written with some of them helps no text of the others."""

Serve = Callable[..., ServerProcess]


@pytest.fixture
def redis(tmp_path: Path) -> Iterator[RedisServer]:
    with servers(tmp_path / "redis") as some:
        yield some.redis()


@pytest.fixture
def serve(tiny: Path, redis: RedisServer, tmp_path: Path) -> Iterator[Serve]:
    """Starts servers with the suffix proposer that share through the Redis; they end with the test."""
    settings = tmp_path / "settings.json"
    made = default_settings(Proposer(method=Method.SUFFIX, max_depth=8))
    settings.write_text(made.model_dump_json(by_alias=True))
    started: list[ServerProcess] = []

    def start(*arguments: str) -> ServerProcess:
        common = ("--settings", str(settings), "--shared-cache", redis.url)
        started.append(ServerProcess(str(tiny), *common, *arguments))
        return started[-1]

    yield start
    for process in started:
        process.end()


def ask(server: ServerProcess, key: str = "none", **more: Any) -> str:
    """The text of a completion."""
    done = server.client(key).completions.create(
        model="tiny", prompt=PROMPT, max_tokens=TOKENS, temperature=0, extra_body={"ignore_eos": True, **more}
    )
    return done.choices[0].text


def accepted(server: ServerProcess) -> float:
    """Tokens that its requests took from what others have written."""
    return server.metric("outrider_suffix_accepted_total", scope="history")


def found(server: ServerProcess) -> float:
    """Proposals that came from what others have written."""
    return server.metric("outrider_suffix_proposals_total", scope="history")


def takes_over(server: ServerProcess, key: str = "none", **more: Any) -> bool:
    """Whether a request takes something from what others have written; how deep it looks depends on times."""
    before = accepted(server)
    ask(server, key, store=False, **more)
    return accepted(server) > before


def assert_forgotten(server: ServerProcess) -> None:
    """Nothing is proposed of what was written with any but the last of the words."""
    before = found(server)
    for words in WORDS[:-1]:
        ask(server, store=False, allowed_token_ids=words)
    assert found(server) == before


def received(server: ServerProcess) -> float:
    return server.metric("outrider_shared_received_total")


def refilled(server: ServerProcess) -> float:
    """Records that it wrote again to a Redis that had lost them."""
    return server.metric("outrider_shared_refilled_total")


def suffix(*arguments: str) -> str:
    """The command `outrider suffix`."""
    command = [sys.executable, "-m", "outrider_serving", "suffix", *arguments]
    environment = os.environ | {"PYTHONPATH": str(ROOT / "serving")}
    return subprocess.run(command, env=environment, check=True, capture_output=True, text=True).stdout


def stored(redis: RedisServer) -> int:
    """Tokens that Redis has."""
    (told,) = json.loads(suffix("stats", "--url", redis.url, "--all", "--json"))
    return int(told["tokens"])


def test_two_learn_from_each_other_and_a_third_starts_warm(serve: Serve, redis: RedisServer) -> None:
    first, second = serve(), serve()
    first.ready()
    second.ready()
    took = []
    for words in WORDS[:-1]:  # of which one may meet a busy machine
        text = ask(first, allowed_token_ids=words)
        began = time.monotonic()
        eventually(lambda words=words: takes_over(second, allowed_token_ids=words))
        took.append(time.monotonic() - began)
        assert ask(second, store=False, allowed_token_ids=words) == text
    assert sorted(took)[1] < 1.0
    written = TOKENS * len(took)
    assert (first.metric("outrider_shared_published_total"), received(first), found(first)) == (written, 0, 0)
    assert second.metric("outrider_shared_connected") == 1
    assert second.metric("outrider_suffix_compiled") == 1
    assert second.state()["sharedCacheError"] is None

    third = serve().ready()
    assert received(third) == written
    eventually(lambda: takes_over(third, allowed_token_ids=WORDS[0]))

    assert stored(redis) == written
    suffix("purge", "--url", redis.url, "--tenant", "")
    for server in (first, second, third):
        eventually(lambda server=server: server.metric("outrider_shared_purges_total") == 1, 5.0)
        assert_forgotten(server)

    # What is written afterwards outlives a Redis that loses everything; what was purged does not come back.
    ask(first, allowed_token_ids=WORDS[-1])
    eventually(lambda: received(second) == received(third) == written + TOKENS)
    redis.kill()
    redis.start()
    eventually(lambda: refilled(first) + refilled(second) + refilled(third) > 0)
    ask(second, allowed_token_ids=WORDS[-1])  # those who get it have read all that was there before
    eventually(lambda: (received(first), received(third)) == (TOKENS, written + 2 * TOKENS))
    assert stored(redis) == 2 * TOKENS
    for server in (first, second, third):
        assert_forgotten(server)
        eventually(lambda server=server: takes_over(server, allowed_token_ids=WORDS[-1]))


def test_a_proposer_that_comes_later_and_an_engine_that_was_killed_are_told_again(
    serve: Serve, tmp_path: Path
) -> None:
    settings = tmp_path / "settings.json"
    later = settings.read_text()
    settings.write_text(default_settings(Proposer(method=Method.NONE)).model_dump_json(by_alias=True))
    server = serve().ready()
    ask(server)
    eventually(lambda: server.metric("outrider_shared_published_total") == TOKENS)
    assert server.metric("outrider_history_tokens") == 0
    settings.write_text(later)
    eventually(lambda: server.metric("outrider_history_tokens") >= TOKENS)
    eventually(lambda: takes_over(server))
    os.kill(server.engine_pid, signal.SIGKILL)
    eventually(lambda: server.get("/readyz").status_code == 503)
    server.ready()
    eventually(lambda: takes_over(server))


def test_without_redis_it_serves_and_says_so_and_shares_once_it_comes(
    serve: Serve, redis: RedisServer
) -> None:
    redis.kill()
    server = serve("--warm-seconds", "1").ready()
    ask(server)
    eventually(lambda: takes_over(server))
    assert server.metric("outrider_shared_connected") == 0
    eventually(lambda: server.state()["sharedCacheError"] is not None, 20)
    assert str(server.state()["sharedCacheError"]).startswith("connection: ")
    redis.start()
    eventually(lambda: server.metric("outrider_shared_published_total") == TOKENS, 15)
    eventually(lambda: server.state()["sharedCacheError"] is None)


def test_tenants_of_keys_share_with_themselves_only(serve: Serve, tmp_path: Path) -> None:
    keys = tmp_path / "keys"
    keys.mkdir()
    (keys / "red").write_text("red-1\nred-2\n")
    (keys / "blue").write_text("blue-1\n")
    first, second = serve("--api-keys", str(keys)), serve("--api-keys", str(keys))
    first.ready()
    second.ready()
    ask(first, "red-1")
    ask(second, "red-2", store=False)
    eventually(lambda: received(second) >= TOKENS, 2.0)
    for server in (first, second):
        before = found(server)
        for _ in range(3):
            ask(server, "blue-1", store=False)
        assert found(server) == before
        eventually(lambda server=server: takes_over(server, "red-2"))


def test_what_was_written_last_is_shared_before_the_end(serve: Serve, redis: RedisServer) -> None:
    server = serve("--drain-delay", "0").ready()
    ask(server)
    server.signal(signal.SIGTERM)
    assert server.wait() == 0
    (line,) = suffix("export", "--url", redis.url, "--all").splitlines()
    assert len(json.loads(line)["tokens"]) == TOKENS
