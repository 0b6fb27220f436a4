"""What is told while a SpeculativeModel is scaled to zero and back, whatever is seen first."""

from __future__ import annotations

from dataclasses import replace
from itertools import permutations
from typing import Any, ClassVar

import pytest

from outrider_operator.events import Event, transition_events
from outrider_operator.observation import Observation
from unit.operator.builders import (
    MINIMAL,
    changed,
    condition,
    crashed,
    hash_of,
    is_settled,
    live_children,
    older,
    pod,
    report,
    serving,
    status_of,
    summary,
    with_status,
)

Object = dict[str, Any]

CRASHED = crashed(state={"terminated": {"exitCode": 2, "reason": "Error"}})
LATE = {"type": "Progressing", "status": "False", "reason": "ProgressDeadlineExceeded", "message": "late"}


def scaled(replicas: int, deployment: Object, *pods: Object, reports: bool = False) -> Observation:
    """What is seen of a SpeculativeModel with its Deployment as given, scaled from one number to another."""
    spec = changed(MINIMAL, "replicas", replicas)
    children = live_children(spec)
    live = children["Deployment", f"m-{hash_of()}"]
    live["metadata"]["generation"] = 2
    live["status"] = deployment
    answers = {"p1": report()} if reports else {}
    return replace(serving(spec), children=children, pods=pods, reports=answers)


def counted(observed: int, there: int, available: int) -> Object:
    """The status of a Deployment."""
    counts = {"replicas": there, "updatedReplicas": there}
    return {"observedGeneration": observed, **counts, "availableReplicas": available}


def ending(one: Object) -> Object:
    return {**one, "metadata": {**one["metadata"], "deletionTimestamp": "2030-01-02T03:05:05Z"}}


def told(steps: list[Observation]) -> tuple[list[Object], list[Event]]:
    """The status after each sight, and the events of all."""
    statuses, events = [steps[0].status], []
    for seen in steps:
        status = status_of(with_status(seen, statuses[-1]))
        events += transition_events(statuses[-1], status)
        statuses.append(status)
    return statuses[1:], events


class TestScalingToZero:
    STEPS: ClassVar = {
        "serving": scaled(1, counted(2, 1, 1), pod(), reports=True),
        "not yet observed": scaled(0, counted(1, 1, 1), pod(), reports=True),
        "observed, the pod serves": scaled(0, counted(2, 1, 1), pod(), reports=True),
        "observed, the pod ends": scaled(0, counted(2, 1, 1), ending(pod())),
        "no longer counted": scaled(0, counted(2, 0, 0), ending(pod())),
        "gone": scaled(0, counted(2, 0, 0)),
    }

    def test_ready_goes_straight_there_and_tells_it_once(self) -> None:
        statuses, events = told(list(self.STEPS.values()))
        assert summary(statuses[0]) == ("True", "Serving")
        assert {summary(status) for status in statuses[1:]} == {("False", "ScaledToZero")}
        assert {condition(status, "Ready")["message"] for status in statuses[1:]} == {"replicas is 0"}
        assert events == [
            Event("Normal", "Ready", "1 pod ready, the observed generation is in force"),
            Event("Normal", "NotReady", "ScaledToZero: replicas is 0"),
        ]

    @pytest.mark.parametrize("order", permutations(list(STEPS)[1:], 3), ids=", then ".join)
    def test_whatever_is_seen_first(self, order: tuple[str, ...]) -> None:
        """Watches tell of a Deployment and of its pods in any order."""
        statuses, events = told([self.STEPS[name] for name in ("serving", *order)])
        assert [summary(status)[1] for status in statuses] == ["Serving"] + ["ScaledToZero"] * 3
        assert [event.reason for event in events] == ["Ready", "NotReady"]

    def test_the_others_say_what_is_still_there(self) -> None:
        statuses, _ = told(list(self.STEPS.values()))
        serving, none = ("True", "Serving"), ("False", "ScaledToZero")
        assert [summary(status, "Available") for status in statuses] == [serving] * 4 + [none] * 2
        going = ("True", "ScalingToZero")
        assert [summary(status, "Progressing") for status in statuses[1:]] == [going] * 3 + [none] * 2
        assert condition(statuses[1], "Progressing")["message"] == "replicas is 0; 1 pod left"
        assert [is_settled(status) for status in statuses[1:]] == [False] * 3 + [True] * 2

    def test_trouble_of_a_pod_that_is_not_wanted_is_none(self) -> None:
        crashed_pod = pod(ready=False, containerStatuses=CRASHED)
        late = counted(1, 1, 0) | {"conditions": [LATE]}
        status = status_of(scaled(0, late, crashed_pod))
        assert summary(status) == ("False", "ScaledToZero")
        assert summary(status, "Progressing") == ("True", "ScalingToZero")

    def test_pods_of_an_earlier_spec_are_left_too(self) -> None:
        ((key, old),) = older(changed(MINIMAL, "model.dtype", "float16"), available=1).items()
        seen = scaled(0, counted(2, 0, 0))
        status = status_of(replace(seen, children={**seen.children, key: ending(old)}))
        assert summary(status) == ("False", "ScaledToZero")
        assert condition(status, "Progressing")["message"] == "replicas is 0; 1 pod left"

    def test_what_is_refused_is_nearer(self) -> None:
        seen = self.STEPS["not yet observed"]
        assert summary(status_of(seen, ("Deployment m: no",))) == ("False", "ApplyFailed")

    @pytest.mark.parametrize("counts", [(2, 0, 0), (1, 1, 1), (2, 1, 1)])
    def test_back_to_one_it_is_ready_only_with_its_pod(self, counts: tuple[int, int, int]) -> None:
        """From zero, and from halfway there, where the Deployment still counts the pod that ends."""
        loading = pod(ready=False)
        steps = [
            scaled(0, counted(2, 0, 0)),
            scaled(1, counted(*counts), ending(pod("p0"))),
            scaled(1, counted(2, 1, 0), loading),
            scaled(1, counted(2, 1, 0), pod()),  # the pod is heard of before the Deployment
            scaled(1, counted(2, 1, 1), loading),  # or after
            scaled(1, counted(2, 1, 1), pod(), reports=True),
        ]
        statuses, events = told(steps)
        assert [summary(status)[0] for status in statuses] == ["False"] * 5 + ["True"]
        assert {summary(status)[1] for status in statuses[1:-1]} <= {"PodsStarting", "SettingsUnknown"}
        (event,) = (event for event in events if event.reason != "NotAvailable")  # the pod that ended
        assert event == Event("Normal", "Ready", "1 pod ready, the observed generation is in force")
