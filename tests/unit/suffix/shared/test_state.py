"""What the log knows and decides: bounds, purges, losses, by plain calls."""

from __future__ import annotations

import random
from array import array
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.suffix.shared import outbox
from outrider_serving.suffix.shared.cursor import judge
from outrider_serving.suffix.shared.options import LogOptions
from outrider_serving.suffix.shared.outbox import Batch, Finished, Memory, Outbox, Remembered, Sealer
from outrider_serving.suffix.shared.record import Record, compress, decode
from outrider_serving.suffix.shared.state import MAX_FOLLOWED, Epoch, State

VOCABULARY = 1000
NOW = 1_900_000_000_000


def state(**options: Any) -> tuple[State, list[str]]:
    purged: list[str] = []
    made = State(LogOptions(url="redis://host", **options), VOCABULARY, purged.append)
    made.set_clock(NOW)
    made.enter(Epoch("first", "run"))
    return made, purged


def batches(one: State) -> list[Batch]:
    """All that waits, as it is written."""
    while one.take():
        groups = one.groups()
        for group in groups:
            group.compress()
        one.made(groups)
    return list(one.pending)


def published(*outputs: list[int], tenant: str = "a", generation: int = 0) -> list[tuple[int, bytes]]:
    """Entries that another process has written."""
    other, _ = state()
    for output in outputs:
        other.publish(tenant, output, generation)
        batches(other)
    raws = [record.raw for batch in other.pending for record in batch.records]
    return list(enumerate(raws, start=1))


def received(one: State, entries: list[tuple[int, bytes]], tenant: str = "a") -> list[list[int]]:
    one.need(tenant)
    found = one.receive(one.followed[tenant], judge(entries, VOCABULARY))
    return [list(output) for outputs, _ in found for output in outputs]


def settle(one: State) -> None:
    while (batch := one.next_batch()) is not None:
        one.settled(batch)


@given(st.lists(st.tuples(st.booleans(), st.integers(4, 3000)), max_size=60))
def test_the_outbox_is_bounded_and_counts_what_it_holds(steps: list[tuple[bool, int]]) -> None:
    box = Outbox(20_000)
    held: list[int] = []
    for put, size in steps:
        if put:
            held.append(size)
            dropped = box.put(Finished("a", array("i", range(size)), 0, 0.0))
            del held[:dropped]
        else:
            taken = [len(output.tokens) for output in box.take(size)]
            assert taken == held[: len(taken)]
            assert not taken or sum(taken[:-1]) < size
            del held[: len(taken)]
        assert box.bytes <= 20_000
        assert (len(box), box.tokens) == (len(held), sum(held))


def test_what_is_larger_than_the_outbox_is_dropped_alone() -> None:
    box = Outbox(1000)
    assert box.put(Finished("a", array("i", range(1000)), 0, 0.0)) == 1
    assert (len(box), box.bytes) == (0, 0)


def test_the_memory_is_bounded_and_forgets_the_oldest() -> None:
    memory = Memory(1000)
    for number in range(10):
        memory.put(number, Remembered("a", 0, 0, bytes(100), "e"))
        memory.put(number, Remembered("a", 0, 0, bytes(100), "f"))
    assert [number for number, _ in memory.items()] == [7, 8, 9]
    assert memory.bytes <= 1000
    memory.keep(lambda record: False)
    assert (len(memory), memory.bytes) == (0, 0)


def test_numbers_of_a_tenant_have_no_holes_and_no_number_comes_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(outbox, "_WRITERS", 2)
    sealer = Sealer()
    seen: dict[tuple[str, bytes], list[int]] = {}
    for tenant in ["a", "b", "a", "c", "a", "b", "a"]:
        for record in sealer.seal(tenant, 0, 0, compress([array("i", [1, 2, 3, 4])] * 2)).records:
            said = decode(record.raw, VOCABULARY)
            assert isinstance(said, Record)
            seen.setdefault((tenant, said.origin), []).append(said.number)
            assert sealer.is_own(tenant, said.origin)
    assert all(numbers == list(range(1, len(numbers) + 1)) for numbers in seen.values())
    assert sorted(len(numbers) for (tenant, _), numbers in seen.items() if tenant == "b") == [1, 1]
    assert not sealer.is_own("d", b"12345678")


def test_outputs_of_a_tenant_share_records_and_tenants_and_generations_do_not() -> None:
    one, _ = state()
    for tenant, generation in [("a", 0), ("b", 0), ("a", 0), ("a", 5), ("b", 0)]:
        one.publish(tenant, [1, 2, 3, 4], generation)
    written = [(batch.tenant, batch.generation, batch.outputs) for batch in batches(one)]
    assert written == [("a", 0, 2), ("b", 0, 2), ("a", 5, 1)]
    assert one.stats.queue_outputs == 5
    assert one.stats.queue_tokens == 20


def test_a_long_output_is_written_in_batches() -> None:
    one, _ = state()
    one.publish("a", random.Random(1).choices(range(VOCABULARY), k=200_000), 0)
    made = batches(one)
    assert max(len(batch.records) for batch in made) <= 16
    assert len(made) > 1


def test_what_was_taken_is_kept_until_it_is_records() -> None:
    one, _ = state()
    one.publish("a", [1, 2, 3, 4], 0)
    assert one.take()
    one.groups()  # and then the connection breaks
    assert one.stats.queue_outputs == 1
    assert [batch.outputs for batch in batches(one)] == [1]


def test_records_are_received_once_and_own_never() -> None:
    one, _ = state()
    one.publish("a", [1, 2, 3, 4], 0)
    own = [record.raw for batch in batches(one) for record in batch.records]
    entries = published([5, 6, 7, 8], [9, 10, 11, 12])
    assert received(one, [*entries, (3, own[0]), (4, entries[0][1])]) == [[5, 6, 7, 8], [9, 10, 11, 12]]
    assert one.counts.duplicates == 2
    one.enter(Epoch("first", "another run"))
    assert received(one, entries) == []
    assert one.counts.gaps == 0


def test_records_of_one_that_started_again_are_received() -> None:
    before, _ = state()
    before.publish("a", [1, 2, 3, 4], 0)
    raws = [record.raw for batch in batches(before) for record in batch.records]
    after, _ = state()
    assert received(after, [(1, raws[0])]) == [[1, 2, 3, 4]]


def test_a_purge_clears_one_tenant_everywhere() -> None:
    one, purged = state()
    received(one, published([1, 2, 3, 4]))
    received(one, published([5, 6, 7, 8], tenant="b"), "b")
    for tenant in ("a", "b"):
        one.publish(tenant, [9, 10, 11, 12], 0)
    one.learn({"a": NOW})
    assert (purged, one.generation("a"), one.generation("b")) == (["a"], NOW, 0)
    assert [tenant for tenant, _, _ in one.replay()] == ["b"]
    assert [batch.tenant for batch in batches(one)] == ["b"]
    one.publish("a", [1, 2, 3, 4], 0)
    assert one.counts.dropped == {"purged": 2}
    # It is told once, and an older one says nothing.
    one.learn({"a": NOW})
    one.learn({"a": NOW - 1})
    assert purged == ["a"]


def test_what_was_made_before_a_purge_is_not_written_after() -> None:
    one, _ = state()
    one.publish("a", [1, 2, 3, 4], 0)
    one.publish("b", [1, 2, 3, 4], 0)
    batches(one)
    one.learn({"a": NOW})
    batch = one.next_batch()
    assert batch is not None
    assert batch.tenant == "b"
    assert one.counts.dropped == {"purged": 1}


def test_what_is_written_while_it_is_purged_is_not_remembered() -> None:
    one, _ = state()
    one.publish("a", [1, 2, 3, 4], 0)
    batches(one)
    batch = one.next_batch()
    assert batch is not None
    one.learn({"a": NOW})
    one.settled(batch)
    assert list(one.replay()) == []


def test_after_a_purge_dead_records_are_skipped_and_those_since_are_received_again() -> None:
    one, _ = state()
    new = published([5, 6, 7, 8], generation=NOW)
    # A record since the purge comes before its tombstone: the receiver forgets it with all others.
    assert received(one, new) == [[5, 6, 7, 8]]
    one.learn({"a": NOW})
    assert received(one, [*published([1, 2, 3, 4]), *new]) == [[5, 6, 7, 8]]
    assert one.counts.skipped == {"purged": 1}


def test_tombstones_that_redis_lacks_are_told_until_they_are_too_old() -> None:
    one, _ = state(retention_seconds=100)
    one.learn({"a": NOW, "b": NOW - 50_000})
    assert one.lacking({"a": NOW, "b": NOW - 50_000}) == {}
    assert one.lacking({"b": NOW - 60_000}) == {"a": NOW, "b": NOW - 50_000}
    one.set_clock(NOW + 60_000)
    assert one.lacking({}) == {"a": NOW}
    one.set_clock(NOW + 160_000)
    # It may be kept for longer than text is here: then it is known here as long, and told but once.
    assert one.lacking({"a": NOW}) == {}
    assert one.generation("a") == NOW
    assert one.lacking({}) == {}
    assert one.generation("a") == 0


def test_what_is_too_old_is_neither_received_nor_written_nor_remembered() -> None:
    one, _ = state(retention_seconds=100)
    old = published([1, 2, 3, 4])
    received(one, old)
    one.publish("a", [5, 6, 7, 8], 0)
    batches(one)
    one.set_clock(NOW + 101_000)
    assert one.next_batch() is None
    assert list(one.replay()) == []
    assert one.counts.dropped == {"expired": 1}
    assert received(one, published([1, 2, 3, 4], tenant="b"), "b") == []
    assert one.counts.skipped == {"expired": 1}


def test_only_a_redis_that_lost_all_is_filled_again() -> None:
    one, _ = state()
    entries = published([1, 2, 3, 4], [5, 6, 7, 8], [9, 10, 11, 12])
    received(one, entries)
    one.publish("c", [1, 2, 3, 4], 0)
    batches(one)
    settle(one)
    one.enter(Epoch("first", "another run"))
    assert not one.refill_due
    # Before a full Redis could be given an epoch, nothing is filled; then all but what is there already.
    one.enter(Epoch("", "a third run"))
    assert not one.refill_due
    one.enter(Epoch("second", "a third run"))
    assert one.refill_due
    received(one, [(1, entries[0][1])])
    lost = one.lost()
    assert [(record.tenant, decode(record.raw, VOCABULARY).outputs) for _, record in lost] == [  # type: ignore[union-attr]
        ("a", (array("i", [5, 6, 7, 8]),)),
        ("a", (array("i", [9, 10, 11, 12]),)),
        ("c", (array("i", [1, 2, 3, 4]),)),
    ]
    one.refilled(lost, 1)
    assert one.counts.refilled_records == 1
    assert [decode(record.raw, VOCABULARY).outputs[0][0] for _, record in one.lost()] == []  # type: ignore[union-attr]


def test_what_is_dead_or_too_old_is_not_filled_again() -> None:
    one, _ = state(retention_seconds=100)
    received(one, published([1, 2, 3, 4]))
    received(one, published([1, 2, 3, 4], tenant="b"), "b")
    one.enter(Epoch("second", "run"))
    one.learn({"a": NOW})
    assert [record.tenant for _, record in one.lost()] == ["b"]
    one.set_clock(NOW + 101_000)
    assert one.lost() == []


def test_those_longest_not_needed_are_let_go() -> None:
    one, _ = state()
    one.need("first")
    for number in range(MAX_FOLLOWED - 1):
        assert one.need(str(number))
    assert not one.need("first")
    one.need("another")
    assert len(one.followed) == MAX_FOLLOWED
    assert "first" in one.followed
    assert "0" not in one.followed
    assert not one.need("not/ours")


def test_one_that_was_let_go_is_read_on_where_it_was() -> None:
    """And from the beginning where it was purged, or Redis is another one."""
    one, _ = state()
    entries = published([1, 2, 3, 4], [5, 6, 7, 8])
    received(one, entries)
    for again in ("kept", "purged", "moved"):
        for number in range(MAX_FOLLOWED):
            one.need(f"{again}-{number}")
        assert "a" not in one.followed
        if again == "purged":
            one.learn({"a": NOW})
        if again == "moved":
            one.enter(Epoch("second", "run"))
        one.need("a")
        assert one.followed["a"].position == (2 if again == "kept" else 0)
        one.followed["a"].passed(7, None)


def test_outputs_of_other_days_are_told_apart() -> None:
    one, _ = state(retention_seconds=700_000)
    old, _ = state()
    old.set_clock(NOW - 600_000_000)
    old.publish("a", [1, 2, 3, 4], 0)
    batches(old)
    entries = [(1, old.pending[0].records[0].raw), *((2, raw) for _, raw in published([5, 6, 7, 8]))]
    one.need("a")
    found = one.receive(one.followed["a"], judge(entries, VOCABULARY))
    written = [when for _, when in found]
    assert [[list(output) for output in outputs] for outputs, _ in found] == [[[1, 2, 3, 4]], [[5, 6, 7, 8]]]
    assert written[1] - written[0] == pytest.approx(600_000, abs=2)


def test_what_is_too_old_is_not_remembered() -> None:
    one, _ = state(retention_seconds=3600)
    received(one, published([1, 2, 3, 4]))
    assert len(one.memory) == 1
    one.set_clock(NOW + 1_000_000)
    received(one, published([5, 6, 7, 8], tenant="b"), "b")
    one.set_clock(NOW + 3_700_000)
    one.memory.outlive(one.oldest())
    assert len(one.memory) == 0


def test_those_that_are_too_old_go_whoever_comes_first() -> None:
    memory = Memory(10_000)
    for number, created in enumerate([5, 1, 6, 2, 3]):
        memory.put(number, Remembered("a", 0, created, bytes(10), "e"))
    memory.outlive(3)
    assert [number for number, _ in memory.items()] == [0, 2, 4]


@pytest.mark.parametrize("ahead", [1000, 10 * 365 * 86_400_000])
def test_what_was_written_while_the_clock_was_ahead_is_as_new_as_now(ahead: int) -> None:
    (reader, _), (other, _) = state(), state()
    other.set_clock(NOW + ahead)
    other.publish("a", [1, 2, 3, 4], 0)
    (batch,) = batches(other)
    reader.need("a")
    cursor = reader.followed["a"]
    entry = ((NOW + ahead) << 64, batch.records[0].raw)
    ((_, written),) = reader.receive(cursor, judge([entry], VOCABULARY))
    assert written == pytest.approx(NOW / 1000, abs=2)
    ((_, _, told),) = reader.replay()
    assert told == written
    # Its id does not tell when it is too old: it goes at once, or, where the clock was hardly ahead, in time.
    assert cursor.overdue(NOW) == ([entry[0]] if ahead > 1000 else [])
    reader.set_clock(NOW + 1000 * reader.options.retention_seconds + 5000)
    assert list(reader.replay()) == []
    assert reader.lost() == []
    # Own records too.
    reader.set_clock(NOW + ahead)
    reader.publish("b", [5, 6, 7, 8], 0)
    batches(reader)
    reader.set_clock(NOW)
    settle(reader)
    assert max(record.created for record in reader.memory.values()) <= NOW + 10
