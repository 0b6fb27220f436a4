"""Who may claim a Lease and who must stop, told by times that the test makes up."""

from __future__ import annotations

from datetime import UTC, datetime, timedelta
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from outrider_operator.lease import Election, Timing, claim, release

Object = dict[str, Any]

TIMING = Timing(15)
MOMENT = datetime(2026, 1, 2, 3, 4, 5, 678, tzinfo=UTC)


def held(by: str, renewed: str = "t0", **more: Any) -> Object:
    spec = {"holderIdentity": by, "renewTime": renewed, "leaseDurationSeconds": 15, **more}
    return {"metadata": {"name": "l", "namespace": "ns", "resourceVersion": "7"}, "spec": spec}


class TestClaim:
    def test_where_there_is_none_it_is_claimed(self) -> None:
        assert Election("me", TIMING).may_claim(None, 0)

    def test_one_that_was_deleted_may_still_be_thought_held(self) -> None:
        election = Election("me", TIMING)
        assert not election.may_claim(held("other"), 100)
        assert not election.may_claim(None, 114)
        assert election.may_claim(None, 115.1)
        election.may_claim(held("ghost", leaseDurationSeconds=2**31 - 1), 150)
        assert election.may_claim(None, 166)  # deleting one that lasts for ever is the way out
        election.may_claim(held(""), 200)
        assert election.may_claim(None, 201)

    def test_one_given_back_is_claimed_at_once(self) -> None:
        assert Election("me", TIMING).may_claim(held(""), 0)

    def test_that_of_the_same_pod_is_claimed_at_once(self) -> None:
        assert Election("me", TIMING).may_claim(held("me"), 0)

    def test_another_ones_only_once_it_was_unchanged_for_its_time(self) -> None:
        election = Election("me", TIMING)
        assert not election.may_claim(held("other"), 100)
        assert not election.may_claim(held("other"), 115)
        assert election.may_claim(held("other"), 115.1)

    def test_a_renewal_begins_the_wait_anew(self) -> None:
        election = Election("me", TIMING)
        election.may_claim(held("other"), 0)
        assert not election.may_claim(held("other", "t1"), 14)
        assert not election.may_claim(held("other", "t1"), 16)
        assert election.may_claim(held("other", "t1"), 29.1)

    def test_the_holders_own_duration_counts(self) -> None:
        election = Election("me", TIMING)
        election.may_claim(held("other", leaseDurationSeconds=60), 0)
        assert not election.may_claim(held("other", leaseDurationSeconds=60), 59)


class TestHolding:
    def test_it_counts_from_before_the_renewal_was_asked_for(self) -> None:
        election = Election("me", TIMING)
        assert not election.holds(0)
        election.renewed(100)
        assert election.holds(109.9)
        assert not election.holds(110)
        election.renewed(109)
        assert election.holds(118)

    def test_what_another_has_is_not_held(self) -> None:
        election = Election("me", TIMING)
        election.renewed(100)
        election.lost()
        assert not election.holds(100)

    def test_there_is_time_for_several_tries(self) -> None:
        for seconds in (6, 15, 60):
            timing = Timing(seconds)
            assert timing.renew_every + 2 * timing.retry_every < timing.deadline < timing.lease


@given(
    renewals=st.lists(st.floats(0.1, 12), max_size=8),
    looks=st.lists(st.floats(0.1, 4), min_size=1, max_size=40),
    skew=st.floats(-1e6, 1e6),
    delay=st.floats(0, 2),
)
def test_two_never_hold_it_at_once(
    renewals: list[float], looks: list[float], skew: float, delay: float
) -> None:
    """However far apart the clocks are: the waiting one claims only after the holder has stopped.

    A renewal is asked for at one moment and seen by others at most `delay` later.
    """
    holder, waiting = Election("a", TIMING), Election("b", TIMING)
    asked = 0.0
    holder.renewed(asked)
    moments = [asked]
    for pause in renewals:
        if not holder.holds(asked + pause):
            break
        asked += pause
        holder.renewed(asked)
        moments.append(asked)
    now = 0.0
    for pause in looks:
        now += pause
        seen = max((moment for moment in moments if moment + delay <= now), default=None)
        if seen is None:
            continue
        if waiting.may_claim(held("a", f"t{seen}"), now + skew):
            assert not holder.holds(now)
            assert now >= moments[-1] + TIMING.lease
            return


class TestDocuments:
    def test_a_new_one(self) -> None:
        made = claim(None, "l", "ns", "me", 15, MOMENT)
        assert made["metadata"] == {"name": "l", "namespace": "ns"}
        assert made["spec"] == {
            "holderIdentity": "me",
            "leaseDurationSeconds": 15,
            "acquireTime": "2026-01-02T03:04:05.000678Z",
            "renewTime": "2026-01-02T03:04:05.000678Z",
            "leaseTransitions": 0,
        }

    def test_a_renewal_keeps_since_when(self) -> None:
        first = claim(None, "l", "ns", "me", 15, MOMENT)
        again = claim(first, "l", "ns", "me", 15, MOMENT + timedelta(seconds=3))
        assert again["spec"]["acquireTime"] == first["spec"]["acquireTime"]
        assert again["spec"]["renewTime"] == "2026-01-02T03:04:08.000678Z"
        assert again["spec"]["leaseTransitions"] == 0

    def test_a_takeover_is_counted_and_guarded_by_the_version_that_was_read(self) -> None:
        taken = claim(held("other", leaseTransitions=4), "l", "ns", "me", 15, MOMENT)
        assert taken["metadata"]["resourceVersion"] == "7"
        assert taken["spec"]["holderIdentity"] == "me"
        assert taken["spec"]["leaseTransitions"] == 5
        assert taken["spec"]["acquireTime"] == "2026-01-02T03:04:05.000678Z"

    def test_one_given_back_has_no_holder(self) -> None:
        back = release(held("me"), MOMENT)
        assert back["spec"]["holderIdentity"] == ""
        assert Election("other", TIMING).may_claim(back, 0)
