"""Two operators at once: one works, the other waits, and no moment has two that write.

Both are processes of this machine with service accounts of their own, so that the API server's audit log
tells who wrote what.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta

import pytest

from cluster import audit
from cluster.faultproxy import Call, FaultProxy, Side
from cluster.operated import eventually, model
from cluster.operators import ACCOUNT, HostOperator, Operators, operators
from cluster_fixture import LocalCluster
from conftest import LONG
from outrider_local import release

NAMESPACE = "copies-tests"
LEASE_SECONDS = 15 if LONG else 6
FLAGS = ("--resync-seconds=3", "--progress-seconds=0.5", f"--lease-seconds={LEASE_SECONDS}")
IN_FLIGHT = timedelta(seconds=0.5)
"""What a stopped process had sent before may take as long as this to reach the API server's log."""


class Copy:
    """One of the two: its process, its proxy, and its account as the audit log knows it."""

    def __init__(self, made: Operators, name: str) -> None:
        self.account = made.copy_account(f"{name}-operator")
        self.proxy: FaultProxy = made.proxy()
        self.process: HostOperator = made.operator(
            name, self.proxy, *FLAGS, account=self.account, identity=name
        )
        self.name = name
        self._cluster = made.cluster

    def requests(self, since: datetime) -> list[audit.Record]:
        """What it asked for since then, by the audit log."""
        return [
            record
            for record in audit.of_operator(audit.records(self._cluster.settings), release.NAMESPACE)
            if record.account[1] == self.account and record.received >= since
        ]

    def writes(self, since: datetime) -> list[audit.Record]:
        """What it changed since then, Leases apart."""
        return [r for r in self.requests(since) if r.writes and r.resource != "leases"]


class Pair:
    """Two copies, started and ended by each test as it needs them."""

    def __init__(self, made: Operators) -> None:
        self.operators = made
        self.a, self.b = Copy(made, "a"), Copy(made, "b")

    def holder(self) -> str:
        lease = self.operators.cluster.get("lease", ACCOUNT, release.NAMESPACE)
        return str(lease.get("spec", {}).get("holderIdentity") or "")

    def await_holder(self, copy: Copy, seconds: float) -> float:
        """Wait until it holds the Lease; how many seconds that took."""
        began = time.monotonic()
        eventually(lambda: self.holder() == copy.name, seconds, self.logs)
        return time.monotonic() - began

    def logs(self) -> str:
        return "\n".join(f"{copy.name}:\n{copy.process.log[-3000:]}" for copy in (self.a, self.b))

    def await_waiting(self, copy: Copy, since: datetime) -> None:
        """Wait until it stands by: it has looked at the Lease."""
        eventually(lambda: any(r.resource == "leases" for r in copy.requests(since)), 20)

    def change(self) -> None:
        """Delete a child, and wait until whoever works has brought it back."""
        before = self.operators.get("service", "kept")["metadata"]["uid"]
        self.operators.kubectl("delete", "service", "kept")

        def back() -> bool:
            found = self.operators.get("service", "kept")
            return bool(found) and found["metadata"]["uid"] != before

        eventually(back, 20)

    def reset(self) -> None:
        """No process, no fault and no Lease."""
        for copy in (self.a, self.b):
            copy.process.end()
            copy.proxy.hook = None
            copy.proxy.heal()
        self.operators.cluster.kubectl(
            "delete", "lease", ACCOUNT, f"--namespace={release.NAMESPACE}", "--ignore-not-found"
        )


@pytest.fixture(scope="module")
def both(cluster: LocalCluster) -> Iterator[Pair]:
    with operators(cluster, NAMESPACE) as made:
        pair = Pair(made)
        made.apply(model("kept", replicas=0))
        yield pair
        pair.reset()


@pytest.fixture
def pair(both: Pair) -> Pair:
    """A works on a settled resource."""
    both.reset()
    both.a.process.start()
    both.await_holder(both.a, 20)
    both.operators.await_reason("kept", "ScaledToZero", 20)
    return both


def now() -> datetime:
    return datetime.now(UTC)


def test_one_waits_and_takes_over_at_once_from_one_that_leaves_and_in_time_from_one_that_dies(
    pair: Pair,
) -> None:
    began = now()
    pair.b.process.start()
    pair.await_waiting(pair.b, began)
    pair.change()
    time.sleep(1)
    assert pair.a.writes(began)
    asked = {(r.verb, r.resource) for r in pair.b.requests(began)}
    assert asked <= {("get", "leases"), ("get", "")}, "one that waits looks at the Lease, and at /apis"

    left = now()
    pair.a.process.signal(signal.SIGTERM)
    took = pair.await_holder(pair.b, 15)
    print(f"\nafter SIGTERM: taken over in {took:.1f} s (Lease of {LEASE_SECONDS} s)")
    assert took < 3
    assert pair.a.process.wait(10) == 0
    pair.change()
    assert pair.b.writes(left)

    pair.a.process.start()
    pair.await_waiting(pair.a, left + timedelta(seconds=took))
    died = now()
    pair.b.process.kill()
    took = pair.await_holder(pair.a, 30)
    print(f"after SIGKILL: taken over in {took:.1f} s")
    pair.change()
    _check_apart(pair, began)
    assert all(r.received < died + IN_FLIGHT for r in pair.b.requests(began))


@pytest.mark.parametrize("side", list(Side), ids=lambda side: side.value)
def test_one_that_is_stopped_past_its_lease_and_goes_on_writes_nothing_more(pair: Pair, side: Side) -> None:
    """Stopped between two writes of one pass, so that it wants to go on writing the moment it goes on."""
    name = f"stopped-{side.value}"
    began = now()
    pair.b.process.start()
    pair.await_waiting(pair.b, began)
    stopped: list[datetime] = []

    def stop(call: Call, at: Side) -> bool:
        if call.resource == "configmaps" and at is side and not stopped:
            pair.a.process.signal(signal.SIGSTOP)
            stopped.append(now())
        return True

    pair.a.proxy.hook = stop
    pair.operators.apply(model(name, replicas=0))
    eventually(lambda: stopped, 20)
    took = pair.await_holder(pair.b, 30)
    print(f"\nafter SIGSTOP: taken over in {took:.1f} s")
    pair.operators.await_reason(name, "ScaledToZero", 20)  # b has finished what a began
    pair.operators.kubectl("delete", "service", name, "--wait=false")  # a's watches have that to say, too
    pair.a.process.signal(signal.SIGCONT)
    assert pair.a.process.wait(10) == 1
    pair.change()
    after = [r for r in pair.a.requests(stopped[0] + IN_FLIGHT) if r.writes]
    assert [(r.verb, r.uri) for r in after] == []
    assert pair.a.writes(began), "it wrote before"
    _check_apart(pair, began)
    assert pair.holder() == pair.b.name


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_one_that_cannot_renew_ends_before_its_lease_does(pair: Pair, fault: str) -> None:
    time.sleep(1)
    getattr(pair.a.proxy, fault)()
    status = pair.a.process.wait(LEASE_SECONDS + 5)
    ended = now()
    lease = pair.operators.cluster.get("lease", ACCOUNT, release.NAMESPACE)["spec"]
    renewed = datetime.fromisoformat(lease["renewTime"])
    print(f"\nended {(ended - renewed).total_seconds():.1f} s after it renewed the last time")
    assert status == 1
    assert (ended - renewed).total_seconds() < lease["leaseDurationSeconds"]
    assert "was not renewed" in pair.a.process.log


@pytest.mark.parametrize("fault", ["refuse", "hang"])
def test_one_that_is_told_to_end_while_the_api_server_is_away_ends_in_time(pair: Pair, fault: str) -> None:
    """Well within its pod's grace period of 15 s: while it works, and while it has not even begun."""
    for copy in (pair.a, pair.b):
        getattr(copy.proxy, fault)()
    pair.b.process.start()
    eventually(lambda: pair.b.process.heeds_signals, 20, pair.logs)
    told = time.monotonic()
    for copy in (pair.a, pair.b):
        copy.process.signal(signal.SIGTERM)
    assert pair.b.process.wait(10) == 0
    assert pair.a.process.wait(10) in (0, 1)  # 1: meanwhile its Lease ran out
    took = time.monotonic() - told
    print(f"\nended within {took:.1f} s")
    assert took < 10


def _check_apart(pair: Pair, since: datetime) -> None:
    """By the audit log: every write lies within a time in which its writer alone held the Lease."""
    claims = [
        (record.staged, copy.name)
        for copy in (pair.a, pair.b)
        for record in copy.requests(since - timedelta(seconds=60))
        if record.resource == "leases" and record.writes and record.code in (200, 201)
    ]
    claims.sort()
    writes = [(record, copy.name) for copy in (pair.a, pair.b) for record in copy.writes(since)]
    assert writes
    for record, name in writes:
        last = [holder for at, holder in claims if at <= record.received][-1]
        assert last == name, f"{name} wrote {record.uri} at {record.received}, when {last} held the Lease"
