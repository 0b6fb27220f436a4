"""Kubernetes Events of a SpeculativeModel: one for each thing done and for each transition of Ready.

What repeats is counted on the Event that is there, and a SpeculativeModel that changes without end, by two
who fight over it, has only so many: see `Ledger`.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Final, TypeVar

from outrider_operator.observation import Object
from outrider_operator.plan import Apply, Delete, Scale

_K = TypeVar("_K")
_V = TypeVar("_V")

UNDER_WAY: Final = frozenset(
    {
        "ChildDeleting",
        "NamespaceTerminating",
        "OldPodsEnding",
        "PodsStarting",
        "Reconciling",
        "ScaledToZero",
        "SettingsPending",
        "SettingsUnknown",
    }
)
"""Reasons of not being ready that are no cause for a warning."""


WARNINGS: Final = ("KeysRefused", "ProposerNotLoaded", "ServedNameConflict", "SharedCacheNotConnected")
"""Conditions that are there only while something is wrong, and that leave Ready as it is."""


@dataclass(frozen=True, slots=True)
class Event:
    """What is told to whoever describes the SpeculativeModel."""

    type: str
    reason: str
    message: str


def action_events(actions: Iterable[Apply | Scale | Delete]) -> Iterator[Event]:
    """One event for all children that were changed in one way for one reason."""
    told: dict[tuple[str, str], list[str]] = {}
    for action in actions:
        match action:
            case Apply():
                verb = "created" if action.created else "updated"
            case Scale():
                verb = "scaled"
            case Delete():
                verb = "deleted"
        told.setdefault((verb, action.reason), []).append(action.title)
    for (verb, reason), titles in told.items():
        yield Event("Normal", verb.capitalize(), f"{verb} {', '.join(titles)}: {reason}")


def transition_events(old: Object, new: Object) -> Iterator[Event]:
    """The event of a change of Ready, if its status or its cause changed; a warning of what else is new."""
    for kind in WARNINGS:
        told = _condition(new, kind)
        if told and not _condition(old, kind):
            yield Event("Warning", kind, told["message"])
    available = _condition(new, "Available")
    lost = _condition(old, "Available").get("status") == "True" and available.get("status") == "False"
    before, after = _condition(old, "Ready"), _condition(new, "Ready")
    if lost and available.get("reason") != "ScaledToZero":
        yield Event("Warning", "NotAvailable", f"{available['message']}: {after.get('message', '')}")
    if (before.get("status"), before.get("reason")) == (after.get("status"), after.get("reason")):
        return
    if after.get("status") == "True":
        yield Event("Normal", "Ready", after["message"])
    elif after.get("reason") not in UNDER_WAY:
        yield Event("Warning", after["reason"], after["message"])
    elif before.get("status") == "True":
        yield Event("Normal", "NotReady", f"{after['reason']}: {after['message']}")


def _condition(status: Object, kind: str) -> Object:
    return next((dict(c) for c in status.get("conditions", ()) if c["type"] == kind), {})


@dataclass(slots=True)
class _Line:
    """An Event that was written, and how often the same has happened."""

    name: str
    count: int
    written_at: float


@dataclass(slots=True)
class _Allowance:
    left: float
    at: float


@dataclass(frozen=True, slots=True)
class Write:
    """An Event to write: a new one, or one that is there with a higher count."""

    name: str
    count: int


class Ledger:
    """What was told of whom, so that a thing that repeats is counted, seldom, and not told anew.

    The same event of a SpeculativeModel is written at most once a minute, with the count of all of them; one
    SpeculativeModel has at most 25 new events in a row, and then one each minute.
    """

    QUIET_SECONDS: Final = 60.0
    BURST: Final = 25
    REFILL_SECONDS: Final = 60.0
    FORGET_SECONDS: Final = 3000.0
    """Before the API server does, after an hour: what comes later is told anew."""
    MOST: Final = 4096

    def __init__(self, salt: Callable[[], str]) -> None:
        self._salt = salt
        self._lines: OrderedDict[tuple[str, Event], _Line] = OrderedDict()
        self._allowances: OrderedDict[str, _Allowance] = OrderedDict()

    def enter(self, model: str, uid: str, event: Event, now: float) -> Write | None:
        """Note an event; what to write of it now, if anything. `now` is in seconds of any steady clock."""
        line = self._lines.get((uid, event))
        if line is not None and now - line.written_at < self.FORGET_SECONDS:
            line.count += 1
            if now - line.written_at < self.QUIET_SECONDS:
                return None
            line.written_at = now
            return Write(line.name, line.count)
        if not self._allowed(uid, now):
            return None
        text = "\n".join((uid, event.type, event.reason, event.message, self._salt()))
        name = f"{model}.{hashlib.sha256(text.encode()).hexdigest()[:16]}"
        self._lines[uid, event] = _Line(name, 1, now)
        _bound(self._lines, self.MOST)
        return Write(name, 1)

    def forget(self, uid: str, event: Event) -> None:
        """The Event is not there any more: tell it anew next time."""
        self._lines.pop((uid, event), None)

    def _allowed(self, uid: str, now: float) -> bool:
        allowance = self._allowances.setdefault(uid, _Allowance(self.BURST, now))
        self._allowances.move_to_end(uid)
        _bound(self._allowances, self.MOST)
        earned = (now - allowance.at) / self.REFILL_SECONDS
        allowance.left, allowance.at = min(self.BURST, allowance.left + earned), now
        if allowance.left < 1:
            return False
        allowance.left -= 1
        return True


def _bound(entries: OrderedDict[_K, _V], most: int) -> None:
    while len(entries) > most:
        entries.popitem(last=False)


def document(
    resource: Object, event: Event, write: Write, *, moment: str, instance: str, manager: str
) -> Object:
    """The Event as the API server takes it."""
    metadata = resource["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": write.name, "namespace": metadata["namespace"]},
        "involvedObject": {
            "apiVersion": resource["apiVersion"],
            "kind": resource["kind"],
            **{key: metadata[key] for key in ("name", "namespace", "uid", "resourceVersion")},
        },
        "type": event.type,
        "reason": event.reason,
        "message": event.message[:1024],
        "source": {"component": manager},
        "reportingComponent": manager,
        "reportingInstance": instance,
        "firstTimestamp": moment,
        "lastTimestamp": moment,
        "count": write.count,
    }
