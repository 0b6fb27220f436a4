"""The decision, as a table of what is seen and what follows."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

import pytest

from outrider_operator.observation import Observation
from outrider_operator.plan import Scale, intent
from outrider_serving.settings import MAX_COUNT, RequestLimits
from unit.operator.builders import (
    CONFIG,
    FULL,
    MINIMAL,
    NOW,
    TUNED,
    changed,
    hash_of,
    live_children,
    plan,
    pod,
    resource,
    serving,
)

Object = dict[str, Any]


def titles(seen: Observation) -> tuple[list[str], list[str]]:
    made = plan(seen)
    return [action.title for action in made.applies], [action.title for action in made.deletes]


def seen(
    children: dict[tuple[str, str], Object], spec: Object | None = None, status: Object | None = None
) -> Observation:
    return Observation(resource=resource(spec, status=status), now=NOW, children=children)


def older(spec: Object, *, available: int, name: str | None = None) -> dict[tuple[str, str], Object]:
    """The Deployment that an earlier spec left behind."""
    live = live_children(spec, available=available)
    return {key: child for key, child in live.items() if key[0] == "Deployment"}


def test_nothing_exists() -> None:
    made = plan(seen({}))
    assert [action.title for action in made.applies] == [
        "ServiceAccount m",
        "ConfigMap m",
        "NetworkPolicy m",
        "Service m",
        "PodDisruptionBudget m",
        f"Deployment m-{hash_of()}",
    ]
    assert {action.reason for action in made.applies} == {"it did not exist"}
    assert made.settings is not None
    assert made.settings.generation == 1
    assert made.deletes == ()


def test_everything_is_as_wanted() -> None:
    assert titles(serving()) == ([], [])
    assert titles(serving(FULL)) == ([], [])
    assert titles(serving(TUNED)) == ([], [])


def test_a_changed_child_is_brought_back() -> None:
    children = live_children()
    children["Service", "m"]["spec"]["selector"] = {"app": "else"}
    assert titles(seen(children)) == (["Service m"], [])


def test_a_foreign_container_is_a_difference() -> None:
    children = live_children()
    pod = children["Deployment", f"m-{hash_of()}"]["spec"]["template"]["spec"]
    pod["containers"].append({"name": "sidecar", "image": "x"})
    assert titles(seen(children)) == ([f"Deployment m-{hash_of()}"], [])


def test_fields_of_others_are_left_alone() -> None:
    children = live_children()
    children["Service", "m"]["spec"]["clusterIP"] = "10.0.0.1"
    children["ConfigMap", "m"]["metadata"]["annotations"] = {"a": "b"}
    assert titles(seen(children)) == ([], [])


def test_a_child_that_is_being_deleted_is_waited_for() -> None:
    children = live_children()
    children["Service", "m"]["metadata"]["deletionTimestamp"] = "2030-01-01T00:00:00Z"
    made = plan(seen(children))
    assert made.actions == ()
    assert made.deleting == (children["Service", "m"],)


def test_scaling_changes_the_deployment_only() -> None:
    assert titles(seen(live_children(), changed(MINIMAL, "replicas", 2))) == (
        [f"Deployment m-{hash_of()}"],
        [],
    )


def test_a_new_proposer_gives_the_settings_a_new_generation() -> None:
    made = plan(seen(live_children(), changed(MINIMAL, "proposer.method", "none")))
    assert [action.title for action in made.applies] == ["ConfigMap m", f"Deployment m-{hash_of()}"]
    assert made.settings is not None
    assert made.settings.generation == 2
    deployment = made.applies[1].object
    live = live_children()["Deployment", f"m-{hash_of()}"]
    assert deployment["spec"]["template"] == live["spec"]["template"]


@pytest.mark.parametrize("limits", [{"timeoutSeconds": 30}, {"speculationOverride": False}])
def test_new_limits_of_requests_reach_pods_by_their_settings_alone(limits: Object) -> None:
    made = plan(seen(live_children(), changed(MINIMAL, "requests", limits)))
    assert [action.title for action in made.applies] == ["ConfigMap m"]
    assert made.settings is not None
    assert made.settings.generation == 2
    assert made.settings.requests == RequestLimits.model_validate(limits)


def test_unchanged_settings_keep_their_generation() -> None:
    made = plan(seen(live_children(generation=6), status={"settings": {"generation": 6}}))
    assert made.settings is not None
    assert (made.settings.generation, made.applies) == (6, ())


def test_a_lost_config_map_never_brings_back_an_old_generation() -> None:
    children = live_children()
    del children["ConfigMap", "m"]
    made = plan(seen(children, status={"settings": {"generation": 6}}))
    assert made.settings is not None
    assert made.settings.generation == 7


def test_a_lost_status_goes_by_the_config_map() -> None:
    made = plan(seen(live_children(generation=6), changed(MINIMAL, "proposer.maxDepth", 2)))
    assert made.settings is not None
    assert made.settings.generation == 7


@pytest.mark.parametrize("stored", [MAX_COUNT - 1, MAX_COUNT, MAX_COUNT + 1, 2**63 - 1])
@pytest.mark.parametrize("known", [3, MAX_COUNT])
def test_a_generation_that_nobody_could_have_reached_is_not_counted_on(stored: int, known: int) -> None:
    children = live_children(generation=1)
    text = children["ConfigMap", "m"]["data"]["settings.json"]
    children["ConfigMap", "m"]["data"]["settings.json"] = text.replace(
        '"generation": 1', f'"generation": {stored}'
    )
    made = plan(seen(children, status={"settings": {"generation": known}}))
    assert made.settings is not None
    assert made.settings.generation == (4 if known == 3 else 1)
    assert [action.title for action in made.actions] == ["ConfigMap m"]


def test_a_config_map_restored_from_a_backup_gets_a_new_generation() -> None:
    made = plan(seen(live_children(generation=2), status={"settings": {"generation": 6}}))
    assert made.settings is not None
    assert made.settings.generation == 7


def test_settings_that_someone_edited_are_replaced() -> None:
    for text in ("not json", json.dumps({"generation": "x"}), json.dumps([1])):
        children = live_children()
        children["ConfigMap", "m"]["data"]["settings.json"] = text
        made = plan(seen(children, status={"settings": {"generation": 3}}))
        assert made.settings is not None
        assert made.settings.generation == 4
        assert [action.title for action in made.applies] == ["ConfigMap m"]


class TestSecondDeployment:
    OLD = changed(MINIMAL, "model.dtype", "float16")
    NEW = MINIMAL

    def both(self, *, old: int, new: int) -> Observation:
        return seen(live_children(self.NEW, available=new) | older(self.OLD, available=old), self.NEW)

    def test_the_old_one_stays_until_the_new_one_serves(self) -> None:
        assert titles(self.both(old=1, new=0)) == ([], [])

    def test_then_it_goes(self) -> None:
        made = plan(self.both(old=1, new=1))
        (delete,) = made.deletes
        assert delete.title == f"Deployment m-{hash_of(self.OLD)}"
        assert delete.uid == "uid-of-Deployment"
        assert delete.reason == f"m-{hash_of()} has taken over"

    def test_the_last_good_one_may_restart(self) -> None:
        assert titles(self.both(old=0, new=0)) == ([], [])

    def test_one_that_never_served_goes_when_an_older_one_serves(self) -> None:
        between = changed(MINIMAL, "model.dtype", "bfloat16")
        both = self.both(old=1, new=0)
        children = dict(both.children) | older(between, available=0)
        made = plan(replace(both, children=children))
        assert [delete.title for delete in made.deletes] == [f"Deployment m-{hash_of(between)}"]

    def test_new_but_not_yet_seen_by_its_controller_is_not_complete(self) -> None:
        both = self.both(old=1, new=1)
        children = copy.deepcopy(dict(both.children))
        children["Deployment", f"m-{hash_of()}"]["metadata"]["generation"] = 2
        assert titles(replace(both, children=children)) == ([], [])

    def test_scaled_to_zero_removes_it_at_once(self) -> None:
        none = changed(self.NEW, "replicas", 0)
        children = live_children(none) | older(self.OLD, available=1)
        assert titles(seen(children, none)) == ([], [f"Deployment m-{hash_of(self.OLD)}"])

    def test_a_deployment_with_our_label_that_is_not_ours_is_left_alone(self) -> None:
        both = self.both(old=1, new=1)
        children = copy.deepcopy(dict(both.children))
        children["Deployment", f"m-{hash_of(self.OLD)}"]["metadata"]["ownerReferences"] = []
        assert titles(replace(both, children=children)) == ([], [])


def test_an_object_that_is_not_ours_is_never_touched() -> None:
    children = live_children()
    children["Service", "m"]["metadata"]["ownerReferences"] = []
    children["Service", "m"]["spec"] = {"type": "NodePort"}
    made = plan(seen(children, changed(MINIMAL, "replicas", 2)))
    assert made.conflicts == ("Service m exists and does not belong to this SpeculativeModel",)
    assert made.actions == ()


def test_children_of_an_earlier_namesake_are_waited_for() -> None:
    children = live_children()
    for child in children.values():
        child["metadata"]["ownerReferences"][0]["uid"] = "uid-0"
    made = plan(seen(children))
    assert len(made.conflicts) == 6
    assert all("earlier SpeculativeModel of this name" in conflict for conflict in made.conflicts)
    assert made.actions == ()


def test_an_invalid_spec_changes_nothing_and_names_the_field() -> None:
    bad = changed(MINIMAL, "proposer", {"minDepth": 4, "maxDepth": 2})
    made = plan(seen(live_children(), bad))
    assert made.problems == ("spec.proposer: minDepth (4) must not exceed maxDepth (2)",)
    assert made.actions == ()
    assert intent(resource(bad), CONFIG).names == ()


def test_an_intent_names_its_children_and_what_is_to_be_removed() -> None:
    kinds = ["ServiceAccount", "ConfigMap", "NetworkPolicy", "Service", "PodDisruptionBudget"]
    wanted = intent(resource(), CONFIG)
    assert wanted.names == (*((kind, "m") for kind in kinds), ("Deployment", f"m-{hash_of()}"))
    assert wanted.unwanted == ()
    without = intent(resource(), replace(CONFIG, network_policies=False))
    assert set(without.names) == set(wanted.names) - {("NetworkPolicy", "m")}
    assert without.unwanted == (("NetworkPolicy", "m"),)


class TestNetworkPolicySwitchedOff:
    OFF = replace(CONFIG, network_policies=False)

    def test_ours_is_deleted(self) -> None:
        made = plan(serving(), self.OFF)
        (delete,) = made.deletes
        assert (delete.title, delete.uid) == ("NetworkPolicy m", "uid-of-NetworkPolicy")
        assert delete.reason == "the operator is told to make none"
        assert made.applies == ()

    def test_one_that_is_not_ours_is_neither_touched_nor_in_the_way(self) -> None:
        children = copy.deepcopy(dict(serving().children))
        children["NetworkPolicy", "m"]["metadata"]["ownerReferences"] = []
        made = plan(replace(serving(), children=children), self.OFF)
        assert (made.actions, made.conflicts) == ((), ())

    def test_nothing_to_do_without_one(self) -> None:
        children = {key: child for key, child in serving().children.items() if key[0] != "NetworkPolicy"}
        assert plan(replace(serving(), children=children), self.OFF).actions == ()


class TestInPlace:
    """As in takeover.py, from what the API server shows."""

    NEW = changed(changed(MINIMAL, "replicas", 2), "replacement", "inPlace")
    OLD = changed(NEW, "model.dtype", "float16")

    def seen(
        self, *, old: int, new: int | None, serving: int = 0, pods: tuple[Object, ...] = ()
    ) -> Observation:
        """Deployments that are told to run so many pods; of the new one's, so many serve."""
        children = {
            key: child for key, child in live_children(self.NEW).items() if key[0] != "Deployment"
        } | older(changed(self.OLD, "replicas", old), available=old)
        if new is not None:
            children |= older(changed(self.NEW, "replicas", new), available=serving)
        old_pods = tuple(pod(f"old{number}", spec=self.OLD) for number in range(old))
        new_pods = tuple(pod(f"new{number}", spec=self.NEW) for number in range(new or 0))
        everything = (*new_pods, *old_pods, *pods)
        return Observation(resource=resource(self.NEW), now=NOW, children=children, pods=everything)

    def leaving(self, due: str) -> Object:
        gone = pod("gone", spec=self.OLD)
        gone["metadata"]["deletionTimestamp"] = due
        return gone

    def shares(self, seen: Observation) -> tuple[int | None, int | None]:
        """What the old Deployment and the new one are told to run, None where that is left as it is."""
        made = plan(seen)
        old = [scale.replicas for scale in made.scales]
        new = [one.object["spec"]["replicas"] for one in made.applies if one.object["kind"] == "Deployment"]
        return (old or [None])[0], (new or [None])[0]

    def test_an_old_pod_goes_first(self) -> None:
        made = plan(self.seen(old=2, new=None))
        (scale,) = made.scales
        assert scale == Scale(
            f"m-{hash_of(self.OLD)}", "uid-of-Deployment", 1, f"m-{hash_of(self.NEW)} takes over in place"
        )
        assert scale.patch == {"metadata": {"uid": "uid-of-Deployment"}, "spec": {"replicas": 1}}
        assert made.actions == (*made.applies, scale)
        assert self.shares(self.seen(old=2, new=None)) == (1, 0)

    def test_then_a_new_one_comes_into_its_room_once_that_is_free(self) -> None:
        assert self.shares(self.seen(old=1, new=0, pods=(self.leaving("2030-01-02T03:04:30Z"),))) == (
            None,
            None,
        )
        assert self.shares(self.seen(old=1, new=0)) == (None, 1)

    def test_a_pod_that_its_node_can_no_longer_end_holds_no_room(self) -> None:
        assert self.shares(self.seen(old=1, new=0, pods=(self.leaving("2030-01-02T03:03:00Z"),))) == (None, 1)

    def test_a_pod_that_was_evicted_holds_no_room(self) -> None:
        evicted = pod("gone", spec=self.OLD, phase="Failed")
        assert self.shares(self.seen(old=1, new=0, pods=(evicted,))) == (None, 1)

    def test_the_next_old_one_waits_for_it_to_serve(self) -> None:
        assert self.shares(self.seen(old=1, new=1)) == (None, None)
        assert self.shares(self.seen(old=1, new=1, serving=1)) == (0, None)

    def test_that_the_few_of_the_new_are_complete_is_no_takeover(self) -> None:
        assert plan(self.seen(old=1, new=1, serving=1)).deletes == ()

    def test_an_old_deployment_goes_with_its_last_pod(self) -> None:
        seen = self.seen(old=0, new=1, serving=1)
        (delete,) = plan(seen).deletes
        assert (delete.name, delete.reason) == (f"m-{hash_of(self.OLD)}", "none of its pods are left")
        still = replace(seen, pods=(*seen.pods, self.leaving("2030-01-02T03:04:30Z")))
        assert plan(still).deletes == ()

    def test_room_of_an_old_deployment_that_is_held_by_a_finalizer(self) -> None:
        seen = self.seen(old=2, new=0)
        children = copy.deepcopy(dict(seen.children))
        children["Deployment", f"m-{hash_of(self.OLD)}"]["metadata"]["deletionTimestamp"] = (
            "2030-01-01T00:00:00Z"
        )
        assert plan(replace(seen, children=children)).actions == ()

    def test_a_new_deployment_that_is_being_deleted_takes_nothing(self) -> None:
        seen = self.seen(old=2, new=0)
        children = copy.deepcopy(dict(seen.children))
        children["Deployment", f"m-{hash_of(self.NEW)}"]["metadata"]["deletionTimestamp"] = (
            "2030-01-01T00:00:00Z"
        )
        assert plan(replace(seen, children=children)).actions == ()

    def test_without_an_old_one_all_are_asked_for_at_once(self) -> None:
        gone = pod("gone", spec=self.NEW)
        gone["metadata"]["deletionTimestamp"] = "2030-01-02T03:04:30Z"
        seen = Observation(
            resource=resource(changed(self.NEW, "replicas", 3)),
            now=NOW,
            children=live_children(self.NEW, available=1),
            pods=(gone, pod("p", spec=self.NEW)),
        )
        assert self.shares(seen) == (None, 3)


def test_growing_while_the_new_one_has_just_taken_over_does_not_cost_what_serves() -> None:
    """Switched back from in place halfway: the new Deployment is complete, but smaller than wanted."""
    wanted = changed(MINIMAL, "replicas", 3)
    old = changed(wanted, "model.dtype", "float16")
    children = live_children(MINIMAL) | older(old, available=2)
    assert titles(seen(children, wanted)) == ([f"Deployment m-{hash_of()}"], [])


def test_a_service_that_selects_more_narrowly_is_a_difference() -> None:
    children = live_children()
    children["Service", "m"]["spec"]["selector"]["app"] = "else"
    assert titles(seen(children)) == (["Service m"], [])


def test_peers_that_someone_adds_to_the_network_policy_are_a_difference() -> None:
    for rule in (0, 1):
        children = live_children()
        children["NetworkPolicy", "m"]["spec"]["ingress"][rule]["from"].append({"podSelector": {}})
        assert titles(seen(children)) == (["NetworkPolicy m"], [])
