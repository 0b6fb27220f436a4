"""The status of a SpeculativeModel, and when to look at it again: pure functions of what was seen."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime
from typing import Final

from outrider_operator import names
from outrider_operator.conditions import Finding, View, findings, view_of
from outrider_operator.config import OperatorConfig
from outrider_operator.observation import Object, Observation, is_ready
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
from outrider_serving.settings import ModelState

_LINGER: Final = 10
"""A resource on its way is looked at again when a tenth of the time that it takes so far has passed again."""


def next_status(seen: Observation, plan: Plan, errors: Sequence[str] = ()) -> Object:
    """The status to write; errors are those of applying the plan."""
    view = view_of(seen, plan, errors)
    status = SpeculativeModelStatus(
        observed_generation=seen.generation,
        conditions=[_dated(seen, kind, finding) for kind, finding in findings(view).items()],
        replicas=view.existing,
        ready_replicas=sum(int(d.get("status", {}).get("readyReplicas", 0)) for d in view.deployments),
        selector=f"{names.MODEL_LABEL}={seen.resource['metadata']['name']}",
        settings=_settings(view),
        model=_model(view),
        proposer=_proposer(view),
    )
    return status.model_dump(mode="json", by_alias=True, exclude_none=True)


def _is_settled(status: Object) -> bool:
    """Whether nothing more is expected to happen by itself soon."""
    conditions = {condition["type"]: condition for condition in status.get("conditions", ())}
    ready, progressing = conditions.get("Ready", {}), conditions.get("Progressing", {})
    return progressing.get("status") == "False" and (
        ready.get("status") == "True"
        or ready.get("reason") in ("ScaledToZero", "InvalidSpec", "NamespaceTerminating")
    )


def next_look(status: Object, now: datetime, config: OperatorConfig) -> float:
    """Seconds until a resource with this status is looked at again, if nothing is heard of it before.

    What the API server knows is heard of; a look is for what pods say on their admin ports, and for what was
    refused. It comes soon after a change, and the later, the longer nothing has come of it.
    """
    if _is_settled(status):
        return config.resync_seconds
    moments = [
        datetime.fromisoformat(condition["lastTransitionTime"])
        for condition in status.get("conditions", ())
        if condition["type"] in (ConditionType.READY, ConditionType.PROGRESSING)
    ]
    elapsed = (now - max(moments)).total_seconds() if moments else 0.0
    return min(config.resync_seconds, max(config.progress_seconds, elapsed / _LINGER))


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
