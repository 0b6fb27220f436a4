"""The one level-triggered function: observe, decide, apply, report. Whatever woke it, it does the same."""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import httpx

from outrider_operator import names
from outrider_operator.cache import Cache
from outrider_operator.client import ApiError, Client
from outrider_operator.config import OperatorConfig
from outrider_operator.diff import covers, overlay
from outrider_operator.events import action_events, transition_events
from outrider_operator.observation import Observation, is_deleting
from outrider_operator.observe import cached, observe, observe_again
from outrider_operator.plan import Apply, Delete, Intent, Plan, Scale, decide, intent
from outrider_operator.recorder import Recorder
from outrider_operator.status import next_look, next_status

Action = Apply | Scale | Delete

_REPLACE_TRIES: Final = 5


class Reconciler:
    """Brings SpeculativeModels and their children together."""

    def __init__(
        self,
        client: Client,
        admin: httpx.AsyncClient,
        cache: Cache,
        config: OperatorConfig,
        wake: Callable[[str, str], None],
    ) -> None:
        self._client = client
        self._admin = admin
        self._cache = cache
        self._config = config
        self._wake = wake
        self._recorder = Recorder(client)

    async def reconcile(self, namespace: str, name: str) -> float | None:
        """One pass over one SpeculativeModel; seconds until the next, or None once there is none."""
        looked = await self._look(namespace, name)
        if looked is None:
            return None
        wanted, bare = looked
        seen = await observe(self._client, self._admin, bare, wanted.names)
        decision = decide(wanted, seen)
        done, errors = await self._carry_out(seen, decision)
        if decision.actions:  # what was done is reported as it then looks, not as a moment of disorder
            after = observe_again(self._cache, seen)
            if after is None or is_deleting(after.resource):
                return None
            seen, wanted = after, intent(after.resource, self._config)  # the spec may have changed meanwhile
            decision = decide(wanted, seen)
        status = next_status(seen, decision, errors)
        events = list(action_events(done))
        if status != seen.status:
            try:
                self._cache.put(await self._client.apply_status(status, seen.resource))
            except ApiError as error:
                if error.status in (404, 409):  # deleted meanwhile, or replaced by a namesake: look again
                    return self._config.progress_seconds
                raise
            events.extend(transition_events(seen.status, status))
        for event in events:
            await self._recorder.record(seen.resource, event)
        return next_look(status, seen.now, self._config)

    async def _look(self, namespace: str, name: str) -> tuple[Intent, Observation] | None:
        """What is wanted and what the cache holds; None where nothing is wanted any more.

        Where a child is missing, and so about to be created, the SpeculativeModel itself is read first:
        children that are deleted with it may be heard of before its own deletion is.
        """
        seen = cached(self._cache, namespace, name)
        if seen is None or is_deleting(seen.resource):
            return None
        wanted = intent(seen.resource, self._config)
        if all(key in seen.children for key in wanted.names):
            return wanted, seen
        live = await self._client.get(names.KIND, namespace, name)
        if live is None:
            return None
        for key in self._cache.put(live) - {(namespace, name)}:
            self._wake(*key)
        seen = cached(self._cache, namespace, name)
        if seen is None or is_deleting(seen.resource):
            return None
        return intent(seen.resource, self._config), seen

    async def _carry_out(self, seen: Observation, decision: Plan) -> tuple[list[Action], list[str]]:
        """Do what was planned; what the API server refuses is reported, and does not stop the rest.

        Raises:
            ApiError: it is away or overloaded; all is tried again later.
        """
        done: list[Action] = []
        errors: list[str] = []
        for action in decision.actions:
            try:
                match action:
                    case Apply():
                        await self._apply(seen, action)
                    case Scale():
                        await self._scale(seen, action)
                    case Delete():
                        await self._delete(seen, action)
            except ApiError as error:
                if error.passes:
                    raise
                errors.append(f"{action.title}: {error}")
            else:
                done.append(action)
        return done, errors

    async def _delete(self, seen: Observation, action: Delete) -> None:
        namespace = seen.resource["metadata"]["namespace"]
        await self._client.delete(action.kind, namespace, action.name, action.uid)
        live = seen.children.get((action.kind, action.name))
        if live is not None:
            self._cache.remove(live)  # if a finalizer holds it, the watch tells so

    async def _scale(self, seen: Observation, action: Scale) -> None:
        namespace = seen.resource["metadata"]["namespace"]
        self._cache.put(await self._client.merge("Deployment", namespace, action.name, action.patch))

    async def _apply(self, seen: Observation, action: Apply) -> None:
        """Apply; then take out what others put into our lists, which an apply leaves alone."""
        wanted = action.object
        known = seen.children.get((wanted["kind"], wanted["metadata"]["name"]))
        uid = None if known is None else str(known["metadata"]["uid"])
        for attempt in range(_REPLACE_TRIES):
            live = await self._client.apply(wanted, uid)
            if not covers(live, wanted):
                try:
                    live = await self._client.replace(overlay(live, wanted))
                except ApiError as error:
                    if error.status != 409 or attempt == _REPLACE_TRIES - 1:
                        raise
                    continue  # a controller wrote in between: look again
                if not covers(live, wanted):
                    raise ApiError(409, "something changes it as it is written, such as an admission webhook")
            self._cache.put(live)
            return
