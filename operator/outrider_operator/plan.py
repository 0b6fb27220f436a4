"""The decision: from an observation to what to apply, scale and delete, each with its reason in words.

Pure of the clock and of the client. Nothing is planned for a resource whose spec is not valid (what was last
good keeps serving), or whose children's names are taken. `intent` is what the spec alone decides; `decide`
holds it against what was seen.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Final

from pydantic import ValidationError

from outrider_operator import names
from outrider_operator.children import (
    Object,
    Owner,
    children,
    config_map,
    network_policy,
    serving_image,
    settings_of,
)
from outrider_operator.config import OperatorConfig
from outrider_operator.diff import covers
from outrider_operator.hashes import pod_hash
from outrider_operator.observation import (
    Observation,
    available_replicas,
    has_taken_over,
    is_deleting,
    wanted_replicas,
)
from outrider_operator.spec import Replacement, SpeculativeModelSpec
from outrider_operator.takeover import Shares, is_empty, takeover
from outrider_serving.settings import MAX_COUNT, PodSettings

Key = tuple[str, str]
"""Kind and name."""

_HIGHEST_GENERATION: Final = MAX_COUNT // 2
"""Nobody counts that far: a higher one was written by someone else, and must leave room to count on."""


@dataclass(frozen=True, slots=True)
class Apply:
    """Make an object as it is wanted."""

    object: Object
    reason: str
    created: bool

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.object['kind']} {self.object['metadata']['name']}"


@dataclass(frozen=True, slots=True)
class Scale:
    """Change how many pods a Deployment of ours runs, and nothing else of it; the uid keeps a namesake safe.

    By a merge: an apply that says less than the last one would take back all else that we have set.
    """

    name: str
    uid: str
    replicas: int
    reason: str

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"Deployment {self.name}"

    @property
    def patch(self) -> Object:
        """What to merge into the Deployment; the API server refuses it (409) where the uid is another."""
        return {"metadata": {"uid": self.uid}, "spec": {"replicas": self.replicas}}


@dataclass(frozen=True, slots=True)
class Delete:
    """Remove an object of ours; the uid keeps a namesake safe."""

    kind: str
    name: str
    uid: str
    reason: str

    @property
    def title(self) -> str:
        """Kind and name."""
        return f"{self.kind} {self.name}"


@dataclass(frozen=True, slots=True)
class Intent:
    """What a SpeculativeModel asks for by itself, before anything is seen of its children."""

    spec: SpeculativeModelSpec | None = None
    """The spec if it is valid."""

    problems: tuple[str, ...] = ()
    """Why it is not, field by field."""

    pod_hash: str = ""

    children: tuple[Object, ...] = ()
    """As wanted, except the generation within the settings file, which depends on what is stored."""

    unwanted: tuple[Key, ...] = ()
    """Children of another configuration of the operator: to be removed where they are ours."""

    @property
    def names(self) -> tuple[Key, ...]:
        """What is created if it is not there; nothing where the spec is not valid."""
        return tuple(map(_key, self.children))


@dataclass(frozen=True, slots=True)
class Plan:
    """What to do, and what the status needs to know of the decision."""

    spec: SpeculativeModelSpec | None = None
    """The spec if it is valid."""

    problems: tuple[str, ...] = ()
    """Why it is not, field by field."""

    pod_hash: str = ""

    settings: PodSettings | None = None
    """The wanted content of the settings file."""

    settings_written: bool = False
    """Whether the ConfigMap holds just that: only then is its generation used, and fit to be published."""

    applies: tuple[Apply, ...] = ()
    scales: tuple[Scale, ...] = ()
    deletes: tuple[Delete, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Objects that have a child's name but are not ours."""

    deleting: tuple[Object, ...] = ()
    """Children of ours that are wanted but on their way out: they come back once they are gone."""

    @property
    def actions(self) -> tuple[Apply | Scale | Delete, ...]:
        """What to do, in this order."""
        return (*self.applies, *self.scales, *self.deletes)


def intent(resource: Object, config: OperatorConfig) -> Intent:
    """What a SpeculativeModel, as the API has it, asks for."""
    try:
        spec = SpeculativeModelSpec.model_validate(resource.get("spec") or {})
    except ValidationError as error:
        return Intent(problems=_problems(error))
    owner = Owner.of(resource)
    unwanted = () if config.network_policies else (_key(network_policy(owner, config)),)
    return Intent(
        spec=spec,
        pod_hash=pod_hash(spec, serving_image(spec, config)),
        children=children(owner, spec, config, 0),
        unwanted=unwanted,
    )


def decide(intent: Intent, seen: Observation) -> Plan:
    """What to do about one SpeculativeModel."""
    spec = intent.spec
    if spec is None:
        return Plan(problems=intent.problems)
    owner = Owner.of(seen.resource)
    stored = _stored_settings(seen, owner)
    settings = settings_of(spec, _settings_generation(seen, stored, spec))
    current = names.deployment_name(owner.name, intent.pod_hash)
    earlier = _earlier(seen, current)
    shares = takeover(seen, spec, current, earlier)
    wanted = tuple(_settled(child, owner, settings, shares) for child in intent.children)
    decided = Plan(
        spec=spec,
        pod_hash=intent.pod_hash,
        settings=settings,
        settings_written=settings == stored,
        deleting=tuple(filter(None, (_deleting(seen, child) for child in wanted))),
    )
    conflicts = tuple(filter(None, (_conflict(seen, child) for child in wanted)))
    if conflicts:
        return replace(decided, conflicts=conflicts)
    return replace(
        decided,
        applies=tuple(filter(None, (_apply(seen, child) for child in wanted))),
        scales=_scales(earlier, shares, current),
        deletes=(*_unwanted(seen, intent.unwanted), *_superseded(seen, spec, current, earlier)),
    )


def _key(child: Object) -> Key:
    return str(child["kind"]), str(child["metadata"]["name"])


def _settled(child: Object, owner: Owner, settings: PodSettings, shares: Shares) -> Object:
    """A child of an intent with what only the observation decides."""
    if child["kind"] == "ConfigMap":
        return config_map(owner, settings)
    if child["kind"] == "Deployment":
        return {**child, "spec": {**child["spec"], "replicas": shares.new}}
    return child


def _problems(error: ValidationError) -> tuple[str, ...]:
    return tuple(
        f"{'.'.join(['spec', *map(str, problem['loc'])])}: {problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _settings_generation(seen: Observation, current: PodSettings | None, spec: SpeculativeModelSpec) -> int:
    """The generation in the ConfigMap if its content is the wanted one, else one that was never used."""
    known = int(seen.status.get("settings", {}).get("generation", 0))
    if known > _HIGHEST_GENERATION:
        known = 0
    if current is None:
        return known + 1
    unchanged = current == settings_of(spec, current.generation)
    return (
        current.generation
        if unchanged and current.generation >= known
        else max(known, current.generation) + 1
    )


def _stored_settings(seen: Observation, owner: Owner) -> PodSettings | None:
    """What our ConfigMap holds, if pods can read it."""
    stored = seen.children.get(("ConfigMap", owner.name))
    if stored is None or not seen.owns(stored):
        return None
    try:
        text = stored.get("data", {}).get(names.SETTINGS_FILE, "")
        settings = PodSettings.model_validate(json.loads(text))
    except ValueError:
        return None
    return settings if settings.generation <= _HIGHEST_GENERATION else None


def _conflict(seen: Observation, child: Object) -> str | None:
    kind, name = _key(child)
    live = seen.children.get((kind, name))
    if live is None or seen.owns(live):
        return None
    for reference in live["metadata"].get("ownerReferences", ()):
        if reference.get("kind") == names.KIND and reference.get("name") == seen.resource["metadata"]["name"]:
            return f"{kind} {name} belongs to an earlier SpeculativeModel of this name and is being removed"
    return f"{kind} {name} exists and does not belong to this SpeculativeModel"


def _apply(seen: Observation, child: Object) -> Apply | None:
    live = seen.children.get(_key(child))
    if live is None:
        return Apply(child, reason="it did not exist", created=True)
    if is_deleting(live):
        return None  # it comes back once it is gone
    if covers(live, child):
        return None
    return Apply(child, reason="it was not as the SpeculativeModel asks", created=False)


def _deleting(seen: Observation, child: Object) -> Object | None:
    live = seen.children.get(_key(child))
    return live if live is not None and is_deleting(live) and seen.owns(live) else None


def _unwanted(seen: Observation, unwanted: tuple[Key, ...]) -> tuple[Delete, ...]:
    """What the operator was told not to make any more."""
    found = ((kind, name, seen.children.get((kind, name))) for kind, name in unwanted)
    return tuple(
        Delete(kind, name, live["metadata"]["uid"], "the operator is told to make none")
        for kind, name, live in found
        if live is not None and seen.owns(live) and not is_deleting(live)
    )


def _earlier(seen: Observation, current: str) -> tuple[Object, ...]:
    """Deployments of earlier pod hashes."""
    return tuple(
        deployment
        for deployment in seen.deployments()
        if deployment["metadata"]["name"] != current and not is_deleting(deployment)
    )


def _scales(earlier: tuple[Object, ...], shares: Shares, current: str) -> tuple[Scale, ...]:
    """Old Deployments that are to run fewer pods than they are told to."""
    return tuple(
        Scale(metadata["name"], metadata["uid"], replicas, f"{current} takes over in place")
        for deployment in earlier
        if (metadata := deployment["metadata"])
        and (replicas := shares.old[metadata["name"]]) != wanted_replicas(deployment)
    )


def _superseded(
    seen: Observation, spec: SpeculativeModelSpec, current: str, earlier: tuple[Object, ...]
) -> tuple[Delete, ...]:
    """Deployments of earlier pod hashes that have nothing left to do.

    Once the current one has taken over, all of them. Until then what serves keeps serving. In place, one goes
    that has no pods left. Else one without an available pod goes only if another of them serves: it may be
    the last good one, restarting.
    """
    live = seen.children.get(("Deployment", current))
    complete = live is not None and has_taken_over(live, spec.replicas)
    serving = any(available_replicas(deployment) for deployment in earlier)
    deletes = []
    for deployment in earlier:
        if complete:
            reason = f"{current} has taken over"
        elif spec.replacement is Replacement.IN_PLACE:
            if not is_empty(seen, deployment):
                continue
            reason = "none of its pods are left"
        elif serving and not available_replicas(deployment):
            reason = "it was superseded before it served"
        else:
            continue
        metadata = deployment["metadata"]
        deletes.append(Delete("Deployment", metadata["name"], metadata["uid"], reason))
    return tuple(deletes)
