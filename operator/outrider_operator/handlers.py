"""What kopf tells us: that something about a SpeculativeModel changed. What to do is decided elsewhere.

Only event handlers: they leave no finalizer, annotation or status on anything, so a SpeculativeModel can be
deleted while the operator is down or gone.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

import kopf

from outrider_operator import names

CHILD_RESOURCES: Final = (
    ("apps", "v1", "deployments"),
    ("", "v1", "pods"),
    ("", "v1", "services"),
    ("", "v1", "configmaps"),
    ("", "v1", "serviceaccounts"),
)

Wake = Callable[[str, str], None]
"""Asks for a SpeculativeModel, by namespace and name, to be looked at."""


def registry(wake: Wake) -> kopf.OperatorRegistry:
    """The handlers: any event of a SpeculativeModel or of a child wakes the one it is about."""
    result = kopf.OperatorRegistry()

    @kopf.on.startup(registry=result)
    def configure(settings: kopf.OperatorSettings, **_: Any) -> None:
        configure_kopf(settings)

    @kopf.on.login(registry=result)
    def login(**arguments: Any) -> kopf.ConnectionInfo | None:
        return kopf.login_via_client(**arguments)

    @kopf.on.event(names.GROUP, names.VERSION, names.PLURAL, registry=result)
    async def resource_event(namespace: str | None, name: str, **_: Any) -> None:
        wake(namespace or "", name)

    async def child_event(namespace: str | None, labels: kopf.Labels, **_: Any) -> None:
        if model := labels[names.MODEL_LABEL]:  # a label may be empty, a name may not
            wake(namespace or "", model)

    for group, version, plural in CHILD_RESOURCES:
        kopf.on.event(
            group,
            version,
            plural,
            labels={names.MODEL_LABEL: kopf.PRESENT},
            id=f"{plural}_event",
            registry=result,
        )(child_event)
    return result


def configure_kopf(settings: kopf.OperatorSettings) -> None:
    """Make kopf a source of events only, which notices a watch that went silent."""
    settings.posting.enabled = False
    settings.scanning.disabled = True
    settings.watching.server_timeout = 300
    settings.watching.client_timeout = 330
    settings.watching.connect_timeout = 10
    settings.watching.reconnect_backoff = 1
    for _, _, plural in CHILD_RESOURCES:
        settings.watching.label_selectors[plural] = names.MODEL_LABEL
