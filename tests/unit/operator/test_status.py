"""What is reported of what is seen, and which events a transition makes."""

from __future__ import annotations

import copy
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from outrider_operator.events import Event, action_events, transition_events
from outrider_operator.observation import Observation, PodReport
from outrider_operator.plan import Apply, Delete
from outrider_operator.report import SpeculativeModelStatus
from outrider_operator.status import next_look
from unit.operator.builders import (
    CONFIG,
    FULL,
    MINIMAL,
    NOW,
    changed,
    condition,
    crashed,
    hash_of,
    is_settled,
    live_children,
    older,
    pod,
    report,
    resource,
    serving,
    status_of,
    summary,
    with_status,
)

Object = dict[str, Any]


def deployments(spec: Object) -> dict[tuple[str, str], Object]:
    return {key: child for key, child in live_children(spec).items() if key[0] == "Deployment"}


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


def pulling(port: int) -> list[dict[str, Any]]:
    error = f"dial tcp: lookup registry.example: read udp 10.77.0.1:{port}->10.96.0.10:53: i/o timeout"
    message = f'Back-off pulling image "x": ErrImagePull: {error}'
    return crashed(state={"waiting": {"reason": "ImagePullBackOff", "message": message}})


def test_the_next_try_of_a_pull_that_fails_in_the_same_way_changes_nothing() -> None:
    first, second = (
        status_of(starting(containerStatuses=pulling(port), phase="Pending")) for port in (57_295, 33_018)
    )
    assert first == second
    assert "read udp 10.96.0.10:53: i/o timeout" in condition(first, "Ready")["message"]


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
    hint = "kubectl describe resourcequota shows what uses it up"
    assert (found["reason"], found["message"]) == ("FailedCreate", f"exceeded quota; {hint}")


LATE = {
    "type": "Progressing",
    "status": "False",
    "reason": "ProgressDeadlineExceeded",
    "message": "timed out",
}


def test_past_the_deadline_the_cause_is_that_of_the_pod() -> None:
    children = live_children(available=0)
    children["Deployment", f"m-{hash_of()}"]["status"]["conditions"] = [LATE]
    status = status_of(replace(starting(containerStatuses=LOOP), children=children))
    assert summary(status) == ("False", "CrashLoopBackOff")
    assert summary(status, "Progressing") == ("False", "ProgressDeadlineExceeded")
    assert "model 'x' was not found" in condition(status, "Progressing")["message"]


def test_past_the_deadline_it_no_longer_progresses() -> None:
    children = live_children(available=0)
    children["Deployment", f"m-{hash_of()}"]["status"]["conditions"] = [LATE]
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

    def test_a_proposer_that_is_not_loaded_has_a_condition_of_its_own(self) -> None:
        before = status_of(self.seen())
        why = "proposer ngram needs 3 GiB of memory, but 2 GiB are left of the reserve of 2 GiB for proposers"
        status = status_of(self.seen(p0=report(2, proposer_error=why)))
        assert summary(status) == ("True", "Serving")
        assert condition(status, "ProposerNotLoaded")["message"] == f"pod p0: {why}"
        (event,) = transition_events(before, status)
        assert (event.type, event.reason) == ("Warning", "ProposerNotLoaded")
        assert all(found["type"] != "ProposerNotLoaded" for found in before["conditions"])

    def test_a_shared_cache_that_is_not_connected_has_a_condition_of_its_own(self) -> None:
        before = status_of(self.seen())
        cut_off = self.seen(p0=report(2, shared_cache_error="timeout: no answer from redis:6379"))
        status = status_of(cut_off)
        assert summary(status) == ("True", "Serving")
        assert condition(status, "SharedCacheNotConnected")["message"] == (
            "pod p0: timeout: no answer from redis:6379; Redis is named by spec.sharedCache.url"
        )
        (event,) = transition_events(before, status)
        assert (event.type, event.reason) == ("Warning", "SharedCacheNotConnected")
        assert status_of(with_status(cut_off, status)) == status  # so that no write wakes the next
        assert list(transition_events(status, status)) == []
        healed = status_of(with_status(self.seen(), status))
        assert all(found["type"] != "SharedCacheNotConnected" for found in healed["conditions"])

    @pytest.mark.parametrize(
        ("error", "help_"),
        [
            ("auth: invalid username-password pair or user is disabled.", "spec.sharedCache.authSecretRef "),
            ("noauth: HELLO must be called with the client already authenticated", "authSecretRef"),
            ("connection: [SSL: CERTIFICATE_VERIFY_FAILED] self-signed certificate", "caSecretRef"),
            ("connection: [Errno 2] No such file or directory", "caSecretRef"),
            ("noperm: this user has no permissions to run the 'xadd' command", "docs/operations.md"),
            ("oom: command not allowed when used memory > 'maxmemory'", "spec.sharedCache.retention"),
            ("connection: Error 111 connecting to redis-auth:6379.", "spec.sharedCache.url"),
        ],
    )
    def test_why_a_shared_cache_is_not_connected_says_where_to_look(self, error: str, help_: str) -> None:
        status = status_of(self.seen(p0=report(2, shared_cache_error=error)))
        message = condition(status, "SharedCacheNotConnected")["message"]
        assert message.startswith(f"pod p0: {error}; ")
        assert help_ in message.removeprefix(f"pod p0: {error}; ")

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


def ran(seconds: int, **more: Any) -> list[Object]:
    """A container that ended so long after its start, and runs again."""
    moments = {"startedAt": "2030-01-02T00:00:00Z"}
    moments["finishedAt"] = (datetime(2030, 1, 2, tzinfo=UTC) + timedelta(seconds=seconds)).isoformat()
    ended = {"exitCode": 0, "reason": "Completed", **moments, **more}
    return crashed(state={"running": {}}, restarts=1, last={"terminated": ended})


@pytest.mark.parametrize(
    ("seconds", "told"), [(1795, False), (1800, True), (1875, True), (2000, True), (86_400, False)]
)
def test_a_load_that_was_cut_off_says_which_field_gives_it_more_time(seconds: int, told: bool) -> None:
    message = condition(status_of(starting(containerStatuses=ran(seconds))), "Ready")["message"]
    assert ("raise spec.engine.loadSeconds" in message) is told


@pytest.mark.parametrize(
    ("warning", "fields"),
    [
        (
            'MountVolume.SetUp failed for volume "keys" : secret "tenants" not found',
            ["spec.api.keysSecretRef"],
        ),
        ('secret "hub" not found', ["spec.model.source.hub.tokenSecretRef"]),
        ("couldn't find key t in Secret ns/hub", ["spec.model.source.hub.tokenSecretRef"]),
        ("couldn't find key k in ConfigMap ns/c", ["spec.engine.env[FROM_MAP]"]),
        ('configmap "c" not found', ["spec.engine.env[FROM_MAP]"]),
        ('Secret "s" not found', ["spec.engine.env[FROM_SECRET]"]),
        ('persistentvolumeclaim "q" not found. not found', ["spec.engine.volumes[b]"]),
        ('persistentvolumeclaim "q" is being deleted', ["spec.engine.volumes[b]"]),
        ('secret "else" not found', []),
        ('configmap "m" not found', []),
        ("node not found", []),
    ],
)
def test_a_missing_object_is_traced_to_the_field_that_names_it(warning: str, fields: list[str]) -> None:
    one = changed(FULL, "replicas", 1)
    seen = replace(
        serving(one),
        children=live_children(one, available=0),
        pods=(pod("p1", spec=one, ready=False, containerStatuses=CREATING),),
        warnings={"p1": warning},
    )
    message = condition(status_of(seen), "Ready")["message"]
    assert message == "; ".join([f"pod p1: {warning}", *(f"it is named by {field}" for field in fields)])


@pytest.mark.parametrize(
    ("pod_status", "hint"),
    [
        ({"containerStatuses": PULLING}, "it is named by the operator's setting serving-image"),
        ({"containerStatuses": FIRST_CRASH}, "spec.engine.resources.limits.memory"),
        (
            {"conditions": [UNSCHEDULABLE[0] | {"message": "1 node(s) were unschedulable"}]},
            "kubectl uncordon",
        ),
        ({"conditions": [UNSCHEDULABLE[0] | {"message": "1 Insufficient cpu"}]}, "spec.engine.resources"),
    ],
)
def test_trouble_says_where_to_look(pod_status: Object, hint: str) -> None:
    assert hint in condition(status_of(starting(**pod_status)), "Ready")["message"]


class TestNoRoomBesideTheOldPods:
    OLD = changed(MINIMAL, "model.dtype", "float16")

    def status(self, spec: Object, *, old: int = 1, **pod_status: Any) -> Object:
        seen = replace(
            starting(**pod_status),
            resource=resource(spec),
            children=live_children(spec, available=0) | older(self.OLD, available=old),
        )
        return status_of(seen)

    def test_the_field_that_frees_it_is_named(self) -> None:
        status = self.status(MINIMAL, conditions=UNSCHEDULABLE)
        assert summary(status) == ("False", "Unschedulable")
        for kind in ("Ready", "Progressing"):
            message = condition(status, kind)["message"]
            assert "0/1 nodes; the pods of the earlier spec keep serving" in message
            assert "spec.replacement: inPlace ends the old ones first" in message

    def test_only_while_old_ones_serve(self) -> None:
        status = self.status(MINIMAL, old=0, conditions=UNSCHEDULABLE)
        assert condition(status, "Ready")["message"] == "pod p1: 0/1 nodes"

    def test_not_of_other_trouble(self) -> None:
        assert "inPlace" not in str(self.status(MINIMAL, containerStatuses=LOOP))

    def test_in_place_it_says_what_goes_on(self) -> None:
        wanted = changed(MINIMAL, "replacement", "inPlace")
        going = pod("p0", spec=self.OLD)
        going["metadata"]["deletionTimestamp"] = "2030-01-02T03:05:05Z"
        nothing_yet = live_children(changed(wanted, "replicas", 0))
        old = older(changed(self.OLD, "replicas", 0), available=0)
        seen = Observation(resource=resource(wanted), now=NOW, children=nothing_yet | old, pods=(going,))
        status = status_of(seen)
        assert summary(status) == ("False", "PodsStarting")
        message = condition(status, "Ready")["message"]
        assert message.startswith("0 of 1 pod ready; old pods end one at a time")


class TestChildrenThatAreDeleted:
    def status(self, key: tuple[str, str], finalizers: list[str], **more: Any) -> Object:
        children = copy.deepcopy(dict(serving().children) | more.get("also", {}))
        children[key]["metadata"] |= {"deletionTimestamp": "2030-01-01T00:00:00Z", "finalizers": finalizers}
        return status_of(replace(serving(), children=children))

    def test_one_that_just_goes(self) -> None:
        for finalizers in ([], ["foregroundDeletion"]):
            status = self.status(("Service", "m"), finalizers)
            assert summary(status) == ("False", "ChildDeleting")
            assert summary(status, "Progressing") == ("True", "ChildDeleting")
            assert condition(status, "Ready")["message"] == "Service m is being deleted"
            assert summary(status, "Available") == ("True", "Serving")

    def test_one_that_waits_for_its_finalizers(self) -> None:
        status = self.status(("Deployment", f"m-{hash_of()}"), ["example.com/a", "example.com/b"])
        assert summary(status) == ("False", "DeletionBlocked")
        assert condition(status, "Ready")["message"] == (
            f"Deployment m-{hash_of()} is being deleted and waits for its finalizers: "
            "example.com/a, example.com/b"
        )
        (event,) = transition_events(status_of(serving()), status)
        assert (event.type, event.reason) == ("Warning", "DeletionBlocked")

    def test_an_old_deployment_that_waits_for_its_finalizers(self) -> None:
        old = changed(MINIMAL, "model.dtype", "float16")
        key = ("Deployment", f"m-{hash_of(old)}")
        status = self.status(key, ["example.com/a"], also=older(old, available=1))
        assert summary(status) == ("False", "DeletionBlocked")
        assert summary(self.status(key, [], also=older(old, available=1))) == ("False", "OldPodsEnding")

    def test_it_heals(self) -> None:
        status = self.status(("Service", "m"), ["example.com/a"])
        assert summary(status_of(with_status(serving(), status))) == ("True", "Serving")


def test_a_namespace_that_is_terminating_is_told_as_such() -> None:
    errors = (
        'Service m: services "m" is forbidden: unable to create new content in namespace ns because it is '
        "being terminated",
    )
    status = status_of(serving(), errors)
    for kind in ("Ready", "Progressing"):
        assert summary(status, kind) == ("False", "NamespaceTerminating")
        assert condition(status, kind)["message"].startswith("the namespace is being deleted")
    assert is_settled(status)


class TestNamesakes:
    def test_are_told_by_name_and_do_not_touch_ready(self) -> None:
        status = status_of(replace(serving(), namesakes=("a", "b")))
        assert summary(status) == ("True", "Serving")
        assert summary(status, "ServedNameConflict") == ("True", "AlsoServed")
        message = condition(status, "ServedNameConflict")["message"]
        assert message.startswith(
            "spec.model.servedName: m is also the name by which requests address a, b, of this namespace"
        )
        assert is_settled(status)

    def test_of_many_a_few(self) -> None:
        many = tuple(f"n{number}" for number in range(999))
        message = condition(status_of(replace(serving(), namesakes=many)), "ServedNameConflict")["message"]
        assert "address n0, n1, n2, n3, n4 and more, of this" in message

    def test_an_invalid_spec_has_them_too(self) -> None:
        seen = replace(serving(), resource=resource({"model": {"servedName": "x"}}), namesakes=("a",))
        message = condition(status_of(seen), "ServedNameConflict")["message"]
        assert message.startswith("spec.model.servedName: x is also")

    def test_the_condition_goes_away(self) -> None:
        before = status_of(replace(serving(), namesakes=("a",)))
        healed = status_of(with_status(serving(), before))
        assert {c["type"] for c in healed["conditions"]} == {"Ready", "Available", "Progressing"}


class TestNextLook:
    def test_settled_it_has_time(self) -> None:
        assert next_look(status_of(serving()), NOW, CONFIG) == 30

    @pytest.mark.parametrize(
        ("elapsed", "seconds"), [(-5, 2.5), (0, 2.5), (25, 2.5), (60, 6), (299, 29.9), (9999, 30)]
    )
    def test_the_longer_nothing_comes_of_it_the_later(self, elapsed: float, seconds: float) -> None:
        status = status_of(starting())
        later = NOW + timedelta(seconds=elapsed)
        assert next_look(status, later, CONFIG) == pytest.approx(seconds)

    def test_counted_from_the_newest_change(self) -> None:
        status = status_of(starting())
        first, second = (c for c in status["conditions"] if c["type"] in ("Ready", "Progressing"))
        second["lastTransitionTime"] = "2030-01-02T03:14:05Z"
        assert first["lastTransitionTime"] < second["lastTransitionTime"]
        assert next_look(status, NOW + timedelta(seconds=660), CONFIG) == pytest.approx(6)

    def test_without_conditions_soon(self) -> None:
        assert next_look({}, NOW, CONFIG) == 2.5


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

    def test_losing_the_only_pod_is_a_warning_and_why(self) -> None:
        lost, note = self.events(status_of(serving()), status_of(starting()))
        assert (lost.type, lost.reason) == ("Warning", "NotAvailable")
        assert (note.type, note.reason) == ("Normal", "NotReady")
        assert "PodsStarting" in note.message

    def test_of_actions(self) -> None:
        child = {"kind": "Service", "metadata": {"name": "m"}}
        actions = [
            Apply(child, "it did not exist", created=True),
            Apply(child, "it was edited", created=False),
            Delete("Deployment", "m-1", "u", "m-2 has taken over"),
        ]
        assert list(action_events(actions)) == [
            Event("Normal", "Created", "created Service m: it did not exist"),
            Event("Normal", "Updated", "updated Service m: it was edited"),
            Event("Normal", "Deleted", "deleted Deployment m-1: m-2 has taken over"),
        ]
