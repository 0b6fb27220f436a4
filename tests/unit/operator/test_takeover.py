"""Takeover in place: single steps as a table, and whole ones in a cluster that moves in any order."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_operator.takeover import Fleet, in_place


def fleet(replicas: int, available: int | None = None, *, leaving: int = 0) -> Fleet:
    """A Deployment that has as many pods as it is told to run."""
    serving = replicas if available is None else available
    return Fleet(replicas=replicas, available=serving, active=replicas, leaving=leaving)


NONE = Fleet()


@pytest.mark.parametrize(
    ("wanted", "old", "new", "kept", "given"),
    [
        # One after the other.
        (2, {"a": fleet(2)}, NONE, {"a": 1}, 0),
        (2, {"a": fleet(1, leaving=1)}, NONE, {"a": 1}, 0),
        (2, {"a": fleet(1)}, NONE, {"a": 1}, 1),
        (2, {"a": fleet(1)}, fleet(1, 0), {"a": 1}, 1),
        (2, {"a": fleet(1)}, fleet(1), {"a": 0}, 1),
        (2, {"a": fleet(0, leaving=1)}, fleet(1), {"a": 0}, 1),
        (2, {"a": fleet(0)}, fleet(1), {"a": 0}, 2),
        # With one replica there is a gap.
        (1, {"a": fleet(1)}, NONE, {"a": 0}, 0),
        # A replica less, more, or none, halfway.
        (2, {"a": fleet(3)}, fleet(1), {"a": 0}, 1),
        (2, {"a": fleet(3)}, fleet(1, 0), {"a": 1}, 1),
        (5, {"a": fleet(1)}, fleet(1, 0), {"a": 1}, 4),
        (0, {"a": fleet(3)}, fleet(1), {"a": 0}, 0),
        # What does not serve goes first, and of what serves no more than one.
        (2, {"a": fleet(2), "b": fleet(2, 0)}, NONE, {"a": 1, "b": 0}, 0),
        (2, {"a": fleet(1, 0), "b": fleet(1)}, NONE, {"a": 0, "b": 1}, 0),
        (3, {"a": fleet(3, 2)}, NONE, {"a": 2}, 0),
        (2, {"a": fleet(1), "b": fleet(2, 1)}, NONE, {"a": 0, "b": 1}, 0),
        # New pods from before, when they could start beside the old ones, wait no more than there is room.
        (3, {"a": fleet(3)}, fleet(3, 0), {"a": 2}, 1),
        (3, {"a": fleet(3)}, fleet(3, 2), {"a": 0}, 3),
        # A new pod on its way out has its room until it is gone; one that stands beside it stays.
        (2, {"a": fleet(1)}, Fleet(replicas=1, leaving=1), {"a": 1}, 0),
        (2, {"a": fleet(1)}, fleet(1, 0, leaving=1), {"a": 1}, 1),
        # An old pod that is being replaced on another node takes room, but no new one with it.
        (2, {"a": fleet(1, leaving=1)}, fleet(1), {"a": 0}, 1),
    ],
)
def test_one_step(
    wanted: int, old: Mapping[str, Fleet], new: Fleet, kept: dict[str, int], given: int
) -> None:
    shares = in_place(wanted, old, new)
    assert (dict(shares.old), shares.new) == (kept, given)


def test_room_that_is_held_by_pods_of_others_is_not_given() -> None:
    assert in_place(2, {"a": fleet(1)}, NONE, held=1).new == 0
    assert in_place(2, {}, fleet(1), held=1).new == 1


@dataclass
class Deployment:
    """As its controller and the kubelet move it."""

    replicas: int
    starting: int = 0
    serving: int = 0
    leaving: int = 0
    good: bool = True

    @property
    def active(self) -> int:
        return self.starting + self.serving

    @property
    def fleet(self) -> Fleet:
        return Fleet(self.replicas, self.serving, self.active, self.leaving)

    def sync(self) -> None:
        """What a ReplicaSet does: fill up, or take away, what does not serve first."""
        while self.active > self.replicas:
            self.starting, self.serving = (
                (self.starting - 1, self.serving) if self.starting else (0, self.serving - 1)
            )
            self.leaving += 1
        self.starting += max(0, self.replicas - self.active)

    def begin(self) -> None:
        if self.good and self.starting:
            self.starting, self.serving = self.starting - 1, self.serving + 1

    def end(self) -> None:
        self.leaving -= min(1, self.leaving)


@dataclass
class Cluster:
    """Old Deployments by name, and the new one."""

    wanted: int
    old: dict[str, Deployment]
    new: Deployment = field(default_factory=lambda: Deployment(0))

    @property
    def all(self) -> list[Deployment]:
        return [*self.old.values(), self.new]

    @property
    def pods(self) -> int:
        return sum(one.active + one.leaving for one in self.all)

    @property
    def serving(self) -> int:
        return sum(one.serving for one in self.all)

    def operate(self) -> None:
        shares = in_place(self.wanted, {n: d.fleet for n, d in self.old.items()}, self.new.fleet)
        for name, deployment in self.old.items():
            assert 0 <= shares.old[name] <= deployment.replicas
            deployment.replicas = shares.old[name]
        self.new.replicas = shares.new
        assert sum(one.replicas for one in self.all) <= self.wanted

    def move(self, step: str, which: int) -> None:
        deployment = self.all[which % len(self.all)]
        getattr(self if step == "operate" else deployment, step)()

    def settle(self) -> None:
        """All do their part in turn until nothing moves."""
        for _ in range(12 * (self.pods + self.wanted + 2)):
            self.operate()
            for deployment in self.all:
                deployment.sync()
                deployment.begin()
                deployment.end()


STEPS = st.lists(
    st.tuples(st.sampled_from(["operate", "operate", "sync", "begin", "end"]), st.integers(0, 3)),
    min_size=30,
    max_size=90,
)
COUNTS = st.integers(0, 4)
OLD = st.builds(
    lambda starting, serving, leaving: Deployment(starting + serving, starting, serving, leaving),
    COUNTS,
    COUNTS,
    st.integers(0, 2),
)
NEW = st.builds(Deployment, COUNTS, COUNTS, COUNTS, st.integers(0, 2), st.booleans())
STARTS = st.builds(Cluster, st.integers(0, 5), st.dictionaries(st.sampled_from("abc"), OLD, max_size=3), NEW)


@given(STARTS, st.lists(st.tuples(COUNTS, STEPS), max_size=3))
def test_pods_never_grow_beyond_what_is_wanted_and_it_ends(
    cluster: Cluster, course: list[tuple[int, list[tuple[str, int]]]]
) -> None:
    """From any start, whatever `replicas` becomes halfway, in any order of steps."""
    cluster.operate()
    for wanted, steps in course:
        cluster.wanted = wanted
        cluster.operate()
        for step, which in steps:
            before = cluster.pods
            cluster.move(step, which)
            assert cluster.pods <= max(before, cluster.wanted)
    cluster.new.good = True
    cluster.settle()
    assert (cluster.new.replicas, cluster.new.serving, cluster.pods) == (cluster.wanted,) * 3


@given(st.lists(st.integers(1, 3), min_size=1, max_size=3), st.booleans(), STEPS)
def test_one_pod_at_most_is_missing(counts: list[int], good: bool, steps: list[tuple[str, int]]) -> None:
    """While all old pods serve and `replicas` stays: also for ever, where the new pods never serve."""
    old = {str(number): Deployment(count, serving=count) for number, count in enumerate(counts)}
    cluster = Cluster(sum(counts), old, Deployment(0, good=good))
    for step, which in steps:
        cluster.move(step, which)
        assert cluster.serving >= cluster.wanted - 1
    cluster.settle()
    assert cluster.serving == (cluster.wanted if good else cluster.wanted - 1)
    assert cluster.pods == cluster.wanted
