"""The decision: from an observation to what to apply and what to delete, each with its reason in words.

Pure of the clock and of the client. Nothing is planned for a resource whose spec is not valid (what was last
good keeps serving), or whose children's names are taken.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace

from pydantic import ValidationError

from outrider_operator import names
from outrider_operator.children import Object, Owner, children, serving_image, settings_of
from outrider_operator.config import OperatorConfig
from outrider_operator.diff import covers
from outrider_operator.hashes import pod_hash
from outrider_operator.observation import Observation, available_replicas, is_complete
from outrider_operator.spec import SpeculativeModelSpec
from outrider_serving.settings import PodSettings


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
    deletes: tuple[Delete, ...] = ()
    conflicts: tuple[str, ...] = ()
    """Objects that have a child's name but are not ours."""

    @property
    def actions(self) -> tuple[Apply | Delete, ...]:
        """What to do, in this order."""
        return (*self.applies, *self.deletes)


def plan(seen: Observation, config: OperatorConfig) -> Plan:
    """What to do about one SpeculativeModel."""
    try:
        spec = SpeculativeModelSpec.model_validate(seen.resource.get("spec") or {})
    except ValidationError as error:
        return Plan(problems=_problems(error))
    owner = Owner.of(seen.resource)
    stored = _stored_settings(seen, owner)
    settings = settings_of(spec, _settings_generation(seen, stored, spec))
    wanted = children(owner, spec, config, settings.generation)
    hashed = pod_hash(spec, serving_image(spec, config))
    decided = Plan(spec=spec, pod_hash=hashed, settings=settings, settings_written=settings == stored)
    conflicts = tuple(filter(None, (_conflict(seen, child) for child in wanted)))
    if conflicts:
        return replace(decided, conflicts=conflicts)
    return replace(
        decided,
        applies=tuple(filter(None, (_apply(seen, child) for child in wanted))),
        deletes=_superseded(seen, names.deployment_name(owner.name, hashed)),
    )


def wanted_children(seen: Observation, config: OperatorConfig) -> tuple[tuple[str, str], ...]:
    """Kind and name of every child of a valid spec: what an observer has to look at."""
    try:
        spec = SpeculativeModelSpec.model_validate(seen.resource.get("spec") or {})
    except ValidationError:
        return ()
    wanted = children(Owner.of(seen.resource), spec, config, 0)
    return tuple((child["kind"], child["metadata"]["name"]) for child in wanted)


def _problems(error: ValidationError) -> tuple[str, ...]:
    return tuple(
        f"{'.'.join(['spec', *map(str, problem['loc'])])}: {problem['msg'].removeprefix('Value error, ')}"
        for problem in error.errors(include_url=False, include_context=False, include_input=False)
    )


def _settings_generation(seen: Observation, current: PodSettings | None, spec: SpeculativeModelSpec) -> int:
    """The generation in the ConfigMap if its content is the wanted one, else one that was never used."""
    known = int(seen.status.get("settings", {}).get("generation", 0))
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
    config_map = seen.children.get(("ConfigMap", owner.name))
    if config_map is None or not seen.owns(config_map):
        return None
    try:
        text = config_map.get("data", {}).get(names.SETTINGS_FILE, "")
        return PodSettings.model_validate(json.loads(text))
    except ValueError:
        return None


def _conflict(seen: Observation, child: Object) -> str | None:
    kind, name = child["kind"], child["metadata"]["name"]
    live = seen.children.get((kind, name))
    if live is None or seen.owns(live):
        return None
    for reference in live["metadata"].get("ownerReferences", ()):
        if reference.get("kind") == names.KIND and reference.get("name") == seen.resource["metadata"]["name"]:
            return f"{kind} {name} belongs to an earlier SpeculativeModel of this name and is being removed"
    return f"{kind} {name} exists and does not belong to this SpeculativeModel"


def _apply(seen: Observation, child: Object) -> Apply | None:
    live = seen.children.get((child["kind"], child["metadata"]["name"]))
    if live is None:
        return Apply(child, reason="it did not exist", created=True)
    if "deletionTimestamp" in live["metadata"]:
        return None  # it comes back once it is gone
    if covers(live, child):
        return None
    return Apply(child, reason="it was not as the SpeculativeModel asks", created=False)


def _superseded(seen: Observation, current: str) -> tuple[Delete, ...]:
    """Deployments of earlier pod hashes that have nothing left to do.

    Once the current one is complete, all of them. Until then what serves keeps serving, and one without an
    available pod goes only if another of them serves: else it may be the last good one, restarting.
    """
    live = seen.children.get(("Deployment", current))
    complete = live is not None and is_complete(live)
    earlier = [
        deployment
        for deployment in seen.deployments()
        if deployment["metadata"]["name"] != current and "deletionTimestamp" not in deployment["metadata"]
    ]
    serving = any(available_replicas(deployment) for deployment in earlier)
    deletes = []
    for deployment in earlier:
        if complete:
            reason = f"{current} has taken over"
        elif serving and not available_replicas(deployment):
            reason = "it was superseded before it served"
        else:
            continue
        metadata = deployment["metadata"]
        deletes.append(Delete("Deployment", metadata["name"], metadata["uid"], reason))
    return tuple(deletes)
