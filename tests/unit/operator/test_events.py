"""Which events are told, and that what repeats is counted and bounded."""

from __future__ import annotations

import itertools
from typing import Any

from outrider_operator.events import Event, Ledger, Write, action_events, document, transition_events
from outrider_operator.plan import Apply, Delete, Scale

LOST = Event("Normal", "Updated", "updated Service x: it was not as the SpeculativeModel asks")


def ledger() -> Ledger:
    numbers = itertools.count()
    return Ledger(lambda: str(next(numbers)))


def child(kind: str, name: str) -> dict[str, Any]:
    return {"kind": kind, "metadata": {"name": name}}


def ready(status: str, reason: str, message: str = "m") -> dict[str, Any]:
    return {"conditions": [{"type": "Ready", "status": status, "reason": reason, "message": message}]}


def test_children_changed_in_one_way_for_one_reason_are_one_event() -> None:
    done = [
        Apply(child("Service", "x"), "it did not exist", created=True),
        Apply(child("ConfigMap", "x"), "it did not exist", created=True),
        Apply(child("ServiceAccount", "x"), "it changed", created=False),
        Scale("x-1", "u", 2, "pods give way"),
        Delete("Deployment", "x-0", "u", "x-1 has taken over"),
    ]
    assert list(action_events(done)) == [
        Event("Normal", "Created", "created Service x, ConfigMap x: it did not exist"),
        Event("Normal", "Updated", "updated ServiceAccount x: it changed"),
        Event("Normal", "Scaled", "scaled Deployment x-1: pods give way"),
        Event("Normal", "Deleted", "deleted Deployment x-0: x-1 has taken over"),
    ]


def test_one_event_for_each_transition() -> None:
    starting, serving = ready("False", "PodsStarting"), ready("True", "Serving")
    crash = ready("False", "CrashLoopBackOff", "exit 1")
    assert list(transition_events({}, starting)) == []
    assert list(transition_events(starting, serving)) == [Event("Normal", "Ready", "m")]
    assert list(transition_events(serving, starting)) == [Event("Normal", "NotReady", "PodsStarting: m")]
    assert list(transition_events(serving, crash)) == [Event("Warning", "CrashLoopBackOff", "exit 1")]
    assert list(transition_events(crash, ready("False", "CrashLoopBackOff", "exit 2"))) == []


def test_that_nothing_serves_any_more_is_a_warning() -> None:
    def status(available: str, reason: str, ready: dict[str, Any]) -> dict[str, Any]:
        condition = {
            "type": "Available",
            "status": available,
            "reason": reason,
            "message": "no pod is available",
        }
        return {"conditions": [*ready["conditions"], condition]}

    serving = status("True", "Serving", ready("True", "Serving"))
    lost = status("False", "NoPods", ready("False", "PodsStarting", "0 of 1 pod ready"))
    warning, note = transition_events(serving, lost)
    assert warning == Event("Warning", "NotAvailable", "no pod is available: 0 of 1 pod ready")
    assert (note.type, note.reason) == ("Normal", "NotReady")
    assert list(transition_events(lost, lost)) == []
    idle = status("False", "ScaledToZero", ready("False", "ScaledToZero"))
    assert "NotAvailable" not in {event.reason for event in transition_events(serving, idle)}


def test_the_same_within_a_minute_is_counted_and_written_later() -> None:
    book = ledger()
    first = book.enter("x", "u", LOST, 0)
    assert first is not None
    assert first.count == 1
    assert [book.enter("x", "u", LOST, now) for now in (1, 30, 59)] == [None, None, None]
    assert book.enter("x", "u", LOST, 60) == Write(first.name, 5)
    assert book.enter("x", "u", LOST, 61) is None
    assert book.enter("x", "u", LOST, 121) == Write(first.name, 7)


def test_another_message_resource_or_time_is_another_event() -> None:
    book = ledger()
    names = {
        book.enter("x", "u", LOST, 0),
        book.enter("x", "u", Event("Normal", "Updated", "else"), 0),
        book.enter("x", "v", LOST, 0),
        book.enter("x", "u", LOST, Ledger.FORGET_SECONDS),
    }
    assert None not in names
    assert len({write.name for write in names if write}) == 4


def test_one_that_was_not_written_is_told_anew() -> None:
    book = ledger()
    first = book.enter("x", "u", LOST, 0)
    book.forget("u", LOST)
    again = book.enter("x", "u", LOST, 1)
    assert first is not None
    assert again is not None
    assert (again.count, again.name != first.name) == (1, True)


def test_changes_without_end_are_not_told_without_end() -> None:
    book = ledger()

    def told(count: int, now: float) -> int:
        events = (Event("Normal", "Updated", f"{now} {number}") for number in range(count))
        return sum(book.enter("x", "u", event, now) is not None for event in events)

    assert told(100, 0) == Ledger.BURST
    assert told(5, 1) == 0
    assert told(5, 121) == 2
    assert book.enter("y", "v", LOST, 121) is not None


def test_the_books_are_bounded() -> None:
    book = ledger()
    for number in range(Ledger.MOST + 100):
        book.enter("x", f"u{number}", LOST, 0)
    assert len(book._lines) == len(book._allowances) == Ledger.MOST


def test_the_document_names_the_resource() -> None:
    metadata = {"name": "x", "namespace": "ns", "uid": "u", "resourceVersion": "3", "labels": {}}
    resource = {"apiVersion": "outrider.dev/v1alpha1", "kind": "SpeculativeModel", "metadata": metadata}
    event = Event("Warning", "Bad", "long " * 500)
    made = document(resource, event, Write("x.1", 1), moment="t", instance="host", manager="us")
    assert made["metadata"] == {"name": "x.1", "namespace": "ns"}
    assert made["involvedObject"]["uid"] == "u"
    assert "labels" not in made["involvedObject"]
    assert len(made["message"]) == 1024
