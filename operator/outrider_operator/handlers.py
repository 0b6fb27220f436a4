"""What kopf tells us: that a SpeculativeModel or a child is new, changed or gone. All else is elsewhere.

Only event handlers: they leave no finalizer, annotation or status on anything, so a SpeculativeModel can be
deleted while the operator is down or gone.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from typing import Any, Final

import kopf

from outrider_operator import names
from outrider_operator.observation import Object

CHILD_RESOURCES: Final = (
    ("apps", "v1", "deployments"),
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("", "v1", "serviceaccounts"),
    ("policy", "v1", "poddisruptionbudgets"),
    ("networking.k8s.io", "v1", "networkpolicies"),
)

Hear = Callable[[Object, bool], None]
"""Takes an object as the API server told it, and whether it is deleted."""


def registry(hear: Hear) -> kopf.OperatorRegistry:
    """The handlers: any event of a SpeculativeModel or of a child is heard."""
    result = kopf.OperatorRegistry()

    @kopf.on.startup(registry=result)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.login(registry=result)
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**arguments)

    async def told(event: kopf.RawEvent, **_: Any) -> None:
        hear(dict(event["object"]), event["type"] == "DELETED")

    kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=result)(told)
    for group, version, plural in CHILD_RESOURCES:
        kopf.on.event(group, version, plural, id=f"{plural}_event", registry=result)(told)
    return result


class _Backoffs:
    """Seconds between tries of a request, without end: kopf ends the operator when they do.

    Short at first, for an API server that comes back; then it is a right that is missing, such as in a listed
    namespace that was deleted.
    """

    def __iter__(self) -> Iterator[float]:
        yield from (1, 1, 2, 3, *[5] * 12)
        yield from itertools.repeat(30)


class _NoDiffs(kopf.DiffBaseStorage):
    """Nothing to compare with: kopf else copies every object of every event, and we compare ourselves."""

    def build(self, **_: Any) -> kopf.BodyEssence:
        """No part of the object."""
        return kopf.BodyEssence()

    def fetch(self, **_: Any) -> kopf.BodyEssence | None:
        """No earlier object."""
        return None

    def store(self, **_: Any) -> None:
        """Kept nowhere, least of all on the object."""


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Make kopf a source of events only, which notices a watch that went silent."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.persistence.diffbase_storage = _NoDiffs()
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    settings.networking.error_backoffs = _Backoffs()
    for _, _, plural in CHILD_RESOURCES:
        settings.watching.label_selectors[plural] = names.MODEL_LABEL
