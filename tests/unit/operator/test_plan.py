"""The decision, as a table of what is seen and what follows."""

from __future__ import annotations

import copy
import json
from dataclasses import replace
from typing import Any

from outrider_operator.observation import Observation
from outrider_operator.plan import plan, wanted_children
from unit.operator.builders import (
    CONFIG,
    FULL,
    MINIMAL,
    NOW,
    changed,
    hash_of,
    live_children,
    resource,
    serving,
)

Object = dict[str, Any]


def titles(seen: Observation) -> tuple[list[str], list[str]]:
    made = plan(seen, CONFIG)
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
    made = plan(seen({}), CONFIG)
    assert [action.title for action in made.applies] == [
        "ServiceAccount m",
        "ConfigMap m",
        "Service m",
        f"Deployment m-{hash_of()}",
    ]
    assert {action.reason for action in made.applies} == {"it did not exist"}
    assert made.settings is not None
    assert made.settings.generation == 1
    assert made.deletes == ()


def test_everything_is_as_wanted() -> None:
    assert titles(serving()) == ([], [])
    assert titles(serving(FULL)) == ([], [])


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
    assert titles(seen(children)) == ([], [])


def test_scaling_changes_the_deployment_only() -> None:
    assert titles(seen(live_children(), changed(MINIMAL, "replicas", 2))) == (
        [f"Deployment m-{hash_of()}"],
        [],
    )


def test_a_new_proposer_gives_the_settings_a_new_generation() -> None:
    made = plan(seen(live_children(), changed(MINIMAL, "proposer.method", "none")), CONFIG)
    assert [action.title for action in made.applies] == ["ConfigMap m", f"Deployment m-{hash_of()}"]
    assert made.settings is not None
    assert made.settings.generation == 2
    deployment = made.applies[1].object
    live = live_children()["Deployment", f"m-{hash_of()}"]
    assert deployment["spec"]["template"] == live["spec"]["template"]


def test_unchanged_settings_keep_their_generation() -> None:
    made = plan(seen(live_children(generation=6), status={"settings": {"generation": 6}}), CONFIG)
    assert made.settings is not None
    assert (made.settings.generation, made.applies) == (6, ())


def test_a_lost_config_map_never_brings_back_an_old_generation() -> None:
    children = live_children()
    del children["ConfigMap", "m"]
    made = plan(seen(children, status={"settings": {"generation": 6}}), CONFIG)
    assert made.settings is not None
    assert made.settings.generation == 7


def test_a_lost_status_goes_by_the_config_map() -> None:
    made = plan(seen(live_children(generation=6), changed(MINIMAL, "proposer.maxDepth", 2)), CONFIG)
    assert made.settings is not None
    assert made.settings.generation == 7


def test_a_config_map_restored_from_a_backup_gets_a_new_generation() -> None:
    made = plan(seen(live_children(generation=2), status={"settings": {"generation": 6}}), CONFIG)
    assert made.settings is not None
    assert made.settings.generation == 7


def test_settings_that_someone_edited_are_replaced() -> None:
    for text in ("not json", json.dumps({"generation": "x"}), json.dumps([1])):
        children = live_children()
        children["ConfigMap", "m"]["data"]["settings.json"] = text
        made = plan(seen(children, status={"settings": {"generation": 3}}), CONFIG)
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
        made = plan(self.both(old=1, new=1), CONFIG)
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
        made = plan(replace(both, children=children), CONFIG)
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
    made = plan(seen(children, changed(MINIMAL, "replicas", 2)), CONFIG)
    assert made.conflicts == ("Service m exists and does not belong to this SpeculativeModel",)
    assert made.actions == ()


def test_children_of_an_earlier_namesake_are_waited_for() -> None:
    children = live_children()
    for child in children.values():
        child["metadata"]["ownerReferences"][0]["uid"] = "uid-0"
    made = plan(seen(children), CONFIG)
    assert len(made.conflicts) == 4
    assert all("earlier SpeculativeModel of this name" in conflict for conflict in made.conflicts)
    assert made.actions == ()


def test_an_invalid_spec_changes_nothing_and_names_the_field() -> None:
    bad = changed(MINIMAL, "proposer", {"minDepth": 4, "maxDepth": 2})
    made = plan(seen(live_children(), bad), CONFIG)
    assert made.problems == ("spec.proposer: minDepth (4) must not exceed maxDepth (2)",)
    assert made.actions == ()
    assert wanted_children(seen({}, bad), CONFIG) == ()
