"""Histories of tenants within a limit."""

from __future__ import annotations

import random
import resource
import time
from array import array
from collections.abc import Callable
from pathlib import Path

import pytest

from outrider_serving.suffix.history import BYTES_PER_TOKEN, History
from outrider_serving.suffix.indexes import Indexes, compiled_indexes, twin_indexes
from outrider_serving.suffix.lookup import Look

LIMIT = 20_000


def of_compiled_code() -> Indexes:
    made = compiled_indexes()
    assert made is not None, "there is no compiled library"
    return made


@pytest.fixture(params=[of_compiled_code, twin_indexes])
def history(request: pytest.FixtureRequest) -> History:
    make: Callable[[], Indexes] = request.param
    history = History(make())
    history.hold("the test", LIMIT)
    return history


def text(seed: int, tokens: int = 200) -> list[int]:
    draws = random.Random(seed)
    return [draws.randrange(10_000) for _ in range(tokens)]


def knows(history: History, tenant: str, written: list[int]) -> bool:
    """Whether the end of a text is proposed after its beginning; which is a use of it."""
    index = history.index(tenant)
    if index is None:
        return False
    own = history.indexes.text(0)
    own.extend(written[:20])
    return history.indexes.look_up(own, [index], Look(), 8, 8).tokens == tuple(written[20:28])


def test_it_is_filled_from_when_it_is_first_held(history: History) -> None:
    fresh = History(history.indexes)
    fresh.learn("a", text(0), 0)
    assert not fresh.kept
    fresh.hold("somebody", LIMIT)
    fresh.learn("a", text(1), 0)
    fresh.release("somebody")
    fresh.learn("a", text(2), 0)
    assert fresh.kept
    assert [knows(fresh, "a", text(n)) for n in range(3)] == [False, True, True]


def test_short_outputs_are_not_worth_their_place(history: History) -> None:
    history.learn("a", [1, 2, 3], 0)
    assert (history.size.tenants, history.index("a")) == (0, None)


def test_the_oldest_go_and_the_limits_hold(history: History) -> None:
    for n in range(400):
        history.learn("a", text(n), n)
        assert history.size.tokens <= LIMIT
        assert history.size.bytes <= LIMIT * BYTES_PER_TOKEN
    known = [knows(history, "a", text(n)) for n in range(400)]
    assert not any(known[:300])
    assert all(known[330:])
    assert history.size.evicted >= 400 * 201 - LIMIT


def test_what_is_used_stays_longer(history: History) -> None:
    for n in range(40):
        history.learn("a", text(n), n)
    used = text(3)
    for n in range(40, 600):
        assert knows(history, "a", used)
        history.learn("a", text(n), n)
    assert not knows(history, "a", text(4))


def test_what_was_used_once_goes_after_all(history: History) -> None:
    for n in range(40):
        history.learn("a", text(n), n)
    assert knows(history, "a", text(3))
    for n in range(40, 600):
        history.learn("a", text(n), n)
    assert not knows(history, "a", text(3))


def test_a_tenant_that_floods_takes_nothing_from_one_that_has_less(history: History) -> None:
    for n in range(20):
        history.learn("small", text(n), n)
    for n in range(1000, 1500):
        history.learn("flood", text(n), n)
    assert all(knows(history, "small", text(n)) for n in range(20))
    assert knows(history, "flood", text(1499))


def test_many_tenants_keep_a_share_each_and_lose_their_oldest(history: History) -> None:
    history.hold("the test", 5 * LIMIT)
    for n in range(240):
        for tenant in range(20):
            history.learn(f"t{tenant}", text(1000 * tenant + n, 100), n)
            assert n < 100 or history.size.tenants == 20
    for tenant in range(20):
        known = [knows(history, f"t{tenant}", text(1000 * tenant + n, 100)) for n in range(240)]
        assert sum(known) > 5 * LIMIT / 20 / 101 / 2
        assert all(known[225:])
        assert not any(known[:160])


def test_of_very_many_tenants_those_stay_that_were_asked_for_last(history: History) -> None:
    for n in range(500):
        history.learn(f"t{n}", text(n), n)
        assert knows(history, "t0", text(0))
        assert history.size.bytes <= LIMIT * BYTES_PER_TOKEN
    assert knows(history, "t499", text(499))
    assert not knows(history, "t1", text(1))
    assert history.size.tenants < 100


def test_purged_is_gone_for_good(history: History) -> None:
    for n in range(60):
        history.learn("a", text(n), n)
        history.learn("b", text(n), n)
        knows(history, "a", text(n))
    history.purge("a")
    history.purge("nobody")
    assert history.index("a") is None
    for n in range(100, 300):
        history.learn("b", text(n), n)
    assert history.index("a") is None  # nothing of it was waiting to be taken back
    assert history.size.tenants == 1


def test_what_is_too_old_is_forgotten(history: History) -> None:
    for n in range(60):
        history.learn("a", text(n), n)
        assert knows(history, "a", text(n))
    history.erase(50)
    for n in range(100, 200):
        history.learn("a", text(n), n)
    known = [knows(history, "a", text(n)) for n in range(60)]
    assert not any(known[:50])


def test_the_one_who_wants_most_is_heeded(history: History) -> None:
    history.hold("more", 2 * LIMIT)
    for n in range(400):
        history.learn("a", text(n), n)
    assert LIMIT < history.size.tokens <= 2 * LIMIT
    history.release("more")
    history.learn("a", text(400), 400)
    assert history.size.tokens <= LIMIT


def test_a_long_text_that_was_used_stays_longer_among_short_ones(history: History) -> None:
    """And does not keep those that were used later from it."""
    outputs = [text(n, 600 if n < 200 and n % 5 == 0 else 60) for n in range(600)]
    for n, output in enumerate(outputs):
        history.learn("a", output, n)
        knows(history, "a", output)
    # All these were evicted once, as what came since would take all the room.
    assert any(knows(history, "a", output) for output in outputs[:200:5])
    assert any(knows(history, "a", output) for output in outputs[200 : 600 - LIMIT // 61])


def test_what_waits_to_be_taken_back_counts_and_is_bounded(history: History) -> None:
    history.hold("more", 6 * LIMIT)
    for n in range(550):
        history.learn("a", text(n), n)
        assert knows(history, "a", text(n))
    history.release("more")
    history.learn("b", text(550), 550)
    kept = [index.size for name in ("a", "b") if (index := history.index(name)) is not None]
    waiting = history.size.tokens - sum(size.tokens for size in kept)
    assert LIMIT // 8 < waiting <= LIMIT // 4
    assert history.size.bytes - sum(size.bytes for size in kept) > 4 * waiting
    history.purge("a")
    history.purge("b")
    assert (history.size.tokens, history.size.bytes) == (0, 0)


def test_who_holds_much_has_few_segments_beside_many_who_hold_little(history: History) -> None:
    history.hold("the test", 5 * LIMIT)
    for n in range(40):
        history.learn(f"small{n}", text(n, 20), n)
    for n in range(500):
        history.learn("large", text(n), n)
    large, small = history.index("large"), history.index("small39")
    assert large is not None
    assert small is not None
    assert large.size.tokens > 3 * LIMIT
    assert small.size.bytes == 1024 * 44
    dropped = 0
    while large.drop() is not None:
        dropped += 1
    assert dropped < 24


def resident() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * resource.getpagesize()


def test_what_tenants_leave_behind_is_given_back() -> None:
    """Whoever writes next, and whether anybody does; until then it counts."""
    limit = 400_000
    history = History(of_compiled_code())
    history.hold("the test", limit)
    output = array("i", text(1, 2000))
    history.learn("warm-up", output, 0)
    history.purge("warm-up")
    before = resident()
    for tenant in range(10):
        for n in range(limit // len(output) + 10):
            history.learn(f"t{tenant}", output, n)
    assert resident() - before <= history.size.bytes + (4 << 20)
    assert given_back(history, limit * BYTES_PER_TOKEN)
    assert resident() - before <= limit * BYTES_PER_TOKEN + (4 << 20)
    for tenant in range(10):
        history.purge(f"t{tenant}")
    assert given_back(history, 0)
    assert resident() - before <= 4 << 20


def given_back(history: History, bytes_left: int) -> bool:
    ends = time.monotonic() + 5
    while history.size.bytes > bytes_left and time.monotonic() < ends:
        time.sleep(0.002)
    return history.size.bytes <= bytes_left
