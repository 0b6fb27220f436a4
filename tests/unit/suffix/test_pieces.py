"""Long outputs are remembered piece by piece: all of them, in time, and nothing that was purged meanwhile."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.suffix.history import History
from outrider_serving.suffix.indexes import twin_indexes
from outrider_serving.suffix.lookup import LESSON_TOKENS, MAX_MATCH, Look
from outrider_serving.suffix.pieces import Coming, pieces

SPARE = 2 * MAX_MATCH
"""Tokens that a log has more: ends of texts, and what goes before where a segment begins."""


@given(length=st.integers(1, 5 * LESSON_TOKENS))
def test_each_place_and_all_of_a_match_before_it_is_in_one_piece(length: int) -> None:
    found = list(pieces(range(length)))
    assert found[0][0] == 0
    assert found[-1][-1] == length - 1
    assert all(len(piece) <= LESSON_TOKENS for piece in found)
    assert all(len(set(one) & set(other)) == MAX_MATCH for one, other in pairwise(found))


@pytest.fixture
def history() -> History:
    made = History(twin_indexes())
    made.hold(made, 100_000)
    return made


def test_so_much_at_a_time_that_nobody_waits(history: History) -> None:
    coming = Coming(history)
    coming.put("a", range(3 * LESSON_TOKENS), 0)
    coming.put("b", range(100), 0)
    sizes = [history.size.tokens]
    while coming:
        coming.go_on()
        sizes.append(history.size.tokens)
    grown = [after - before for before, after in pairwise(sizes)]
    assert len(grown) == 4
    assert max(grown) <= LESSON_TOKENS + SPARE
    for tenant, at in (("a", 100), ("a", LESSON_TOKENS - 1), ("a", 2 * LESSON_TOKENS + 50), ("b", 90)):
        text = history.indexes.text(10)
        text.extend(range(at - 5, at))
        log = history.index(tenant)
        assert log is not None
        assert history.indexes.look_up(text, [log], Look(), 4, 4).tokens == tuple(range(at, at + 4))


def test_what_waits_is_purged_and_erased(history: History) -> None:
    coming = Coming(history)
    for tenant, time in (("a", 1), ("b", 1), ("b", 2)):
        coming.put(tenant, range(LESSON_TOKENS), time)
    coming.purge("a")
    coming.erase(2)
    assert len(coming) == 1
    coming.go_on()
    assert not coming
    assert history.size.tenants == 1
    assert LESSON_TOKENS < history.size.tokens <= LESSON_TOKENS + SPARE


def test_what_nobody_keeps_does_not_wait() -> None:
    coming = Coming(History(twin_indexes()))
    coming.put("a", range(100), 0)
    assert not coming
