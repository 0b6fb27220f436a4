"""Kubernetes Events of a SpeculativeModel: one for each thing done and for each transition of Ready."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from outrider_operator.observation import Object
from outrider_operator.plan import Apply, Delete

_UNDER_WAY = frozenset(
    {"Reconciling", "PodsStarting", "OldPodsEnding", "SettingsUnknown", "SettingsPending", "ScaledToZero"}
)
"""Reasons of not being ready that are no cause for a warning."""


@dataclass(frozen=True, slots=True)
class Event:
    """What is told to whoever describes the SpeculativeModel."""

    type: str
    reason: str
    message: str


def action_event(action: Apply | Delete) -> Event:
    """The event of a child that was changed."""
    if isinstance(action, Delete):
        return Event("Normal", "Deleted", f"deleted {action.title}: {action.reason}")
    verb = "created" if action.created else "updated"
    return Event("Normal", verb.capitalize(), f"{verb} {action.title}: {action.reason}")


def transition_events(old: Object, new: Object) -> Iterator[Event]:
    """The event of a change of Ready, if its status or its cause changed; a warning of keys newly refused."""
    refused = _condition(new, "KeysRefused")
    if refused and not _condition(old, "KeysRefused"):
        yield Event("Warning", "KeysRefused", refused["message"])
    before, after = _condition(old, "Ready"), _condition(new, "Ready")
    if (before.get("status"), before.get("reason")) == (after.get("status"), after.get("reason")):
        return
    if after.get("status") == "True":
        yield Event("Normal", "Ready", after["message"])
    elif after.get("reason") not in _UNDER_WAY:
        yield Event("Warning", after["reason"], after["message"])
    elif before.get("status") == "True":
        yield Event("Normal", "NotReady", f"{after['reason']}: {after['message']}")


def _condition(status: Object, kind: str) -> Object:
    return next((dict(c) for c in status.get("conditions", ()) if c["type"] == kind), {})
