"""How many pods each Deployment runs while those of a new pod hash take over from those of earlier ones.

Beside each other: all of them, until the new ones are complete. In place: old pods go first, one at a time,
each only once the new pod that stands in for the last one is available, and a new pod comes only into room
that is free. A function of what is seen, not of what was done before: it may be asked again at any moment,
also after `replicas` was changed halfway.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from outrider_operator import names
from outrider_operator.observation import (
    Object,
    Observation,
    available_replicas,
    has_ended,
    hash_of_pod,
    is_deleting,
    is_overdue,
    wanted_replicas,
)
from outrider_operator.spec import Replacement, SpeculativeModelSpec


@dataclass(frozen=True, slots=True)
class Fleet:
    """The pods of one Deployment, counted."""

    replicas: int = 0
    """What it is told to run."""

    available: int = 0

    active: int = 0
    """Pods that exist and are not on their way out."""

    leaving: int = 0
    """Pods on their way out that may still hold what they were given, such as a GPU."""


@dataclass(frozen=True, slots=True)
class Shares:
    """How many pods each Deployment is to run."""

    old: Mapping[str, int]
    new: int


def takeover(
    seen: Observation, spec: SpeculativeModelSpec, current: str, earlier: Sequence[Object]
) -> Shares:
    """How many pods each Deployment is to run now: the one named `current`, and the earlier ones."""
    live = seen.children.get(("Deployment", current))
    going = [found for found in seen.deployments() if is_deleting(found)]
    in_turn = spec.replacement is Replacement.IN_PLACE and (earlier or going)
    if not in_turn or live in going:
        return Shares({str(old["metadata"]["name"]): wanted_replicas(old) for old in earlier}, spec.replicas)
    held = [_fleet(seen, found) for found in going]
    return in_place(
        spec.replicas,
        {str(old["metadata"]["name"]): _fleet(seen, old) for old in earlier},
        Fleet() if live is None else _fleet(seen, live),
        held=sum(fleet.active + fleet.leaving for fleet in held),
    )


def is_empty(seen: Observation, deployment: Object) -> bool:
    """Whether a Deployment is told to run no pods, and has none, also none on their way out."""
    status, fleet = deployment.get("status", {}), _fleet(seen, deployment)
    return (
        wanted_replicas(deployment) == 0
        and status.get("observedGeneration", 0) >= deployment["metadata"].get("generation", 0)
        and not status.get("replicas", 0)
        and not fleet.active + fleet.leaving
    )


def in_place(wanted: int, old: Mapping[str, Fleet], new: Fleet, held: int = 0) -> Shares:
    """The next step from the old Deployments, by name, to the new one that is to run `wanted` pods.

    At most one of the wanted pods is missing on account of the takeover: old ones are kept for all but one of
    those that the new Deployment has not made available. They are never brought back. `held` is the room of
    pods that nothing here decides about, because their Deployment is being deleted.
    """
    kept = _keep(old, max(0, wanted - 1 - new.available))
    # A Deployment fills up to its replicas at any moment, whatever is on its way out.
    taken = sum(max(kept[name], fleet.active) + fleet.leaving for name, fleet in old.items())
    free = wanted - taken - held - new.leaving
    # What exists is not taken back for want of room, save what is more than the old ones leave of `wanted`.
    return Shares(kept, max(0, free, min(new.active, wanted - sum(kept.values()))))


def _keep(old: Mapping[str, Fleet], floor: int) -> dict[str, int]:
    """Replicas that are left of each, `floor` in all if there are as many: what does not serve goes first."""
    kept = {name: fleet.replicas for name, fleet in old.items()}
    surplus = sum(kept.values()) - floor
    # A ReplicaSet that shrinks takes its pods that are not ready first, so these can be told apart here.
    in_order = sorted(old, key=lambda name: (old[name].available > 0, name))
    for spared in (True, False):
        for name in in_order:
            lowest = min(old[name].available, kept[name]) if spared else 0
            taken = max(0, min(surplus, kept[name] - lowest))
            kept[name] -= taken
            surplus -= taken
    return kept


def _fleet(seen: Observation, deployment: Object) -> Fleet:
    """The pods of a Deployment, without those that have ended, or whose node can no longer end them."""
    model, name = seen.resource["metadata"]["name"], deployment["metadata"]["name"]
    pods = [
        pod
        for pod in seen.pods
        if names.deployment_name(model, hash_of_pod(pod)) == name
        and not has_ended(pod)
        and not is_overdue(pod, seen.now)
    ]
    leaving = sum(map(is_deleting, pods))
    return Fleet(
        replicas=wanted_replicas(deployment),
        available=available_replicas(deployment),
        active=len(pods) - leaving,
        leaving=leaving,
    )
