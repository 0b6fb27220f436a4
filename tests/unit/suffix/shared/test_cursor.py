"""Readers of streams: each record once, what is missing counted, whatever happens to the stream."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.suffix.shared.cursor import MAX_ORIGINS, Cursor, format_id, parse_id, share

A, B = b"a" * 8, b"b" * 8


def passed(cursor: Cursor, entry: int, origin: bytes, number: int) -> bool:
    """Read an entry, as the log does; its digest is its origin's and number's."""
    new = cursor.passed(entry, hash((origin, number)))
    if new:
        cursor.numbered(origin, number)
    return new


@given(st.integers(0, 2**64 - 1), st.integers(0, 2**64 - 1))
def test_ids_are_numbers(milliseconds: int, sequence: int) -> None:
    text = f"{milliseconds}-{sequence}"
    assert format_id(parse_id(text.encode())) == text


def test_ids_keep_their_order() -> None:
    assert parse_id(b"5-18446744073709551615") < parse_id(b"6-0") < parse_id(b"6-1")


def test_nothing_comes_twice_and_all_is_known_after_reading_again() -> None:
    cursor = Cursor("a", 100)
    assert [passed(cursor, entry, A, entry) for entry in (1, 2, 3)] == [True] * 3
    assert not passed(cursor, 4, A, 3)
    lap = cursor.lap
    cursor.again()
    assert (cursor.position, cursor.caught_up, cursor.lap != lap) == (0, False, True)
    # After the failover the ids are lower, one record is lost, one is new, and one comes twice.
    assert [passed(cursor, 1, A, 1), passed(cursor, 2, A, 3), passed(cursor, 3, A, 4)] == [False, False, True]
    cursor.again()
    assert [passed(cursor, 1, A, 2), passed(cursor, 2, A, 4)] == [False, False]


def test_after_a_purge_nothing_is_known() -> None:
    cursor = Cursor("a", 100)
    passed(cursor, 1, A, 1)
    passed(cursor, 2, A, 5)
    assert cursor.gaps == 3
    cursor.anew()
    assert (cursor.gaps, cursor.position) == (0, 0)
    assert passed(cursor, 1, A, 1)


def test_what_cannot_be_read_is_passed_and_not_new() -> None:
    cursor = Cursor("a", 100)
    assert not cursor.passed(7, None)
    assert cursor.position == 7


@given(st.lists(st.tuples(st.sampled_from([A, B]), st.integers(1, 30)), max_size=60))
def test_gaps_are_what_lies_between_and_never_came(reads: list[tuple[bytes, int]]) -> None:
    cursor = Cursor("a", 1000)
    seen: dict[bytes, list[int]] = {}
    for entry, (origin, number) in enumerate(reads, start=1):
        if passed(cursor, entry, origin, number):
            seen.setdefault(origin, []).append(number)
    expected = 0
    for numbers in seen.values():
        first = numbers[0]
        expected += len(set(range(first, max(numbers) + 1)) - set(numbers))
    assert cursor.gaps == expected


def test_a_stream_with_lower_ids_is_read_again_unless_that_was_asked_before() -> None:
    cursor = Cursor("a", 100)
    passed(cursor, 10, A, 1)
    # Asked before the entry was read: no news.
    cursor.looked_at(0, 0, 0, position=0, lap=cursor.lap)
    assert cursor.position == 10
    passed(cursor, 20, A, 2)
    lap = cursor.lap
    cursor.looked_at(2, 1, 5, position=20, lap=lap)
    assert cursor.position == 0
    assert not passed(cursor, 1, A, 1)
    # An answer for an earlier lap says nothing.
    cursor.looked_at(0, 0, 0, position=20, lap=lap)
    assert cursor.position == 1


def test_an_emptied_stream_is_begun_again_once() -> None:
    cursor = Cursor("a", 100)
    passed(cursor, 10, A, 1)
    cursor.looked_at(0, 0, 0, position=10, lap=cursor.lap)
    assert cursor.position == 0
    lap = cursor.lap
    cursor.looked_at(0, 0, 0, position=0, lap=lap)
    assert cursor.lap == lap


def test_the_lag_is_what_was_not_read_of_what_is_there() -> None:
    cursor = Cursor("a", 100)
    cursor.looked_at(5, 11, 15, position=0, lap=cursor.lap)
    assert cursor.lag == 5
    for entry in (11, 12, 13):
        passed(cursor, entry, A, entry)
    assert cursor.lag == 2
    # The first two were trimmed, three came.
    cursor.looked_at(6, 13, 18, position=13, lap=cursor.lap)
    assert cursor.lag == 5
    for entry in (14, 15, 16, 17, 18, 19):
        passed(cursor, entry, A, entry)
    assert cursor.lag == 0


def test_what_was_written_late_is_overdue_until_it_is_removed() -> None:
    cursor = Cursor("a", 100)
    for minutes, created in ((10, 600_000), (11, 2), (12, 500_000), (13, 3)):
        entry = minutes * 60_000 << 64
        cursor.passed(entry, minutes)
        cursor.finished(entry, created)
    late = [11 * 60_000 << 64, 13 * 60_000 << 64]
    assert cursor.overdue(2) == []
    for _ in range(2):
        assert cursor.overdue(3) == late[:1]
    cursor.removed(late[:1])
    assert cursor.overdue(3) == []
    assert [cursor.is_there(digest) for digest in (10, 11, 12, 13)] == [True, False, True, True]
    # What was removed lags no more; what is trimmed meanwhile is not removed.
    cursor.looked_at(3, 10 * 60_000 << 64, late[1], position=late[1], lap=cursor.lap)
    assert cursor.lag == 0
    cursor.looked_at(0, 0, late[1], position=late[1], lap=cursor.lap)
    assert cursor.overdue(500_001) == []


def test_what_was_trimmed_is_forgotten_unless_it_came_again() -> None:
    cursor = Cursor("a", 100)
    passed(cursor, 1, A, 1)
    passed(cursor, 2, A, 2)
    passed(cursor, 3, A, 1)
    cursor.looked_at(1, 3, 3, position=3, lap=cursor.lap)
    assert not cursor.is_there(hash((A, 2)))
    assert cursor.is_there(hash((A, 1)))


def test_memory_is_bounded_by_what_a_stream_holds() -> None:
    cursor = Cursor("a", 10)
    for entry in range(1, 5000):
        passed(cursor, entry, entry.to_bytes(8, "little"), 1)
        if entry % 700 == 0:
            cursor.again()
    bound = 2 * 10 + 256
    assert len(cursor._places) <= bound
    assert len(cursor._known) <= bound
    assert len(cursor._earlier) <= 2 * bound
    assert len(cursor._origins) <= MAX_ORIGINS


def test_all_streams_share_what_is_read_at_a_time() -> None:
    cursors = [Cursor(str(number), 1) for number in range(100)]
    assert share(cursors[:1], 64) == 64
    assert share(cursors[:3], 64) == 21
    assert share(cursors, 64) == 1
