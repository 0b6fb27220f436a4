"""The Kubernetes API as the operator uses it: a few verbs on plain documents, off the event loop.

Every write passes the fence: an operator whose Lease could have run out writes nothing any more.
"""

from __future__ import annotations

import asyncio
import json
import re
import threading
import time
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Final
from urllib.parse import quote

import kubernetes.client
import kubernetes.config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from outrider_operator import names
from outrider_operator.cache import Entry
from outrider_operator.observation import Object

_PATHS: Final[Mapping[str, tuple[str, str]]] = {
    names.KIND: (f"/apis/{names.API_VERSION}", names.PLURAL),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Event": ("/api/v1", "events"),
    "Lease": ("/apis/coordination.k8s.io/v1", "leases"),
    "NetworkPolicy": ("/apis/networking.k8s.io/v1", "networkpolicies"),
    "Pod": ("/api/v1", "pods"),
    "PodDisruptionBudget": ("/apis/policy/v1", "poddisruptionbudgets"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
}
"""Where each kind lives: all that this operator ever touches."""

CONNECT_SECONDS: Final = 2.0
_TIMEOUT: Final = (CONNECT_SECONDS, 20.0)
"""Seconds to connect, and to wait for an answer."""

_THREADS: Final = 8
_PAGE: Final = 500
"""Most objects in one answer to a list."""

_JSON: Final = "application/json"
_APPLY: Final = "application/apply-patch+yaml"
_MERGE: Final = "application/merge-patch+json"
_METADATA_ONLY: Final = "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"

_TO_ESCAPE: Final = re.compile("[\x7f-\uffff]")
"""What is not ASCII but has an escape of four digits: some of it YAML would refuse or fold."""

Report = Callable[[str, str, int, float], None]
"""Told of every call: verb, kind, HTTP status (0: no answer), seconds."""


class ApiError(Exception):
    """The API server refused or could not be reached; status is 0 in the latter case."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status

    @property
    def passes(self) -> bool:
        """Whether it says more of the API server than of what was asked: the same may be accepted soon."""
        # Not 500: a webhook that is down makes one of every write of a kind, maybe for hours.
        return self.status in (0, 429, 502, 503, 504)


class FencedError(ApiError):
    """The write was not sent: another operator may hold the Lease by now."""

    def __init__(self, what: str) -> None:
        super().__init__(0, f"{what}: not sent, since the Lease may have run out")


def load_client() -> DynamicClient:
    """A client from the pod's service account, or else from the kubeconfig."""
    try:
        kubernetes.config.load_incluster_config()  # type: ignore[no-untyped-call]
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config()  # type: ignore[no-untyped-call]
    configuration = kubernetes.client.Configuration.get_default_copy()
    configuration.retries = False  # a write that is sent again would be sent past the fence
    # Without discovery, which would ask the API server here and now, with no time limit.
    return DynamicClient(  # type: ignore[no-untyped-call]
        kubernetes.client.ApiClient(configuration), discoverer=lambda *_: None
    )


class Client:
    """Verbs on plain documents, addressed by kind, namespace and name."""

    def __init__(
        self,
        dynamic: DynamicClient,
        *,
        may_write: Callable[[], bool] = lambda: True,
        report: Report | None = None,
    ) -> None:
        self._dynamic = dynamic
        self._may_write = may_write
        self._report = report
        self._threads = ThreadPoolExecutor(_THREADS, thread_name_prefix="api")
        self._writing = 0
        self._quiet = threading.Condition()

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows the kind."""
        prefix, plural = _PATHS[kind]
        try:
            answer = await self._call("get", kind, prefix)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == plural for resource in answer["resources"])

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return await self._call("get", kind, _path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list_all(
        self, kind: str, namespace: str | None, *, labels: str = "", fields: str = ""
    ) -> list[Object]:
        """The objects of a namespace, or of all, that match the selectors."""
        found, _ = await self._list(kind, namespace, labels, fields, _JSON)
        api_version = _PATHS[kind][0].removeprefix("/apis/").removeprefix("/api/")
        for each in found:  # a list leaves out what is the same for all its items
            each.update(apiVersion=api_version, kind=kind)
        return found

    async def list_metadata(
        self, kind: str, namespace: str | None, *, labels: str = ""
    ) -> tuple[list[Entry], int]:
        """Name and version of each object of a namespace, or of all, and the version that the list is of."""
        found, at = await self._list(kind, namespace, labels, "", _METADATA_ONLY)
        return [
            Entry(metadata["namespace"], metadata["name"], int(metadata["resourceVersion"]))
            for metadata in (each["metadata"] for each in found)
        ], at

    async def _list(
        self, kind: str, namespace: str | None, labels: str, fields: str, accept: str
    ) -> tuple[list[Object], int]:
        selectors = {"labelSelector": labels, "fieldSelector": fields}
        query = {"limit": str(_PAGE)} | {key: value for key, value in selectors.items() if value}
        found: list[Object] = []
        while True:
            answer = await self._call("get", kind, _path(kind, namespace), query, accept=accept)
            found.extend(answer["items"] or ())  # null for an empty list of metadata
            if not (more := answer["metadata"].get("continue")):
                return found, int(answer["metadata"]["resourceVersion"])
            query["continue"] = more

    async def apply(self, desired: Object, uid: str | None = None) -> Object:
        """Server-side apply as our field manager, taking over fields that others have set.

        With a uid only to the object that has it: 409 if a namesake has taken its place.
        """
        body = desired if uid is None else {**desired, "metadata": desired["metadata"] | {"uid": uid}}
        return await self._apply(desired["kind"], _path_of(desired), body)

    async def apply_status(self, status: Object, resource: Object) -> Object:
        """Make this the status of the SpeculativeModel that was read, and of no namesake."""
        metadata = resource["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": status,
        }
        return await self._apply(names.KIND, _path_of(body) + "/status", body)

    async def merge(self, kind: str, namespace: str, name: str, patch: Object) -> Object:
        """Merge into an object: its other fields stay."""
        path, query = _path(kind, namespace, name), {"fieldManager": names.FIELD_MANAGER}
        return await self._call("patch", kind, path, query, patch, content_type=_MERGE)

    async def replace(self, wanted: Object) -> Object:
        """Write the whole object; its resourceVersion guards against a change in between."""
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._call("put", wanted["kind"], _path_of(wanted), query, wanted)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object of that uid with all that depends on it; nothing happens if it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("delete", kind, _path(kind, namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def create(self, wanted: Object) -> Object:
        """Create an object."""
        kind = wanted["kind"]
        return await self._call("post", kind, _path(kind, wanted["metadata"]["namespace"]), body=wanted)

    async def drain(self, seconds: float) -> bool:
        """Wait for the writes under way to be answered; whether they were."""

        def wait() -> bool:
            with self._quiet:
                return self._quiet.wait_for(lambda: self._writing == 0, seconds)

        return await asyncio.to_thread(wait)

    async def _apply(self, kind: str, path: str, body: Object) -> Object:
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._call("patch", kind, path, query, as_yaml(body), content_type=_APPLY)

    async def _call(
        self,
        verb: str,
        kind: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | bytes | None = None,
        *,
        content_type: str | None = None,
        accept: str = _JSON,
    ) -> Object:
        """One request.

        Raises:
            ApiError: it was refused, or no answer came.
            FencedError: it is a write, and not ours to make any more.
        """
        parameters = {
            "body": body,
            "query_params": list((query or {}).items()),
            "header_params": {"Accept": accept},
            "content_type": content_type,
        }
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._threads, self._send, verb, kind, path, parameters)

    def _send(self, verb: str, kind: str, path: str, parameters: dict[str, Any]) -> Object:
        if verb == "get":
            return self._request(verb, kind, path, parameters)
        with self._quiet:
            self._writing += 1
        try:
            if not self._may_write():
                raise FencedError(f"{verb} {path}")
            return self._request(verb, kind, path, parameters)
        finally:
            with self._quiet:
                self._writing -= 1
                self._quiet.notify_all()

    def _request(self, verb: str, kind: str, path: str, parameters: dict[str, Any]) -> Object:
        began, status = time.monotonic(), 0
        try:
            answer: Any = self._dynamic.request(
                verb, path, serialize=False, _request_timeout=_TIMEOUT, **parameters
            )
            status = int(answer.status)
        except DynamicApiError as error:
            status = int(error.status or 0)
            raise ApiError(status, _message(error)) from error
        except Exception as error:  # the client raises urllib3's, and others, when the server is away
            raise ApiError(0, f"{type(error).__name__}: {error}") from error
        finally:
            if self._report is not None:
                self._report(verb, kind, status, time.monotonic() - began)
        return dict(json.loads(answer.data))


def as_yaml(document: Object) -> bytes:
    """A document for server-side apply, whose decoder takes JSON but not its pairs of surrogate escapes."""
    text = json.dumps(document, ensure_ascii=False)
    return _TO_ESCAPE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _path(kind: str, namespace: str | None, name: str | None = None) -> str:
    if name == "" or namespace == "":
        raise ValueError(f"a {kind} without a name or namespace: its path would be that of all of them")
    prefix, plural = _PATHS[kind]
    scope = "" if namespace is None else f"/namespaces/{quote(namespace, safe='')}"
    path = f"{prefix}{scope}/{plural}"
    return path if name is None else f"{path}/{quote(name, safe='')}"


def _path_of(document: Object) -> str:
    metadata = document["metadata"]
    return _path(document["kind"], metadata["namespace"], metadata["name"])


def _message(error: DynamicApiError) -> str:
    """What the API server said, without the headers around it."""
    try:
        return str(json.loads(error.body or "")["message"])
    except (TypeError, ValueError, KeyError):
        return str(error.reason)
