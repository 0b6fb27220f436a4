"""The one level-triggered function: observe, decide, apply, report. Whatever woke it, it does the same."""

from __future__ import annotations

import logging
import socket
from datetime import datetime
from typing import Final

import httpx

from outrider_operator import names
from outrider_operator.client import ApiError, Client
from outrider_operator.config import OperatorConfig
from outrider_operator.diff import covers, overlay
from outrider_operator.events import Event, action_event, transition_events
from outrider_operator.observation import Object, Observation
from outrider_operator.observe import observe
from outrider_operator.plan import Apply, Delete, Plan, plan
from outrider_operator.status import is_settled, next_status

logger = logging.getLogger(__name__)

_INSTANCE: Final = socket.gethostname()

_REPLACE_TRIES: Final = 5


class Reconciler:
    """Brings SpeculativeModels and their children together."""

    def __init__(self, client: Client, admin: httpx.AsyncClient, config: OperatorConfig) -> None:
        self._client = client
        self._admin = admin
        self._config = config

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """One pass over one SpeculativeModel; seconds until the next, or None once there is none."""
        seen = await self._observe(namespace, name)
        if seen is None:
            return None
        decision = plan(seen, self._config)
        events, errors = await self._carry_out(seen, decision)
        if decision.actions:  # what was done is reported as it then looks, not as a moment of disorder
            seen = await self._observe(namespace, name)
            if seen is None:
                return None
            decision = plan(seen, self._config)
        status = next_status(seen, decision, errors)
        if status != seen.status:
            try:
                await self._client.apply_status(status, seen.resource)
            except ApiError as error:
                if error.status in (404, 409):  # deleted meanwhile, or replaced by a namesake: look again
                    return self._config.progress_seconds
                raise
            events.extend(transition_events(seen.status, status))
        for event in events:
            await self._record(seen.resource, event, seen.now)
        return self._config.resync_seconds if is_settled(status) else self._config.progress_seconds

    async def _observe(self, namespace: str, name: str) -> Observation | None:
        """What there is, or None where there is nothing to do because it is gone or going."""
        seen = await observe(self._client, self._admin, self._config, namespace, name)
        return None if seen is None or "deletionTimestamp" in seen.resource["metadata"] else seen

    async def _carry_out(self, seen: Observation, decision: Plan) -> tuple[list[Event], list[str]]:
        """Do what was planned; what the API server refuses is reported, and does not stop the rest."""
        events: list[Event] = []
        errors: list[str] = []
        for action in decision.actions:
            try:
                if isinstance(action, Delete):
                    namespace = seen.resource["metadata"]["namespace"]
                    await self._client.delete(action.kind, namespace, action.name, action.uid)
                else:
                    await self._apply(action)
            except ApiError as error:
                if error.status == 0:
                    raise
                errors.append(f"{action.title}: {error}")
            else:
                events.append(action_event(action))
        return events, errors

    async def _apply(self, action: Apply) -> None:
        """Apply; then take out what others put into our lists, which an apply leaves alone."""
        for attempt in range(_REPLACE_TRIES):
            live = await self._client.apply(action.object)
            if covers(live, action.object):
                return
            try:
                live = await self._client.replace(overlay(live, action.object))
            except ApiError as error:
                if error.status != 409 or attempt == _REPLACE_TRIES - 1:
                    raise  # else a controller wrote in between: look again
            else:
                if not covers(live, action.object):
                    raise ApiError(409, "something changes it as it is written, such as an admission webhook")
                return

    async def _record(self, resource: Object, event: Event, now: datetime) -> None:
        """Write an Event. It is for people: one that is lost must not hold up the work."""
        metadata = resource["metadata"]
        logger.info("%s/%s: %s: %s", metadata["namespace"], metadata["name"], event.reason, event.message)
        moment = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        body = {
            "apiVersion": "v1",
            "kind": "Event",
            "metadata": {"generateName": f"{metadata['name']}.", "namespace": metadata["namespace"]},
            "involvedObject": {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": metadata["name"],
                "namespace": metadata["namespace"],
                "uid": metadata["uid"],
                "resourceVersion": metadata["resourceVersion"],
            },
            "type": event.type,
            "reason": event.reason,
            "message": event.message[:1024],
            "source": {"component": names.FIELD_MANAGER},
            "reportingComponent": names.FIELD_MANAGER,
            "reportingInstance": _INSTANCE,
            "firstTimestamp": moment,
            "lastTimestamp": moment,
            "count": 1,
        }
        try:
            await self._client.create(body)
        except ApiError as error:
            logger.warning("an event was not written: %s", error)
