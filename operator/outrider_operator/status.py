"""The status of a SpeculativeModel, and the events of its transitions: pure functions of what was seen.

Available says that something serves; Progressing that what is wanted is still on its way; Ready that the
observed generation is served. When it is not, Ready carries the nearest cause, down to the container's.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

from outrider_operator import names
from outrider_operator.observation import (
    Object,
    Observation,
    available_replicas,
    has_ended,
    is_complete,
    is_ready,
)
from outrider_operator.plan import Plan
from outrider_operator.report import (
    MAX_MESSAGE,
    Condition,
    ConditionStatus,
    ConditionType,
    ModelStatus,
    SettingsStatus,
    SpeculativeModelStatus,
    reason_word,
)
from outrider_operator.trouble import Trouble, deployment_trouble, pod_trouble
from outrider_serving.settings import ModelState, PodState


@dataclass(frozen=True, slots=True)
class Finding:
    """What a condition says, before it is dated."""

    holds: bool
    reason: str
    message: str


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
    trouble: Trouble | None
    deployments: tuple[Object, ...]

    @property
    def wanted(self) -> int:
        """Pods that are asked for."""
        return self.plan.spec.replicas if self.plan.spec else 0

    @property
    def serving(self) -> int:
        """Pods that serve, of any pod hash."""
        return sum(available_replicas(deployment) for deployment in self.deployments)

    @property
    def ready(self) -> int:
        """Pods of the wanted pod hash that are ready."""
        return sum(is_ready(pod) for pod in self.pods)


def next_status(seen: Observation, plan: Plan, errors: Sequence[str] = ()) -> Object:
    """The status to write; errors are those of applying the plan."""
    view = _view(seen, plan, errors)
    available, progressing = _available(view), _progressing(view)
    findings = {
        ConditionType.READY: _ready(view, available, progressing),
        ConditionType.AVAILABLE: available,
        ConditionType.PROGRESSING: progressing,
    }
    if plan.conflicts:
        findings[ConditionType.NAME_CONFLICT] = Finding(True, "NotOurs", "; ".join(plan.conflicts))
    if view.keys_refused is not None:  # the other keys are in force, so this is no reason not to be ready
        findings[ConditionType.KEYS_REFUSED] = Finding(True, "BadEntry", view.keys_refused)
    status = SpeculativeModelStatus(
        observed_generation=seen.generation,
        conditions=[_dated(seen, kind, finding) for kind, finding in findings.items()],
        replicas=sum(int(d.get("status", {}).get("replicas", 0)) for d in view.deployments),
        ready_replicas=sum(int(d.get("status", {}).get("readyReplicas", 0)) for d in view.deployments),
        selector=f"{names.MODEL_LABEL}={seen.resource['metadata']['name']}",
        settings=_settings(view),
        model=_model(view),
        proposer=_proposer(view),
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def is_settled(status: Object) -> bool:
    """Whether nothing more is expected to happen by itself soon."""
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    ready, progressing = conditions.get("Ready", {}), conditions.get("Progressing", {})
    return progressing.get("status") == "False" and (
        ready.get("status") == "True" or ready.get("reason") in ("ScaledToZero", "InvalidSpec")
    )


def _view(seen: Observation, plan: Plan, errors: Sequence[str]) -> View:
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
        trouble=_trouble(seen, current, pods),
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


def _trouble(seen: Observation, current: Object | None, pods: Sequence[Object]) -> Trouble | None:
    for pod in pods:
        if found := pod_trouble(pod, seen.warnings.get(pod["metadata"]["name"])):
            return found
    return deployment_trouble(current) if current is not None else None


def _available(view: View) -> Finding:
    if view.serving:
        return Finding(True, "Serving", f"{_pods(view.serving)} available")
    if view.plan.spec is not None and view.wanted == 0:
        return Finding(False, "ScaledToZero", "replicas is 0")
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
        return Finding(True, "ApplyFailed", "; ".join(view.errors))
    if plan.actions:
        titles = ", ".join(action.title for action in plan.actions)
        return Finding(True, "Reconciling", f"brought up to date: {titles}")
    if view.current is None or not is_complete(view.current):
        if view.trouble is not None and view.trouble.reason == "ProgressDeadlineExceeded":
            return Finding(False, view.trouble.reason, view.trouble.message)
        return Finding(True, "PodsStarting", f"{view.ready} of {_pods(view.wanted)} ready")
    if view.wanted == 0:
        return Finding(False, "ScaledToZero", "replicas is 0")
    if len(view.deployments) > 1:
        return Finding(True, "OldPodsEnding", "pods of an earlier spec are being removed")
    return _settings_progress(view)


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
        return Finding(False, "ApplyFailed", "; ".join(view.errors))
    if view.trouble is not None and view.wanted:
        return Finding(False, view.trouble.reason, view.trouble.message)
    if not available.holds:
        cause = progressing if progressing.holds and view.wanted else available
        return Finding(False, cause.reason, cause.message)
    if progressing.holds:
        return Finding(False, progressing.reason, progressing.message)
    return Finding(True, "Serving", f"{_pods(view.ready)} ready, the observed generation is in force")


def _dated(seen: Observation, kind: ConditionType, finding: Finding) -> Condition:
    """The finding as a condition; its time moves only when its status does."""
    message = finding.message
    if len(message) > MAX_MESSAGE:
        message = message[: MAX_MESSAGE - 1] + "…"
    status = ConditionStatus.TRUE if finding.holds else ConditionStatus.FALSE
    moment = seen.now.strftime("%Y-%m-%dT%H:%M:%SZ")
    for old in seen.status.get("conditions", ()):
        if old["type"] == kind and old["status"] == status:
            moment = old["lastTransitionTime"]
    return Condition(
        type=kind,
        status=status,
        reason=reason_word(finding.reason, fallback="PodFailed"),
        message=message,
        observed_generation=seen.generation,
        last_transition_time=moment,
    )


def _settings(view: View) -> SettingsStatus | None:
    """Those that the ConfigMap holds; until it holds the wanted ones, those of before.

    So the generation is never lower than one that was used, and what cannot be written is not counted on.
    """
    settings = view.plan.settings
    if settings is None or not view.plan.settings_written:
        old = view.seen.status.get("settings")
        return SettingsStatus.model_validate(old) if old else None
    return SettingsStatus(
        generation=settings.generation, in_force=settings.in_force, reported_generation=view.reported
    )


def _model(view: View) -> ModelStatus | None:
    """As a ready pod reports it, one of the wanted spec first; what was known while none answers."""
    ready = [pod for pod in (*view.pods, *view.seen.pods) if is_ready(pod)]
    for pod in ready:
        report = view.seen.reports.get(pod["metadata"]["name"])
        if report is not None and report.state is not None and report.state.model is not None:
            return _model_status(report.state.model)
    old = view.seen.status.get("model")
    return ModelStatus.model_validate(old) if ready and old else None


def _model_status(model: ModelState) -> ModelStatus:
    return ModelStatus(
        name=model.name[:256],
        revision=model.revision[:256],
        dtype=model.dtype[:256],
        context_length=model.context_length,
    )


def _proposer(view: View) -> str | None:
    """The wanted method once pods report it in force, or while none serves; else what was in force."""
    settings = view.plan.settings
    if settings is not None and (
        not view.serving or (view.reported is not None and view.reported >= settings.generation)
    ):
        return str(settings.proposer.method)
    old = view.seen.status.get("proposer")
    return None if old is None else str(old)


def _pods(count: int) -> str:
    return f"{count} pod" if count == 1 else f"{count} pods"
