"""Looking: what the cache holds of a SpeculativeModel and its children, and what its pods say themselves.

The API server is asked only for a child that is not in the cache, since it is about to be created: an object
of that name that is not ours carries no label of ours, so no watch tells of it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import replace
from datetime import UTC, datetime
from typing import Final

import httpx

from outrider_operator import names
from outrider_operator.cache import Cache
from outrider_operator.client import Client
from outrider_operator.observation import Object, Observation, PodReport, is_pod_of, is_ready
from outrider_operator.plan import Key
from outrider_serving.settings import ADMIN_PORT, PodState

_ADMIN_SECONDS: Final = 3.0
"""How long a pod may take to answer, from the connection to the last byte."""

_MAX_ADMIN_ANSWER: Final = 64 * 1024
_MAX_ADMIN_CALLS: Final = 32

_MAX_WARNED: Final = 3
"""Of pods that do not start, of how many the warnings are read: one is told."""

_TOLD_ELSEWHERE: Final = frozenset({"BackOff", "Failed", "FailedScheduling", "Unhealthy"})
"""Reasons of warnings that the pod's own status tells too, better and as long as it lasts."""


async def observe(
    client: Client, admin: httpx.AsyncClient, seen: Observation, wanted: Iterable[Key]
) -> Observation:
    """What the cache holds, completed by what the API server has under the names of wanted children."""
    namespace = seen.resource["metadata"]["namespace"]
    missing = [key for key in wanted if key not in seen.children]
    found = await asyncio.gather(*(client.get(kind, namespace, child) for kind, child in missing))
    others = {key: child for key, child in zip(missing, found, strict=True) if child is not None}
    reports, warnings = await asyncio.gather(
        pod_reports(admin, seen.pods), _warnings(client, namespace, seen.pods)
    )
    return replace(seen, children={**seen.children, **others}, reports=reports, warnings=warnings)


def observe_again(cache: Cache, before: Observation) -> Observation | None:
    """The same once more after our own writes, of which the cache has been told."""
    metadata = before.resource["metadata"]
    seen = cached(cache, metadata["namespace"], metadata["name"])
    if seen is None:
        return None
    children = {**seen.children}
    for key, child in before.children.items():
        if names.MODEL_LABEL not in child["metadata"].get("labels", {}):
            children.setdefault(key, child)  # not ours, so the cache does not know it
    return replace(seen, children=children, reports=before.reports, warnings=before.warnings)


def cached(cache: Cache, namespace: str, name: str) -> Observation | None:
    """What the cache holds of one SpeculativeModel, or None where there is none."""
    resource = cache.get(names.KIND, namespace, name)
    if resource is None:
        return None
    bare = Observation(resource=resource, now=datetime.now(UTC), namesakes=cache.namesakes(resource))
    labelled = tuple(cache.of_model(namespace, name))
    children = {
        (str(found["kind"]), str(found["metadata"]["name"])): found
        for found in labelled
        if found["kind"] != "Pod"
    }
    ours = {child for (kind, child), found in children.items() if kind == "Deployment" and bare.owns(found)}
    pods = tuple(found for found in labelled if found["kind"] == "Pod" and is_pod_of(found, ours))
    return replace(bare, children=children, pods=pods)


async def pod_reports(admin: httpx.AsyncClient, pods: Iterable[Object]) -> dict[str, PodReport]:
    """What ready pods report; one that does not answer is a fact, not an error."""
    ready = [pod for pod in pods if is_ready(pod) and pod.get("status", {}).get("podIP")]
    limit = asyncio.Semaphore(_MAX_ADMIN_CALLS)

    async def ask(pod: Object) -> PodReport:
        address = str(pod["status"]["podIP"])
        host = f"[{address}]" if ":" in address else address
        async with limit:
            try:
                answer = await _answer(admin, f"http://{host}:{ADMIN_PORT}/admin/state")
                return PodReport(state=PodState.model_validate_json(answer))
            except (httpx.HTTPError, TimeoutError) as error:
                return PodReport(error=f"its admin port does not answer: {type(error).__name__}")
            except ValueError:  # pydantic's too
                return PodReport(error="its admin port answers what this operator does not understand")

    answers = await asyncio.gather(*map(ask, ready))
    return {str(pod["metadata"]["name"]): answer for pod, answer in zip(ready, answers, strict=True)}


async def _answer(admin: httpx.AsyncClient, url: str) -> bytes:
    """The body as it is sent; a pod can neither hold the operator up nor fill its memory.

    Raises:
        ValueError: there is more than any pod has to say.
    """
    body = bytearray()
    async with asyncio.timeout(_ADMIN_SECONDS), admin.stream("GET", url, timeout=_ADMIN_SECONDS) as answer:
        answer.raise_for_status()
        async for chunk in answer.aiter_raw():
            body += chunk
            if len(body) > _MAX_ADMIN_ANSWER:
                raise ValueError(f"{url} answers more than {_MAX_ADMIN_ANSWER} bytes")
    return bytes(body)


async def _warnings(client: Client, namespace: str, pods: Iterable[Object]) -> dict[str, str]:
    """The newest warning of each pod that got no container: a missing Secret is told only there."""
    stuck = [pod for pod in pods if _is_being_created(pod)][:_MAX_WARNED]

    async def newest(pod: Object) -> str | None:
        fields = f"involvedObject.uid={pod['metadata']['uid']},type=Warning"
        events = [
            event
            for event in await client.list_all("Event", namespace, fields=fields)
            if event.get("reason") not in _TOLD_ELSEWHERE
        ]
        if not events:
            return None
        latest = max(
            events, key=lambda event: str(event.get("lastTimestamp") or event.get("eventTime") or "")
        )
        return str(latest.get("message", ""))

    answers = await asyncio.gather(*map(newest, stuck))
    return {
        str(pod["metadata"]["name"]): answer
        for pod, answer in zip(stuck, answers, strict=True)
        if answer is not None
    }


def _is_being_created(pod: Object) -> bool:
    """Scheduled, but no container has run yet."""
    status = pod.get("status", {})
    scheduled = any(
        c["type"] == "PodScheduled" and c["status"] == "True" for c in status.get("conditions", ())
    )
    containers = status.get("containerStatuses", ())
    waiting = [container.get("state", {}).get("waiting", {}).get("reason") for container in containers]
    return scheduled and all(reason == "ContainerCreating" for reason in waiting)
