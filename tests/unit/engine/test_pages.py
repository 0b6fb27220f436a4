"""Pages: given out in runs, shared by name, kept until something else needs them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.schedule.pages import PagePool
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.runs import Runs
from outrider_serving.engine.types import Request
from unit.engine.simulation import request

A, B, C, D = (letter.encode() for letter in "ABCD")
NONE: frozenset[str] = frozenset()


def chain(pool: PagePool, *names: bytes, marks: frozenset[str] = NONE) -> list[int]:
    """Hold pages for a text and publish them under these names."""
    pages = pool.allocate(len(names))
    for page, name in zip(pages, names, strict=True):
        pool.publish(page, name, marks)
    return pages


def counts(pool: PagePool) -> dict[str, int]:
    pool.check()
    return {"held": pool.held, "cached": pool.cached, "free": pool.free}


def test_a_text_gets_neighbours_and_grows_behind_its_last_page() -> None:
    pool = PagePool(8, 4)
    assert pool.allocate(3) == [0, 1, 2]
    assert pool.allocate(2, after=2) == [3, 4]


def test_two_texts_can_both_grow_without_a_gap() -> None:
    pool = PagePool(100, 4)
    first, second = pool.allocate(2), pool.allocate(2)
    for _ in range(20):
        first += pool.allocate(1, after=first[-1])
        second += pool.allocate(1, after=second[-1])
    assert first == list(range(first[0], first[0] + 22))
    assert second == list(range(second[0], second[0] + 22))


def test_a_text_that_fits_into_no_run_gets_few_long_ones() -> None:
    pool = PagePool(8, 4)
    pages = pool.allocate(8)
    pool.release([page for page in pages if page not in (3, 5)])
    assert pool.allocate(5) == [0, 1, 2, 6, 7]


def test_more_pages_than_are_free_are_refused_and_nothing_is_lost() -> None:
    pool = PagePool(4, 4)
    pool.allocate(2)
    with pytest.raises(ValueError, match="3 pages were asked for, 2 are free"):
        pool.allocate(3)
    assert counts(pool) == {"held": 2, "cached": 0, "free": 2}


def test_the_last_page_of_a_text_may_be_full_in_part() -> None:
    pool = PagePool(4, 4)
    assert [pool.pages_for(tokens) for tokens in (0, 1, 4, 5)] == [0, 1, 1, 2]


def test_a_published_page_is_found_while_it_is_held_and_afterwards() -> None:
    pool = PagePool(4, 4)
    pages = chain(pool, A, B)
    assert list(pool.lookup([A, B, C]).pages) == pages
    pool.release(pages)
    assert counts(pool) == {"held": 0, "cached": 2, "free": 4}
    assert list(pool.lookup([A, B, C]).pages) == pages


def test_a_page_without_a_name_is_unused_as_soon_as_nobody_holds_it() -> None:
    pool = PagePool(4, 4)
    pool.release(pool.allocate(2))
    assert counts(pool) == {"held": 0, "cached": 0, "free": 4}


def test_a_shared_page_stays_until_the_last_holder_lets_go() -> None:
    pool = PagePool(4, 4)
    pages = chain(pool, A)
    pool.acquire(pages)
    pool.release(pages)
    assert counts(pool) == {"held": 1, "cached": 0, "free": 3}
    pool.release(pages)
    assert counts(pool) == {"held": 0, "cached": 1, "free": 4}


def test_taking_up_a_cached_page_leaves_fewer_free_ones() -> None:
    pool = PagePool(4, 4)
    held, cached = chain(pool, A), chain(pool, B)
    pool.release(cached)
    assert pool.cached_among(held + cached) == 1
    pool.acquire(held + cached)
    assert counts(pool) == {"held": 2, "cached": 0, "free": 2}


def test_lookup_stops_at_the_first_page_that_is_missing() -> None:
    pool = PagePool(4, 4)
    pages = chain(pool, A, C)
    assert pool.lookup([A, B, C]).pages == (pages[0],)
    assert pool.lookup([B, C]).pages == ()


def test_unused_pages_go_before_cached_ones() -> None:
    pool = PagePool(4, 4)
    pool.release(chain(pool, A, B))
    pool.allocate(2)
    assert len(pool.lookup([A, B]).pages) == 2


def test_the_text_that_was_held_last_is_kept_longest() -> None:
    pool = PagePool(4, 4)
    first, second = chain(pool, A), chain(pool, B)
    pool.release(first)
    pool.release(second)
    pool.acquire(first)
    pool.release(first)
    pool.allocate(3)
    assert len(pool.lookup([A]).pages) == 1
    assert pool.lookup([B]).pages == ()


def test_the_later_pages_of_a_text_go_first() -> None:
    pool = PagePool(4, 4)
    pool.release(chain(pool, A, B, C))
    pool.allocate(2)
    assert len(pool.lookup([A, B, C]).pages) == 2


def test_of_two_pages_with_one_name_the_first_stays_the_named_one() -> None:
    pool = PagePool(4, 4)
    first, second = chain(pool, A), chain(pool, A)
    assert list(pool.lookup([A]).pages) == first
    pool.release(second)
    assert counts(pool) == {"held": 1, "cached": 0, "free": 3}


def test_a_page_with_more_marks_takes_the_name_over() -> None:
    pool = PagePool(4, 4)
    first = chain(pool, A, marks=frozenset({"x"}))
    second = chain(pool, A, marks=frozenset({"x", "y"}))
    assert list(pool.lookup([A]).pages) == second
    chain(pool, A, marks=frozenset({"z"}))
    assert list(pool.lookup([A]).pages) == second
    pool.release(first)
    assert counts(pool) == {"held": 2, "cached": 0, "free": 2}


def test_a_cached_page_that_loses_its_name_is_unused() -> None:
    pool = PagePool(4, 4)
    pool.release(chain(pool, A))
    chain(pool, A, marks=frozenset({"x"}))
    assert counts(pool) == {"held": 1, "cached": 0, "free": 3}


def test_lookup_stops_at_the_first_page_without_the_required_marks() -> None:
    pool = PagePool(4, 4)
    pages = (
        chain(pool, A, marks=frozenset({"x", "y"}))
        + chain(pool, B, marks=frozenset({"x", "z"}))
        + chain(pool, C)
    )
    found = pool.lookup([A, B, C], frozenset({"x"}))
    assert list(found.pages) == pages[:2]
    assert found.marks == {"x"}, "what all of them bear"
    assert pool.lookup([A, B, C]).marks == NONE
    assert pool.lookup([D]).marks == NONE


def test_a_dropped_mark_is_required_in_vain() -> None:
    pool = PagePool(4, 4)
    chain(pool, A, B, marks=frozenset({"x", "y"}))
    pool.drop_mark("x")
    assert pool.lookup([A, B], frozenset({"x"})).pages == ()
    assert pool.lookup([A, B], frozenset({"y"})).marks == {"y"}


def test_forgotten_names_leave_the_index_at_once() -> None:
    pool = PagePool(4, 4)
    cached, held = chain(pool, A), chain(pool, B)
    pool.release(cached)
    pool.forget([A, B, C])
    assert pool.lookup([A]).pages == pool.lookup([B]).pages == ()
    assert counts(pool) == {"held": 1, "cached": 0, "free": 3}
    pool.release(held)
    assert counts(pool) == {"held": 0, "cached": 0, "free": 4}


@given(st.data())
def test_no_page_is_lost_or_given_twice(data: st.DataObject) -> None:
    pool = PagePool(data.draw(st.integers(1, 8)), 4)
    tables: list[list[int]] = []
    for _ in range(data.draw(st.integers(0, 25))):
        kind = data.draw(st.sampled_from(["allocate", "grow", "publish", "share", "release", "forget"]))
        table = data.draw(st.sampled_from(tables)) if tables else []
        name = bytes([data.draw(st.integers(0, 5))])
        if kind == "allocate":
            tables.append(pool.allocate(data.draw(st.integers(0, pool.free))))
        elif kind == "grow" and table:
            table += pool.allocate(data.draw(st.integers(0, min(2, pool.free))), after=table[-1])
        elif kind == "publish" and table:
            page = data.draw(st.sampled_from(table))
            if pool.lookup([name]).pages != (page,) and not any(
                page in pool.lookup([bytes([n])]).pages for n in range(6)
            ):
                pool.publish(page, name, frozenset(data.draw(st.sets(st.sampled_from("xy")))))
        elif kind == "share":
            found = pool.lookup([name]).pages
            pool.acquire(found)
            tables.append(list(found))
        elif kind == "release" and tables:
            pool.release(tables.pop(data.draw(st.integers(0, len(tables) - 1))))
        elif kind == "forget":
            pool.forget([name])
        pool.check()
        assert pool.held == len({page for each in tables for page in each})


@given(st.data())
def test_runs_know_the_longest_row_of_neighbours(data: st.DataObject) -> None:
    total = data.draw(st.integers(1, 24))
    runs, pages = Runs(total), set(range(total))
    for _ in range(data.draw(st.integers(0, 200))):
        if len(pages) < total and data.draw(st.booleans()):
            page = data.draw(st.sampled_from(sorted(set(range(total)) - pages)))
            runs.add(page)
            pages.add(page)
        elif pages:
            first, length = runs.longest()
            skip = data.draw(st.integers(0, length - 1))
            taken = runs.take(first, data.draw(st.integers(1, length - skip)), skip)
            assert pages.issuperset(taken)
            pages.difference_update(taken)
        starts = [page for page in pages if page - 1 not in pages]
        lengths = {s: next(n for n in range(1, total + 1) if s + n not in pages) for s in starts}
        assert set(runs) == pages
        assert len(runs) == len(pages)
        assert {first: runs.length(first) for first in range(total) if runs.length(first)} == lengths
        if pages:
            assert runs.longest() == min(lengths.items(), key=lambda run: (-run[1], run[0]))


NAMES = PageNames(2, b"a secret")


def names(asked: Request, tokens: list[int], pages: int = 2) -> list[bytes]:
    made: list[bytes] = []
    NAMES.extend(made, asked, tokens, pages)
    return made


def test_texts_share_names_exactly_as_far_as_they_are_equal() -> None:
    ours, theirs = names(request("a"), [1, 2, 3, 4]), names(request("b"), [1, 2, 3, 5])
    assert ours[0] == theirs[0]
    assert ours[1] != theirs[1]
    assert names(request("a"), [9, 2, 3, 4])[1] != ours[1], "the same page after another one"


def test_names_are_the_same_in_one_go_and_bit_by_bit() -> None:
    made: list[bytes] = []
    for pages in (1, 2, 1, 3):
        NAMES.extend(made, request("a"), [1, 2, 3, 4, 5, 6, 7], pages)
    assert made == names(request("a"), [1, 2, 3, 4, 5, 6, 7], 3)


def test_no_two_parties_share_a_name() -> None:
    parties = [
        request("1"),
        request("1", tenant="1"),
        request("1", tenant="11"),
        request("1", private=True),
        request("2", private=True, group="1"),
        request("", private=True, group="11"),
        request("1", private=True, tenant="1"),
        request("1", private=True, tenant="1", group="1"),
        request("1", private=True, tenant="\ud800"),
    ]
    assert len({name for party in parties for name in names(party, [1, 2, 3, 4])}) == 2 * len(parties)


def test_choices_of_a_private_call_share_names() -> None:
    one, other = (request(name, private=True, group="call") for name in "ab")
    assert names(one, [1, 2, 3, 4]) == names(other, [1, 2, 3, 4])


def test_names_of_another_process_are_others() -> None:
    assert PageNames(2).salt(request("a")) != PageNames(2).salt(request("a"))
