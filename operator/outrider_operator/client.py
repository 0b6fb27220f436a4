"""The Kubernetes API as the operator uses it: a few verbs on plain documents, off the event loop."""

from __future__ import annotations

import asyncio
import json
import re
from collections.abc import Mapping
from typing import Any, Final
from urllib.parse import quote

import kubernetes.client
import kubernetes.config
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import DynamicApiError

from outrider_operator import names
from outrider_operator.observation import Object

_PATHS: Final[Mapping[str, tuple[str, str]]] = {
    names.KIND: (f"/apis/{names.API_VERSION}", names.PLURAL),
    "ConfigMap": ("/api/v1", "configmaps"),
    "Deployment": ("/apis/apps/v1", "deployments"),
    "Event": ("/api/v1", "events"),
    "Pod": ("/api/v1", "pods"),
    "Service": ("/api/v1", "services"),
    "ServiceAccount": ("/api/v1", "serviceaccounts"),
}
"""Where each kind lives: all that this operator ever touches."""

_TIMEOUT: Final = (3.05, 20.0)
"""Seconds to connect, and to wait for an answer."""

_APPLY: Final = "application/apply-patch+yaml"

_TO_ESCAPE: Final = re.compile("[\x7f-\uffff]")
"""What is not ASCII but has an escape of four digits: some of it YAML would refuse or fold."""


class ApiError(Exception):
    """The API server refused or could not be reached; status is 0 in the latter case."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


def load_client() -> DynamicClient:
    """A client from the pod's service account, or else from the kubeconfig."""
    try:
        kubernetes.config.load_incluster_config()  # type: ignore[no-untyped-call]
    except kubernetes.config.ConfigException:
        kubernetes.config.load_kube_config()  # type: ignore[no-untyped-call]
    return DynamicClient(kubernetes.client.ApiClient())  # type: ignore[no-untyped-call]


class Client:
    """Verbs on plain documents, addressed by kind, namespace and name."""

    def __init__(self, dynamic: DynamicClient) -> None:
        self._dynamic = dynamic

    async def serves(self, kind: str) -> bool:
        """Whether the API server knows the kind."""
        prefix, plural = _PATHS[kind]
        try:
            answer = await self._call("get", prefix)
        except ApiError as error:
            if error.status == 404:
                return False
            raise
        return any(resource["name"] == plural for resource in answer["resources"])

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None where there is none."""
        try:
            return await self._call("get", _path(kind, namespace, name))
        except ApiError as error:
            if error.status == 404:
                return None
            raise

    async def list(
        self, kind: str, namespace: str, *, labels: str = "", fields: str = ""
    ) -> tuple[Object, ...]:
        """The objects that match the selectors, in the order of their names."""
        query = {"labelSelector": labels, "fieldSelector": fields}
        answer = await self._call("get", _path(kind, namespace), {k: v for k, v in query.items() if v})
        return tuple(sorted(answer["items"], key=lambda item: str(item["metadata"]["name"])))

    async def apply(self, desired: Object) -> Object:
        """Server-side apply as our field manager, taking over fields that others have set."""
        return await self._apply(_path_of(desired), desired)

    async def apply_status(self, status: Object, resource: Object) -> Object:
        """Make this the status of the SpeculativeModel that was read, and of no namesake."""
        metadata = resource["metadata"]
        body = {
            "apiVersion": names.API_VERSION,
            "kind": names.KIND,
            "metadata": {key: metadata[key] for key in ("name", "namespace", "uid")},
            "status": status,
        }
        return await self._apply(_path_of(body) + "/status", body)

    async def replace(self, wanted: Object) -> Object:
        """Write the whole object; its resourceVersion guards against a change in between."""
        query = {"fieldManager": names.FIELD_MANAGER}
        return await self._call("put", _path_of(wanted), query, wanted)

    async def delete(self, kind: str, namespace: str, name: str, uid: str) -> None:
        """Delete the object of that uid with all that depends on it; nothing happens if it is gone."""
        body = {"preconditions": {"uid": uid}, "propagationPolicy": "Background"}
        try:
            await self._call("delete", _path(kind, namespace, name), body=body)
        except ApiError as error:
            if error.status not in (404, 409):
                raise

    async def create(self, wanted: Object) -> Object:
        """Create an object."""
        return await self._call("post", _path(wanted["kind"], wanted["metadata"]["namespace"]), body=wanted)

    async def _apply(self, path: str, body: Object) -> Object:
        query = {"fieldManager": names.FIELD_MANAGER, "force": "true"}
        return await self._call("patch", path, query, as_yaml(body), content_type=_APPLY)

    async def _call(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str] | None = None,
        body: Object | bytes | None = None,
        content_type: str | None = None,
    ) -> Object:
        return await asyncio.to_thread(self._send, verb, path, query or {}, body, content_type)

    def _send(
        self,
        verb: str,
        path: str,
        query: Mapping[str, str],
        body: Object | bytes | None,
        content_type: str | None,
    ) -> Object:
        try:
            answer: Any = self._dynamic.request(
                verb,
                path,
                body=body,
                query_params=list(query.items()),
                content_type=content_type,
                serialize=False,
                _request_timeout=_TIMEOUT,
            )
        except DynamicApiError as error:
            raise ApiError(int(error.status or 0), _message(error)) from error
        except Exception as error:  # the client raises urllib3's, and others, when the server is away
            raise ApiError(0, f"{type(error).__name__}: {error}") from error
        return dict(json.loads(answer.data))


def as_yaml(document: Object) -> bytes:
    """A document for server-side apply, whose decoder takes JSON but not its pairs of surrogate escapes."""
    text = json.dumps(document, ensure_ascii=False)
    return _TO_ESCAPE.sub(lambda found: f"\\u{ord(found[0]):04x}", text).encode()


def _path(kind: str, namespace: str, name: str | None = None) -> str:
    if name == "":
        raise ValueError(f"a {kind} without a name: its path would be that of all of them")
    prefix, plural = _PATHS[kind]
    path = f"{prefix}/namespaces/{quote(namespace, safe='')}/{plural}"
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
