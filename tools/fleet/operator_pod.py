"""The operator as the bench sees it from outside: its metrics, its process, its lines in the audit log."""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Iterator
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Final, TypeVar

import aiohttp
from tools.fleet.api import Api, Object
from tools.fleet.figures import Request, Samples, parse, requests, sums, value

NAMESPACE: Final = "outrider-system"
_SELECTOR: Final = "app.kubernetes.io/name=outrider-operator"
_PORT: Final = 8080
CALLS: Final = "outrider_operator_api_duration_seconds"
PASSES: Final = "outrider_operator_reconcile_duration_seconds"
WAITS: Final = "outrider_operator_queue_wait_seconds"
DEPTH: Final = "outrider_operator_queue_depth"
LEADER: Final = "outrider_operator_leader"

_QUIET_SECONDS: Final = 5.0
_T = TypeVar("_T")


@dataclass(frozen=True, slots=True)
class Usage:
    """What the operator's process has used since its start."""

    pid: int
    cpu_seconds: float
    resident_mib: float
    peak_mib: float
    """The most that was ever resident."""


class OperatorPod:
    """The one pod of the operator, and its successor after `replaced`."""

    def __init__(self, api: Api, session: aiohttp.ClientSession, audit_log: Path) -> None:
        self._api = api
        self._session = session
        self._audit_log = audit_log
        self._pod: Object = {}
        self._pid = 0

    async def find(self, other_than: str = "") -> None:
        """Look up the running pod, which is not the one of that uid.

        Raises:
            TimeoutError: there is none within two minutes.
        """

        async def running() -> Object | None:
            found = await self._api.get(f"/api/v1/namespaces/{NAMESPACE}/pods?labelSelector={_SELECTOR}")
            for pod in found["items"]:
                statuses = pod["status"].get("containerStatuses", [])
                if pod["metadata"]["uid"] != other_than and statuses and "running" in statuses[0]["state"]:
                    return dict(pod)
            return None

        self._pod = await until(running, 120, "a running pod of the operator")
        container = self._pod["status"]["containerStatuses"][0]["containerID"].partition("://")[2]
        self._pid = process_of(container)

    @property
    def uid(self) -> str:
        """UID of the pod."""
        return str(self._pod["metadata"]["uid"])

    async def delete(self) -> None:
        """Have the pod ended as an upgrade or a drain ends it."""
        await self._api.delete(f"/api/v1/namespaces/{NAMESPACE}/pods/{self._pod['metadata']['name']}")

    async def metrics(self) -> Samples:
        """What it says of itself."""
        url = f"http://{self._pod['status']['podIP']}:{_PORT}/metrics"
        async with self._session.get(url, timeout=aiohttp.ClientTimeout(total=30)) as answer:
            answer.raise_for_status()
            return parse(await answer.text())

    def usage(self) -> Usage:
        """What its process has used."""
        fields = Path(f"/proc/{self._pid}/stat").read_text().rpartition(")")[2].split()
        memory = {
            line.split(":")[0]: line.split()[1]
            for line in Path(f"/proc/{self._pid}/status").read_text().splitlines()
            if ":" in line
        }
        return Usage(
            pid=self._pid,
            cpu_seconds=(int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK"),
            resident_mib=int(memory["VmRSS"]) / 1024,
            peak_mib=int(memory["VmHWM"]) / 1024,
        )

    async def requests(self, begin: datetime, end: datetime) -> list[Request]:
        """What it asked of the API server in [begin, end), by the audit log."""
        account = f"{NAMESPACE}:{self._pod['spec']['serviceAccountName']}"
        return await asyncio.to_thread(lambda: requests(self._lines(), account, begin, end))

    async def settle(self, seconds: float) -> None:
        """Wait until nothing is queued and nothing was written for a while, its Lease aside."""
        last, since = -1.0, time.monotonic()

        async def quiet() -> bool:
            nonlocal last, since
            samples = await self.metrics()
            wrote = writes(samples)
            if wrote != last or value(samples, DEPTH):
                last, since = wrote, time.monotonic()
            return time.monotonic() - since >= _QUIET_SECONDS

        await until(quiet, seconds, "a quiet operator")

    def _lines(self) -> Iterator[str]:
        """All parts of the audit log, the oldest first; they are rotated while we read at worst once."""
        log = self._audit_log
        for part in (*sorted(log.parent.glob(f"{log.stem}-*{log.suffix}")), log):
            with part.open(encoding="utf-8") as file:
                yield from file


async def until(check: Callable[[], Awaitable[_T | None]], seconds: float, what: str) -> _T:
    """What a check finds, asked twice a second; None and False mean not yet.

    Raises:
        TimeoutError: it finds nothing in time.
    """
    end = time.monotonic() + seconds
    while not (found := await check()):
        if time.monotonic() > end:
            raise TimeoutError(f"no {what} within {seconds:.0f} s")
        await asyncio.sleep(0.5)
    return found


def writes(samples: Samples) -> float:
    """How many writes a process has sent, its Lease aside."""
    calls = sums(samples, f"{CALLS}_count", "verb", "kind")
    return sum(count for (verb, kind), count in calls.items() if verb != "get" and kind != "Lease")


def process_of(container: str) -> int:
    """The first process of a container, by the cgroup that bears its id.

    Raises:
        LookupError: there is none.
    """
    for folder in sorted(Path("/proc").glob("[0-9]*"), key=lambda folder: int(folder.name)):
        try:
            if container in (folder / "cgroup").read_text():
                return int(folder.name)
        except OSError:
            continue  # it has ended meanwhile
    raise LookupError(f"no process of container {container}")
