"""What each condition of a SpeculativeModel says: pure functions of what was seen and planned.

Available says that something serves; Progressing that what is wanted is still on its way; Ready that the
observed generation is served. When it is not, Ready carries the nearest cause, down to the container's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Final

from outrider_operator import names
from outrider_operator.observation import (
    Object,
    Observation,
    available_replicas,
    existing_replicas,
    has_ended,
    has_taken_over,
    is_complete,
    is_deleting,
    is_ready,
)
from outrider_operator.plan import Plan
from outrider_operator.report import ConditionType
from outrider_operator.sharedcache import cache_trouble
from outrider_operator.spec import Replacement, SpeculativeModelSpec
from outrider_operator.trouble import (
    NO_ROOM,
    Trouble,
    advice,
    deadline_trouble,
    deployment_trouble,
    pod_trouble,
)
from outrider_serving.settings import PodState

MAX_NAMES: Final = 5
"""Of namesakes, how many are told by name."""

_CASCADES: Final = frozenset({"foregroundDeletion", "orphan"})
"""Finalizers by which the garbage collector does its work: they end by themselves."""


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition says, before it is dated."""

    holds: bool
    reason: str
    message: str


_SCALED_TO_ZERO: Final = Finding(False, "ScaledToZero", "replicas is 0")


@dataclass(frozen=True, slots=True)
class View:
    """The observation with what several conditions need worked out once."""

    seen: Observation
    plan: Plan
    errors: Sequence[str]
    current: Object | None
    pods: tuple[Object, ...]
    reported: int | None
    refused: str | None
    keys_refused: str | None
    not_loaded: str | None
    not_shared: str | None
    trouble: Trouble | None
    deployments: tuple[Object, ...]

    @property
    def wanted(self) -> int:
        """Pods that are asked for."""
        return self.plan.spec.replicas if self.plan.spec else 0

    @property
    def earlier(self) -> tuple[Object, ...]:
        """Deployments of other pod hashes."""
        return tuple(found for found in self.deployments if found is not self.current)

    @property
    def existing(self) -> int:
        """Pods that are there and not on their way out, of any pod hash."""
        return sum(existing_replicas(deployment) for deployment in self.deployments)

    @property
    def serving(self) -> int:
        """Pods that serve, of any pod hash."""
        return sum(available_replicas(deployment) for deployment in self.deployments)

    @property
    def ready(self) -> int:
        """Pods of the wanted pod hash that are ready."""
        return sum(is_ready(pod) for pod in self.pods)


def findings(view: View) -> dict[ConditionType, Finding]:
    """What the conditions say; one that is left out does not exist."""
    available, progressing = _available(view), _progressing(view)
    found = {
        ConditionType.READY: _ready(view, available, progressing),
        ConditionType.AVAILABLE: available,
        ConditionType.PROGRESSING: progressing,
    }
    if view.plan.conflicts:
        found[ConditionType.NAME_CONFLICT] = Finding(True, "NotOurs", "; ".join(view.plan.conflicts))
    # Each model has a Service of its own, and other keys are in force: neither is a reason not to be ready.
    if view.seen.namesakes:
        found[ConditionType.SERVED_NAME_CONFLICT] = Finding(True, "AlsoServed", _namesakes(view.seen))
    if view.keys_refused is not None:
        found[ConditionType.KEYS_REFUSED] = Finding(True, "BadEntry", view.keys_refused)
    # Requests are served as they would be with them, only slower.
    if view.not_loaded is not None:
        found[ConditionType.PROPOSER_NOT_LOADED] = Finding(True, "WithoutProposals", view.not_loaded)
    if view.not_shared is not None:
        found[ConditionType.SHARED_CACHE_NOT_CONNECTED] = Finding(True, "LearnsAlone", view.not_shared)
    return found


def view_of(seen: Observation, plan: Plan, errors: Sequence[str]) -> View:
    """The observation, and what follows from it; errors are those of applying the plan."""
    deployments = tuple(seen.deployments())
    name = names.deployment_name(seen.resource["metadata"]["name"], plan.pod_hash)
    current = next((d for d in deployments if d["metadata"]["name"] == name), None)
    pods = _present(seen.pods_of(plan.pod_hash), complete=current is not None and is_complete(current))
    ready = [pod["metadata"]["name"] for pod in pods if is_ready(pod)]
    states = {name: report.state for name in ready if (report := seen.reports.get(name)) and report.state}
    return View(
        seen=seen,
        plan=plan,
        errors=errors,
        current=current,
        pods=pods,
        reported=_reported(seen, ready, states.values()),
        refused=_first({pod: state.settings_error for pod, state in states.items()}),
        keys_refused=_first({pod: state.keys_error for pod, state in states.items()}),
        not_loaded=_first({pod: state.proposer_error for pod, state in states.items()}),
        not_shared=_first({pod: cache_trouble(state) for pod, state in states.items()}),
        trouble=_trouble(seen, plan.spec, current, pods),
        deployments=deployments,
    )


def _present(pods: Sequence[Object], *, complete: bool) -> tuple[Object, ...]:
    """The pods to speak of: those that ended come last, and not at all once others stand in for them."""
    going = [pod for pod in pods if not has_ended(pod)]
    ended = [] if complete else [pod for pod in pods if has_ended(pod)]
    return (*going, *ended)


def _reported(seen: Observation, ready: Sequence[str], states: Collection[PodState]) -> int | None:
    """The lowest generation of the ready pods; a silent one may still have what was reported last."""
    generations = [state.generation for state in states]
    if len(states) < len(ready):
        last = seen.status.get("settings", {}).get("reportedGeneration")
        if last is None:
            return None
        generations.append(int(last))
    return min(generations, default=None)


def _first(errors: Mapping[str, str | None]) -> str | None:
    """The first error that a pod reports, with its name."""
    return next((f"pod {pod}: {error}" for pod, error in errors.items() if error), None)


def _trouble(
    seen: Observation, spec: SpeculativeModelSpec | None, current: Object | None, pods: Sequence[Object]
) -> Trouble | None:
    """The first trouble of a pod, else that of the Deployment, with what of the spec it comes from."""
    if spec is None:
        return None
    warnings, seconds = seen.warnings, spec.start_seconds
    found = (pod_trouble(pod, warnings.get(pod["metadata"]["name"]), seconds) for pod in pods)
    trouble = next(filter(None, found), None)
    if trouble is None:
        trouble = deployment_trouble(current) if current is not None else None
    if trouble is None:
        return None
    hints = list(advice(trouble, spec))
    old = [found for found in seen.deployments() if found is not current and available_replicas(found)]
    if old and trouble.reason in NO_ROOM and spec.replacement is Replacement.SURGE:
        hints.append(
            "the pods of the earlier spec keep serving until the new ones do: "
            "if there is no room for both, spec.replacement: inPlace ends the old ones first"
        )
    return replace(trouble, message="; ".join([trouble.message, *hints]))


def _failed(errors: Sequence[str]) -> tuple[str, str]:
    """Reason and message of what the API server refused."""
    if any("because it is being terminated" in error for error in errors):
        return "NamespaceTerminating", "the namespace is being deleted: nothing can be created in it"
    return "ApplyFailed", "; ".join(errors)


def _deleting(found: Sequence[Object]) -> tuple[str, str]:
    """Reason and message of children that are on their way out, those first that cannot go by themselves."""
    held = {_title(child): finalizers for child in found if (finalizers := _finalizers(child))}
    if held:
        return "DeletionBlocked", "; ".join(
            f"{title} is being deleted and waits for its finalizers: {', '.join(finalizers)}"
            for title, finalizers in held.items()
        )
    return "ChildDeleting", "; ".join(f"{_title(child)} is being deleted" for child in found)


def _finalizers(child: Object) -> list[str]:
    return [one for one in child["metadata"].get("finalizers", ()) if one not in _CASCADES]


def _title(child: Object) -> str:
    return f"{child['kind']} {child['metadata']['name']}"


def _namesakes(seen: Observation) -> str:
    shown = ", ".join(seen.namesakes[:MAX_NAMES])
    more = " and more" if len(seen.namesakes) > MAX_NAMES else ""  # not how many: each would hear of each
    return (
        f"spec.model.servedName: {names.served_name(seen.resource)} is also the name by which requests "
        f"address {shown}{more}, of this namespace; each has a Service of "
        "its own, but whoever routes or counts by model name takes them for one"
    )


def _available(view: View) -> Finding:
    if view.serving:
        return Finding(True, "Serving", f"{_pods(view.serving)} available")
    if view.plan.spec is not None and view.wanted == 0:
        return _SCALED_TO_ZERO
    return Finding(False, "NoPods", "no pod is available")


def _progressing(view: View) -> Finding:
    plan = view.plan
    if plan.spec is None:
        return Finding(
            False, "InvalidSpec", "waiting for a valid spec; until then nothing is changed or brought back"
        )
    if plan.conflicts:
        return Finding(False, "NameConflict", "waiting for the names of its children")
    if view.errors:
        reason, message = _failed(view.errors)
        return Finding(reason == "ApplyFailed", reason, message)
    if plan.deleting:
        return Finding(True, *_deleting(plan.deleting))
    if plan.actions:
        titles = ", ".join(action.title for action in plan.actions)
        return Finding(True, "Reconciling", f"brought up to date: {titles}")
    if view.wanted == 0:
        return _stopping(view)
    if view.current is None or not has_taken_over(view.current, view.wanted):
        return _takeover(view)
    if view.earlier:
        ending = Finding(True, "OldPodsEnding", "pods of an earlier spec are being removed")
        return _blocked(view) or ending
    return _settings_progress(view)


def _stopping(view: View) -> Finding:
    """How far the pods are on their way out where none are wanted."""
    observed = view.current is not None and is_complete(view.current)
    if observed and not view.existing and not view.earlier:
        return _SCALED_TO_ZERO
    return _blocked(view) or Finding(True, "ScalingToZero", f"replicas is 0; {_pods(view.existing)} left")


def _takeover(view: View) -> Finding:
    """How far the pods of the wanted pod hash are."""
    late = deadline_trouble(view.current) if view.current is not None else None
    if late is not None:
        return Finding(False, late.reason, (view.trouble or late).message)
    if blocked := _blocked(view):
        return blocked
    message = f"{view.ready} of {_pods(view.wanted)} ready"
    in_place = view.plan.spec is not None and view.plan.spec.replacement is Replacement.IN_PLACE
    if in_place and view.earlier:
        message += "; old pods end one at a time, each once the new pod in the last one's place serves"
    elif view.trouble is not None and view.trouble.reason in NO_ROOM:
        message += f"; {view.trouble.message}"
    return Finding(True, "PodsStarting", message)


def _blocked(view: View) -> Finding | None:
    """That a Deployment of an earlier spec does not go though it was told to."""
    held = [found for found in view.earlier if is_deleting(found) and _finalizers(found)]
    return Finding(True, *_deleting(held)) if held else None


def _settings_progress(view: View) -> Finding:
    generation = view.plan.settings.generation if view.plan.settings else 0
    if view.refused is not None:
        return Finding(True, "SettingsRefused", view.refused)
    if view.reported is None:
        errors = sorted(
            f"pod {pod}: {report.error}"
            for pod, report in view.seen.reports.items()
            if report.error is not None
        )
        return Finding(True, "SettingsUnknown", "; ".join(errors) or "no pod has reported its settings yet")
    if view.reported < generation:
        return Finding(
            True, "SettingsPending", f"a pod has settings generation {view.reported}, {generation} is wanted"
        )
    return Finding(False, "Complete", "all that is wanted is in force")


def _ready(view: View, available: Finding, progressing: Finding) -> Finding:
    if view.plan.spec is None:
        return Finding(False, "InvalidSpec", "; ".join(view.plan.problems))
    if view.plan.conflicts:
        return Finding(False, "NameConflict", "; ".join(view.plan.conflicts))
    if view.errors:
        return Finding(False, *_failed(view.errors))
    if view.plan.deleting:
        return Finding(False, *_deleting(view.plan.deleting))
    if view.wanted == 0:  # from the moment on that none are wanted, whatever is still there
        return _SCALED_TO_ZERO
    if view.trouble is not None:
        return Finding(False, view.trouble.reason, view.trouble.message)
    if not available.holds:
        cause = progressing if progressing.holds else available
        return Finding(False, cause.reason, cause.message)
    if progressing.holds:
        return Finding(False, progressing.reason, progressing.message)
    return Finding(True, "Serving", f"{_pods(view.ready)} ready, the observed generation is in force")


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"
