"""What is reported of what is seen, and which events a transition makes."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import timedelta
from typing import Any

import pytest

from outrider_operator.events import Event, action_event, transition_events
from outrider_operator.observation import Observation, PodReport
from outrider_operator.plan import Apply, Delete, plan
from outrider_operator.report import SpeculativeModelStatus
from outrider_operator.status import is_settled, next_status
from unit.operator.builders import (
    CONFIG,
    MINIMAL,
    NOW,
    changed,
    crashed,
    hash_of,
    live_children,
    pod,
    report,
    resource,
    serving,
)

Object = dict[str, Any]


def status_of(seen: Observation, errors: tuple[str, ...] = ()) -> Object:
    return next_status(seen, plan(seen, CONFIG), errors)


def condition(status: Object, kind: str) -> Object:
    (found,) = [c for c in status["conditions"] if c["type"] == kind]
    return dict(found)


def summary(status: Object, kind: str = "Ready") -> tuple[str, str]:
    found = condition(status, kind)
    return found["status"], found["reason"]


def deployments(spec: Object) -> dict[tuple[str, str], Object]:
    return {key: child for key, child in live_children(spec).items() if key[0] == "Deployment"}


def with_status(seen: Observation, status: Object) -> Observation:
    return replace(seen, resource=seen.resource | {"status": status})


def starting(**status: Any) -> Observation:
    """The children exist; the one pod does not serve."""
    return replace(
        serving(),
        children=live_children(available=0),
        pods=(pod(ready=False, **status),),
        reports={},
    )


def test_all_serves() -> None:
    status = status_of(serving())
    assert summary(status) == ("True", "Serving")
    assert summary(status, "Available") == ("True", "Serving")
    assert summary(status, "Progressing") == ("False", "Complete")
    assert status["settings"] == {"generation": 1, "inForce": "stable", "reportedGeneration": 1}
    assert status["model"] == {"name": "m", "revision": "sha256:1", "dtype": "float32", "contextLength": 2048}
    assert (status["replicas"], status["readyReplicas"], status["proposer"]) == (1, 1, "ngram")
    assert status["selector"] == "outrider.dev/model=m"
    assert is_settled(status)


def test_nothing_is_written_for_columns_that_nothing_fills() -> None:
    assert not {"accepted", "attainment", "rollout"} & set(status_of(serving()))


def test_the_same_sight_gives_the_same_status_later() -> None:
    status = status_of(serving())
    later = replace(with_status(serving(), status), now=NOW + timedelta(hours=1))
    assert status_of(later) == status


def test_the_status_is_what_the_schema_says() -> None:
    status = status_of(serving())
    parsed = SpeculativeModelStatus.model_validate(status)
    assert parsed.model_dump(mode="json", by_alias=True, exclude_none=True) == status


def test_transition_time_moves_with_the_status_only() -> None:
    first = status_of(starting())
    later = NOW + timedelta(minutes=1)
    reason_changed = status_of(replace(with_status(starting(containerStatuses=PULLING), first), now=later))
    assert condition(reason_changed, "Ready")["reason"] != condition(first, "Ready")["reason"]
    assert condition(reason_changed, "Ready")["lastTransitionTime"] == "2030-01-02T03:04:05Z"
    turned = status_of(replace(with_status(serving(), first), now=later))
    assert condition(turned, "Ready")["lastTransitionTime"] == "2030-01-02T03:05:05Z"


def test_every_condition_names_the_observed_generation() -> None:
    status = status_of(serving(generation=9))
    assert status["observedGeneration"] == 9
    assert {c["observedGeneration"] for c in status["conditions"]} == {9}


def test_before_anything_exists() -> None:
    seen = Observation(resource=resource(), now=NOW)
    status = status_of(seen)
    assert summary(status) == ("False", "Reconciling")
    assert summary(status, "Available") == ("False", "NoPods")
    assert not is_settled(status)


def test_pods_are_starting() -> None:
    status = status_of(starting())
    assert summary(status) == ("False", "PodsStarting")
    assert condition(status, "Ready")["message"] == "0 of 1 pod ready"
    assert summary(status, "Progressing") == ("True", "PodsStarting")


PULLING = crashed(
    state={"waiting": {"reason": "ImagePullBackOff", "message": "Back-off: ErrImagePull: no such image"}}
)
LOOP = crashed(
    state={"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s restarting"}},
    restarts=3,
    last={"terminated": {"exitCode": 2, "reason": "Error", "message": "model 'x' was not found\n"}},
)
RUNS_AGAIN = crashed(state={"running": {}}, restarts=3, last=LOOP[0]["lastState"])
FIRST_CRASH = crashed(state={"terminated": {"exitCode": 137, "reason": "OOMKilled"}})
NO_SECRET = crashed(
    state={"waiting": {"reason": "CreateContainerConfigError", "message": 'secret "s" not found'}}
)
CREATING = crashed(state={"waiting": {"reason": "ContainerCreating"}})
UNSCHEDULABLE = [
    {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": "0/1 nodes"}
]


@pytest.mark.parametrize(
    ("pod_status", "reason", "message"),
    [
        ({"containerStatuses": PULLING}, "ImagePullBackOff", "image example/serving:1: no such image"),
        ({"containerStatuses": LOOP}, "CrashLoopBackOff", "exit code 2 (Error): model 'x' was not found"),
        ({"containerStatuses": RUNS_AGAIN}, "CrashLoopBackOff", "model 'x' was not found"),
        ({"containerStatuses": FIRST_CRASH}, "OOMKilled", "exit code 137 (OOMKilled)"),
        ({"containerStatuses": NO_SECRET}, "CreateContainerConfigError", 'secret "s" not found'),
        ({"conditions": UNSCHEDULABLE}, "Unschedulable", "0/1 nodes"),
        ({"phase": "Failed", "reason": "Evicted", "message": "low on disk"}, "Evicted", "low on disk"),
    ],
)
def test_ready_carries_the_containers_reason(pod_status: Object, reason: str, message: str) -> None:
    found = condition(status_of(starting(**pod_status)), "Ready")
    assert (found["status"], found["reason"]) == ("False", reason)
    assert message in found["message"]


@pytest.mark.parametrize(
    ("reason", "word"),
    [
        ("OutOfephemeral-storage", "OutOfephemeral_storage"),
        ("OutOfnvidia.com/gpu", "OutOfnvidia_com_gpu"),
        ("-Odd:", "Odd"),
        ("x" * 2000, "x" * 1024),
        ("…", "PodFailed"),
        ("", "PodFailed"),
    ],
)
def test_any_reason_fits_into_a_condition(reason: str, word: str) -> None:
    assert summary(status_of(starting(phase="Failed", reason=reason))) == ("False", word)


EVICTED = {"phase": "Failed", "reason": "Evicted", "message": "low on disk"}


@pytest.mark.parametrize("ended", [EVICTED, {"phase": "Succeeded"}])
def test_a_pod_that_ended_does_not_count_once_another_stands_in_for_it(ended: Object) -> None:
    seen = serving()
    gone = pod("a0", ready=False, **ended)
    assert status_of(replace(seen, pods=(gone, *seen.pods))) == status_of(seen)


def test_what_keeps_the_replacement_is_nearer_than_what_ended_the_first() -> None:
    seen = starting(containerStatuses=LOOP)
    gone = pod("a0", ready=False, **EVICTED)
    assert summary(status_of(replace(seen, pods=(gone, *seen.pods)))) == ("False", "CrashLoopBackOff")


def test_a_crash_loop_does_not_swing_with_its_restarts() -> None:
    assert status_of(starting(containerStatuses=LOOP)) == status_of(starting(containerStatuses=RUNS_AGAIN))


def test_a_pod_that_gets_no_container_says_why() -> None:
    seen = replace(
        starting(containerStatuses=CREATING), warnings={"p1": 'MountVolume: secret "tenants" not found'}
    )
    found = condition(status_of(seen), "Ready")
    assert found["reason"] == "PodNotStarting"
    assert 'secret "tenants" not found' in found["message"]
    assert summary(status_of(starting(containerStatuses=CREATING))) == ("False", "PodsStarting")


def test_a_deployment_that_may_not_make_pods_says_why() -> None:
    children = live_children(available=0)
    failure = {
        "type": "ReplicaFailure",
        "status": "True",
        "reason": "FailedCreate",
        "message": "exceeded quota",
    }
    children["Deployment", f"m-{hash_of()}"]["status"]["conditions"] = [failure]
    found = condition(status_of(replace(starting(), children=children, pods=())), "Ready")
    assert (found["reason"], found["message"]) == ("FailedCreate", "exceeded quota")


def test_past_the_deadline_it_no_longer_progresses() -> None:
    children = live_children(available=0)
    late = {
        "type": "Progressing",
        "status": "False",
        "reason": "ProgressDeadlineExceeded",
        "message": "timed out",
    }
    children["Deployment", f"m-{hash_of()}"]["status"]["conditions"] = [late]
    status = status_of(replace(starting(), children=children))
    assert summary(status, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert summary(status) == ("False", "ProgressDeadlineExceeded")


def test_while_an_old_deployment_serves_the_new_one_comes() -> None:
    old = changed(MINIMAL, "model.dtype", "float16")
    earlier = {key: child for key, child in live_children(old).items() if key[0] == "Deployment"}
    seen = replace(
        starting(containerStatuses=LOOP),
        children=live_children(available=0) | earlier,
        pods=(pod("p0", spec=old), pod(ready=False, containerStatuses=LOOP)),
        reports={"p0": report()},
    )
    status = status_of(seen)
    assert summary(status, "Available") == ("True", "Serving")
    assert summary(status) == ("False", "CrashLoopBackOff")
    assert status["replicas"] == 2
    assert status["readyReplicas"] == 1
    assert status["model"]["name"] == "m"


def test_scaled_to_zero_is_settled() -> None:
    none = changed(MINIMAL, "replicas", 0)
    status = status_of(serving(none))
    for kind in ("Ready", "Available", "Progressing"):
        assert summary(status, kind) == ("False", "ScaledToZero")
    assert is_settled(status)


def test_while_nothing_serves_the_wanted_proposer_is_shown() -> None:
    none = changed(MINIMAL, "replicas", 0)
    before = status_of(serving(none))
    assert before["proposer"] == "ngram"
    after = status_of(serving(changed(none, "proposer.method", "none"), status=before))
    assert after["proposer"] == "none"


class TestSettings:
    NEW = changed(MINIMAL, "proposer.method", "none")

    def seen(self, **reports: PodReport) -> Observation:
        new = serving(self.NEW)
        children = dict(new.children) | {
            ("ConfigMap", "m"): live_children(self.NEW, generation=2)["ConfigMap", "m"]
        }
        return replace(new, children=children, reports=reports or {"p0": report(2)})

    def test_pending_until_every_pod_reports_them(self) -> None:
        before = status_of(serving())
        status = status_of(with_status(self.seen(p0=report(1)), before))
        assert summary(status) == ("False", "SettingsPending")
        assert status["settings"] == {"generation": 2, "inForce": "stable", "reportedGeneration": 1}
        assert status["proposer"] == "ngram"

    def test_in_force(self) -> None:
        status = status_of(self.seen())
        assert summary(status) == ("True", "Serving")
        assert status["proposer"] == "none"

    def test_refused_by_a_pod(self) -> None:
        status = status_of(self.seen(p0=report(1, settings_error="unknown method")))
        assert summary(status) == ("False", "SettingsRefused")
        assert condition(status, "Ready")["message"] == "pod p0: unknown method"

    def test_refused_keys_have_a_condition_of_their_own(self) -> None:
        before = status_of(self.seen())
        status = status_of(self.seen(p0=report(2, keys_error="tenant b, line 2: it has spaces")))
        assert summary(status) == ("True", "Serving")
        assert condition(status, "KeysRefused")["message"] == "pod p0: tenant b, line 2: it has spaces"
        (event,) = transition_events(before, status)
        assert (event.type, event.reason) == ("Warning", "KeysRefused")
        assert list(transition_events(status, status)) == []
        assert all(found["type"] != "KeysRefused" for found in status_of(self.seen())["conditions"])

    def test_unknown_while_no_pod_ever_answered(self) -> None:
        status = status_of(self.seen(p0=PodReport(error="its admin port does not answer: ConnectTimeout")))
        assert summary(status) == ("False", "SettingsUnknown")
        assert "p0: its admin port does not answer" in condition(status, "Ready")["message"]
        assert "reportedGeneration" not in status["settings"]

    def test_a_pod_that_is_too_busy_to_answer_changes_nothing(self) -> None:
        before = status_of(self.seen())
        silent = self.seen(p0=PodReport(error="its admin port does not answer: ReadTimeout"))
        assert status_of(with_status(silent, before)) == before

    def test_a_silent_pod_beside_one_that_answers_has_what_it_had(self) -> None:
        two = changed(self.NEW, "replicas", 2)
        before = status_of(serving(changed(MINIMAL, "replicas", 2)))
        both = replace(serving(two), children=dict(self.seen().children) | deployments(two))
        for silent in ({}, {"p1": PodReport(error="its admin port does not answer: ReadTimeout")}):
            seen = replace(both, reports={"p0": report(2), **silent})
            status = status_of(with_status(seen, before))
            assert summary(status) == ("False", "SettingsPending")
            assert (status["settings"]["reportedGeneration"], status["proposer"]) == (1, "ngram")
            assert summary(status_of(seen)) == ("False", "SettingsUnknown")
        assert summary(status_of(replace(both, reports={"p0": report(2), "p1": report(2)})))[0] == "True"

    @pytest.mark.parametrize("before", [{}, {"settings": {"generation": 6, "inForce": "stable"}}])
    @pytest.mark.parametrize("foreign", ["ServiceAccount", "ConfigMap", None])
    def test_a_generation_that_cannot_be_written_is_not_published(
        self, before: Object, foreign: str | None
    ) -> None:
        theirs = live_children(generation=7).get((foreign or "", "m"))
        if theirs:
            theirs["metadata"]["ownerReferences"] = []
        seen = Observation(
            resource=resource(status=before), now=NOW, children={(foreign, "m"): theirs} if theirs else {}
        )
        errors = () if foreign else ("ConfigMap m: exceeded quota",)
        first = status_of(seen, errors)
        assert summary(first) == ("False", "NameConflict" if foreign else "ApplyFailed")
        assert first.get("settings") == before.get("settings")
        assert status_of(with_status(seen, first), errors) == first  # so that no write wakes the next


def test_an_invalid_spec_names_the_field_and_what_was_good_serves_on() -> None:
    before = status_of(serving())
    bad = changed(MINIMAL, "proposer", {"minDepth": 4, "maxDepth": 2})
    seen = replace(serving(), resource=resource(bad, generation=2, status=before))
    status = status_of(seen)
    assert summary(status) == ("False", "InvalidSpec")
    assert "spec.proposer: minDepth (4) must not exceed" in condition(status, "Ready")["message"]
    assert summary(status, "Available") == ("True", "Serving")
    assert "nothing is changed or brought back" in condition(status, "Progressing")["message"]
    assert status["settings"] == before["settings"]
    assert is_settled(status)


def test_a_name_conflict_is_a_condition_that_goes_away() -> None:
    children = copy.deepcopy(dict(serving().children))
    children["Service", "m"]["metadata"]["ownerReferences"] = []
    status = status_of(replace(serving(), children=children))
    assert summary(status) == ("False", "NameConflict")
    assert summary(status, "NameConflict") == ("True", "NotOurs")
    assert "Service m exists" in condition(status, "NameConflict")["message"]
    healed = status_of(with_status(serving(), status))
    assert {c["type"] for c in healed["conditions"]} == {"Ready", "Available", "Progressing"}


def test_what_the_api_server_refuses_is_told() -> None:
    status = status_of(serving(), ("Service m: quota exceeded",))
    assert summary(status) == ("False", "ApplyFailed")
    assert condition(status, "Ready")["message"] == "Service m: quota exceeded"
    assert not is_settled(status)


def test_a_long_message_is_cut() -> None:
    message = condition(status_of(serving(), ("x" * 5000,)), "Ready")["message"]
    assert len(message) == 1024
    assert message.endswith("…")


class TestEvents:
    def events(self, before: Object, after: Object) -> list[Event]:
        return list(transition_events(before, after))

    def test_one_for_becoming_ready(self) -> None:
        (event,) = self.events(status_of(starting()), status_of(serving()))
        assert (event.type, event.reason) == ("Normal", "Ready")

    def test_none_while_nothing_changes(self) -> None:
        status = status_of(serving())
        assert self.events(status, status) == []
        assert self.events({}, status_of(starting())) == []

    def test_a_warning_for_trouble_once(self) -> None:
        loop = status_of(starting(containerStatuses=LOOP))
        (event,) = self.events(status_of(starting()), loop)
        assert (event.type, event.reason) == ("Warning", "CrashLoopBackOff")
        assert self.events(loop, status_of(starting(containerStatuses=RUNS_AGAIN))) == []

    def test_leaving_ready_for_something_planned_is_no_warning(self) -> None:
        (event,) = self.events(status_of(serving()), status_of(starting()))
        assert (event.type, event.reason) == ("Normal", "NotReady")

    def test_of_actions(self) -> None:
        child = {"kind": "Service", "metadata": {"name": "m"}}
        assert action_event(Apply(child, "it did not exist", created=True)) == Event(
            "Normal", "Created", "created Service m: it did not exist"
        )
        assert action_event(Apply(child, "it was edited", created=False)).reason == "Updated"
        assert action_event(Delete("Deployment", "m-1", "u", "m-2 has taken over")).message == (
            "deleted Deployment m-1: m-2 has taken over"
        )
