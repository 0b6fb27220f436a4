"""Pods without containers: a node that is none, pods that say they serve, and a server that answers for all.

The real scheduler puts the pods on the simulated node, since they tolerate its taint and select its label.
What the node's kubelet would do is done here: renew its Lease, report a pod as running and then as ready, and
remove one that was deleted. The admin port of every pod is a single socket: the addresses of all pods are
local to the node's network, and the one that was called says which pod is meant.
"""

from __future__ import annotations

import asyncio
import itertools
import json
import subprocess
from collections.abc import Awaitable
from datetime import UTC, datetime
from ipaddress import IPv4Address
from typing import Final

from tools.fleet.api import Api, Object, RefusedError
from tools.fleet.watchers import Heard, Key

NODE: Final = "simulated"
LABEL: Final = "fleet.outrider.dev/simulated"
ENGINE: Final = {
    "nodeSelector": {LABEL: "true"},
    "tolerations": [{"key": LABEL, "operator": "Exists", "effect": "NoSchedule"}],
}
"""What sends pods to the simulated node."""

NETWORK: Final = "10.99.0.0/16"
_FIRST_ADDRESS: Final = IPv4Address("10.99.0.1")
_NODE_ADDRESS: Final = "10.98.0.1"
_ADMIN_PORT: Final = 9464
_LEASE_SECONDS: Final = 40
_RENEW_SECONDS: Final = 10


def open_network() -> None:
    """Make the addresses of all pods local to the network of this process, which is to be the node's."""
    subprocess.run(["ip", "route", "replace", "local", NETWORK, "dev", "lo"], check=True)


class Simulation:
    """One simulated node and its pods. `run` has to go on for as long as the pods are to live."""

    def __init__(self, api: Api, pods: int, start_seconds: float) -> None:
        self._api = api
        self._most_pods = pods
        self._start_seconds = start_seconds
        self._free = itertools.count()  # how far the next pod's address is from the first
        self._addresses: dict[str, str] = {}  # of pods, by uid
        self._models: dict[str, Key] = {}  # by address
        self._generations: dict[Key, int] = {}
        self._seen: dict[str, str] = {}  # how far the pod of a uid is
        self._work: asyncio.Queue[Awaitable[None]] = asyncio.Queue()

    async def run(self) -> None:
        """Keep the node and its pods alive until cancelled."""
        await self._register()
        server = await asyncio.start_server(self._answer, "0.0.0.0", _ADMIN_PORT, backlog=1024)
        async with server, asyncio.TaskGroup() as group:
            group.create_task(self._renew())
            for _ in range(8):
                group.create_task(self._patch())

    def hear(self, heard: Heard) -> None:
        """Take news of a ConfigMap or a pod."""
        if heard.kind == "ConfigMap" and not heard.deleted:
            self._generations[heard.key] = json.loads(heard.found["data"]["settings.json"])["generation"]
        elif heard.kind == "Pod":
            self._hear_pod(heard)

    def _hear_pod(self, heard: Heard) -> None:
        pod = heard.found
        uid = pod["metadata"]["uid"]
        if heard.deleted:
            self._models.pop(self._addresses.pop(uid, ""), None)
            self._seen.pop(uid, None)
            return
        if pod["spec"].get("nodeName") != NODE:
            return
        if "deletionTimestamp" in pod["metadata"]:
            if self._seen.get(uid) != "deleted":
                self._seen[uid] = "deleted"
                self._work.put_nowait(self._remove(pod))
        elif uid not in self._seen:
            self._seen[uid] = "started"
            address = str(_FIRST_ADDRESS + next(self._free))
            self._addresses[uid], self._models[address] = address, heard.key
            self._work.put_nowait(self._report(pod, address, ready=False))
            asyncio.get_running_loop().call_later(
                self._start_seconds, lambda: self._work.put_nowait(self._report(pod, address, ready=True))
            )

    async def _patch(self) -> None:
        while True:
            try:
                await (await self._work.get())
            except RefusedError as error:
                if error.status not in (404, 409):  # the pod has gone meanwhile
                    raise

    async def _report(self, pod: Object, address: str, *, ready: bool) -> None:
        await self._api.merge_by_keys(
            f"{_path(pod)}/status", {"status": pod_status(pod, address, ready, _now())}
        )

    async def _remove(self, pod: Object) -> None:
        await self._api.delete(
            _path(pod), {"gracePeriodSeconds": 0, "preconditions": {"uid": pod["metadata"]["uid"]}}
        )

    async def _register(self) -> None:
        node = {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": NODE, "labels": {LABEL: "true", "kubernetes.io/hostname": NODE}},
            "spec": {"taints": [{"key": LABEL, "value": "true", "effect": "NoSchedule"}]},
        }
        await self._api.post("/api/v1/nodes", node)
        room = {"cpu": "100000", "memory": "100000Gi", "pods": str(self._most_pods)}
        condition = {"type": "Ready", "status": "True", "reason": "Simulated", "lastTransitionTime": _now()}
        status = {
            "capacity": room,
            "allocatable": room,
            "conditions": [condition],
            "addresses": [{"type": "InternalIP", "address": _NODE_ADDRESS}],
        }
        await self._api.merge_by_keys(f"/api/v1/nodes/{NODE}/status", {"status": status})

    async def _renew(self) -> None:
        """By its Lease the node's lifecycle controller knows that the node is alive, and leaves its pods."""
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        lease = {
            "apiVersion": "coordination.k8s.io/v1",
            "kind": "Lease",
            "metadata": {"name": NODE, "namespace": "kube-node-lease"},
            "spec": {"holderIdentity": NODE, "leaseDurationSeconds": _LEASE_SECONDS},
        }
        await self._api.post(leases, lease)
        while True:
            renewed = {"spec": {"renewTime": datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%S.%fZ")}}
            await self._api.merge(f"{leases}/{NODE}", renewed)
            await asyncio.sleep(_RENEW_SECONDS)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """GET /admin/state of whichever pod was called, as often as the connection asks."""
        address = writer.get_extra_info("sockname")[0]
        try:
            while True:
                request = await reader.readuntil(b"\r\n\r\n")
                known = request.startswith(b"GET /admin/state ") and address in self._models
                body = json.dumps(self._state(address)).encode() if known else b""
                status = "200 OK" if known else "404 Not Found"
                head = f"HTTP/1.1 {status}\r\nContent-Length: {len(body)}\r\n"
                writer.write(f"{head}Content-Type: application/json\r\n\r\n".encode() + body)
                await writer.drain()
        except (asyncio.IncompleteReadError, ConnectionError, asyncio.CancelledError):
            pass  # the caller is done, or the bench is: a cancelled connection is logged as an error
        finally:
            writer.close()

    def _state(self, address: str) -> Object:
        key = self._models[address]
        return pod_state(key[1], self._generations.get(key, 0))


def pod_state(model: str, generation: int) -> Object:
    """What a pod answers on its admin port that has these settings in force: a PodState of the contract."""
    resolved = {"name": model, "revision": "simulated", "dtype": "bfloat16", "contextLength": 4096}
    return {"ready": True, "generation": generation, "inForce": "stable", "model": resolved}


def pod_status(pod: Object, address: str, ready: bool, now: str) -> Object:
    """What a kubelet reports of a pod whose one container runs, and may be ready."""
    container = pod["spec"]["containers"][0]
    conditions = {"PodScheduled": True, "Initialized": True, "ContainersReady": ready, "Ready": ready}
    return {
        "phase": "Running",
        "hostIP": _NODE_ADDRESS,
        "podIP": address,
        "podIPs": [{"ip": address}],
        "startTime": now,
        "conditions": [
            {"type": kind, "status": str(holds), "lastTransitionTime": now}
            for kind, holds in conditions.items()
        ],
        "containerStatuses": [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "simulated",
                "containerID": f"simulated://{pod['metadata']['uid']}",
                "ready": ready,
                "started": ready,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
        ],
    }


def _path(pod: Object) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _now() -> str:
    return datetime.now(UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
