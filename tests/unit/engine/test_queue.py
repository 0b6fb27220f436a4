"""The waiting room: who goes next, who is refused, and what a refused one is told."""

from __future__ import annotations

from contextlib import suppress

import pytest

from outrider_serving.engine.schedule.queue import OUTPUT_WEIGHT, PROMPT_WEIGHT, FairQueue
from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.types import QueueFullError
from unit.engine.simulation import request


class Room(FairQueue):
    """A queue whose arrivals are numbered, with no place free and a clock that stands still by default."""

    arrivals = 0

    def arrive(self, tenant: str, places: int = 0, now: float = 0.0) -> Sequence:
        sequence = Sequence(request(str(self.arrivals), tenant=tenant), self.arrivals)
        self.put(sequence, places, now)
        self.arrivals += 1
        return sequence

    def next(self) -> Sequence:
        sequence = self.head(lambda _: False)
        assert sequence is not None
        self.take(sequence)
        return sequence


def test_one_tenant_is_served_in_the_order_of_arrival() -> None:
    room = Room(10)
    arrived = [room.arrive("") for _ in range(4)]
    assert [room.next() for _ in range(4)] == arrived
    assert room.head(lambda _: False) is None


def test_the_tenant_that_was_served_least_goes_next() -> None:
    room = Room(10)
    a, b = room.arrive("a"), room.arrive("b")
    room.charge("a", prompt=1)
    assert room.next() is b
    assert room.next() is a


def test_of_equal_tenants_the_first_to_come_goes_next() -> None:
    room = Room(10)
    arrived = [room.arrive(tenant) for tenant in "cab"]
    assert [room.next() for _ in range(3)] == arrived


def test_output_costs_more_than_prompt() -> None:
    room = Room(20)
    for tenant in "ab":
        room.arrive(tenant)
    room.charge("a", prompt=OUTPUT_WEIGHT)
    room.charge("b", output=PROMPT_WEIGHT)
    room.charge("b", prompt=1)
    assert room.next().request.tenant == "a"


def test_tenants_that_wait_get_equal_service_whatever_they_send() -> None:
    room, served = Room(40), {"a": 0, "b": 0}
    for tenant in "aaaaaaaaaab":
        room.arrive(tenant)
    for _ in range(300):
        sequence = room.next()
        tenant = sequence.request.tenant
        cost = 30 if tenant == "a" else 10
        room.charge(tenant, output=cost)
        served[tenant] += cost
        room.arrive(tenant)
        room.ended(sequence, 0.0)
    assert abs(served["a"] - served["b"]) <= 30


def test_a_tenant_does_not_save_up_while_it_is_away() -> None:
    room = Room(20)
    away = room.arrive("a")
    room.remove(away)
    for _ in range(4):
        room.arrive("b")
    room.charge("b", output=1000)
    for _ in range(4):
        room.arrive("a")
    turns = []
    for _ in range(4):
        turns.append(room.next().request.tenant)
        room.charge(turns[-1], output=1)
    assert sorted(turns) == ["a", "a", "b", "b"]


def test_a_tenant_does_not_lose_its_debt_by_going_away() -> None:
    room = Room(20)
    room.arrive("b")
    gone = room.arrive("a")
    room.charge("a", output=10)
    room.remove(gone)
    room.arrive("a")
    for _ in range(3):
        room.arrive("b")
    assert [room.next().request.tenant for _ in range(5)] == ["b", "b", "b", "b", "a"]


def test_nobody_saves_up_while_all_are_away() -> None:
    room = Room(20)
    only = room.arrive("a")
    room.charge("a", output=1000)
    room.remove(only)
    for tenant in "bbbaaa":
        room.arrive(tenant)
    turns = []
    for _ in range(4):
        turns.append(room.next().request.tenant)
        room.charge(turns[-1], output=1)
    assert turns == ["b", "a", "b", "a"], "b came when nobody was there, and began where a had left"


def test_a_tenant_that_only_runs_is_there() -> None:
    room = Room(20)
    room.arrive("a")
    room.next()
    room.charge("a", output=1000)
    room.arrive("b")
    room.charge("b", output=1)
    room.arrive("a")
    assert room.next().request.tenant == "a", "b came while a ran, so it began where a was"


def test_a_preempted_sequence_goes_before_later_ones_of_its_tenant() -> None:
    room = Room(20)
    first = room.arrive("")
    assert room.next() is first
    room.arrive("")
    room.put_back(first)
    assert room.next() is first


def test_who_is_held_back_is_passed_over_and_keeps_its_turn() -> None:
    room = Room(20)
    first, second, other = room.arrive("a"), room.arrive("a"), room.arrive("b")
    assert room.head(lambda sequence: sequence is first) is second
    assert room.head(lambda sequence: sequence.request.tenant == "a") is other
    assert room.head(lambda _: True) is None
    assert room.next() is first


def test_the_anonymous_tenant_alone_may_have_all_of_the_room() -> None:
    room = Room(4)
    for _ in range(4):
        room.arrive("")
    with pytest.raises(QueueFullError) as refused:
        room.arrive("")
    assert (refused.value.waiting, refused.value.limit) == (4, 4)


def test_those_that_find_a_place_at_once_do_not_wait() -> None:
    room = Room(2)
    for _ in range(7):
        room.arrive("", places=5)
    with pytest.raises(QueueFullError) as refused:
        room.arrive("", places=5)
    assert (refused.value.waiting, refused.value.limit) == (2, 2)


def test_a_tenant_alone_may_have_all_places() -> None:
    room = Room(2)
    for _ in range(5):
        room.arrive("a", places=5)


def test_with_no_room_at_all_only_places_are_given() -> None:
    room = Room(0)
    room.arrive("", places=1)
    with pytest.raises(QueueFullError):
        room.arrive("", places=1)


def test_a_flood_of_one_tenant_leaves_half_of_the_room() -> None:
    room = Room(8)
    for _ in range(4):
        room.arrive("a")
    with pytest.raises(QueueFullError) as refused:
        room.arrive("a")
    assert (refused.value.waiting, refused.value.limit) == (4, 4)
    room.arrive("b")


def test_floods_of_many_tenants_leave_room_for_one_more() -> None:
    room = Room(16)
    for tenant in "abc" * 16:
        with suppress(QueueFullError):
            room.arrive(tenant)
    with pytest.raises(QueueFullError):
        room.arrive("a")
    room.arrive("d")


def test_the_anonymous_tenant_has_a_share_like_others_while_there_are_others() -> None:
    room = Room(8)
    room.arrive("a")
    for _ in range(4):
        room.arrive("")
    with pytest.raises(QueueFullError):
        room.arrive("")


def test_a_preempted_sequence_is_never_refused_but_takes_room() -> None:
    room = Room(1)
    running = room.arrive("")
    room.next()
    room.arrive("")
    room.put_back(running)
    assert len(room) == 2
    with pytest.raises(QueueFullError):
        room.arrive("", places=1)


def refusal(room: Room, now: float) -> int:
    with pytest.raises(QueueFullError) as refused:
        room.arrive("", now=now)
    return refused.value.retry_after


def test_a_refused_one_is_told_when_as_many_have_ended_as_wait() -> None:
    room = Room(12)
    for _ in range(12):
        room.arrive("")
    for second in range(3):
        room.ended(room.next(), second)
        room.arrive("")
    assert refusal(room, now=2.0) == 12, "one ends each second"


@pytest.mark.parametrize(("pause", "told"), [(0.001, 1), (1000.0, 60)])
def test_a_refused_one_is_told_a_time_within_bounds(pause: float, told: int) -> None:
    room = Room(3)
    for _ in range(3):
        room.arrive("")
    for end in range(2):
        room.ended(room.next(), end * pause)
        room.arrive("")
    assert refusal(room, now=pause) == told


def test_without_ends_a_refused_one_is_told_the_least_time() -> None:
    room = Room(1)
    room.arrive("")
    assert refusal(room, now=5.0) == 1


def test_idle_times_do_not_count_as_slowness() -> None:
    room = Room(4)
    room.arrive("")
    room.ended(room.next(), 0.0)
    for _ in range(4):
        room.arrive("", now=1000.0)
    for end in (1000.0, 1001.0):
        room.ended(room.next(), end)
        room.arrive("", now=end)
    assert refusal(room, now=1001.0) == 4
