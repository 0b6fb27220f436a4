"""What is done to the operator, and what is measured meanwhile."""

from __future__ import annotations

import asyncio
import json
import os
import random
import sys
import time
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, Final

import aiohttp
from tools.fleet.api import Api, Object
from tools.fleet.figures import (
    Samples,
    bucket_of,
    counts,
    difference,
    needless,
    refusals,
    spread,
    sums,
    value,
)
from tools.fleet.operator_pod import CALLS, DEPTH, LEADER, PASSES, WAITS, OperatorPod, Usage, until
from tools.fleet.simulation import ENGINE
from tools.fleet.watchers import CHILDREN, KIND, Expectation, Heard, Key, Watchers

Figures = dict[str, Any]

_SECONDS_EACH: Final = 2.0
"""Most seconds that any phase may take for each SpeculativeModel, on top of the fixed ones."""

_FIXED_SECONDS: Final = 180.0

_SENDERS: Final = 8
"""Requests of the bench that are under way at once: more take the API server no less time."""


@dataclass(frozen=True, slots=True)
class Size:
    """How large the fleet is, and how long things last."""

    count: int
    namespaces: int
    idle_seconds: float
    singles: int


class Phases:
    """The phases, in their order; each leaves its figures under its name."""

    def __init__(self, api: Api, watchers: Watchers, operator: OperatorPod, size: Size) -> None:
        self._api = api
        self._watchers = watchers
        self._operator = operator
        self._size = size
        self._patience = _FIXED_SECONDS + _SECONDS_EACH * size.count
        self._keys: list[Key] = [
            (f"fleet-{number % size.namespaces}", f"model-{number}") for number in range(size.count)
        ]
        self.figures: dict[str, Figures] = {}

    async def run(self) -> None:
        """All of them."""
        await self._make_namespaces()
        await self._burst()
        await self._idle("idle")
        await self._change(depth=4)
        await self._idle("idle again")
        await self._singles(depth=5)
        await self._restart()

    async def _make_namespaces(self) -> None:
        for namespace in sorted({namespace for namespace, _ in self._keys}):
            await self._api.post("/api/v1/namespaces", {"metadata": {"name": namespace}})

    async def _burst(self) -> None:
        """All are created at once."""
        missing = {key: set(CHILDREN) for key in self._keys}

        def complete(heard: Heard) -> bool:
            missing[heard.key].discard(heard.kind)
            return not missing[heard.key]

        children = self._watchers.expect(self._keys, complete)
        ready = self._watchers.expect(
            self._keys, lambda heard: heard.kind == KIND and is_in_force(heard.found)
        )

        async def create(key: Key) -> None:
            children.begin(key)
            ready.begin(key)
            await self._api.post(_models(key), model(key))

        async with self._phase("burst") as figures:
            figures["all are sent"] = await _for_each(self._keys, create)
            await self._conclude(figures, {"every child is there": children, "Ready": ready})

    async def _change(self, depth: int) -> None:
        """The proposer of all is changed at once."""
        async with self._phase("change of all") as figures:
            written, reported = self._expect_depth(self._keys, depth)

            async def change(key: Key) -> None:
                written.begin(key)
                reported.begin(key)
                await self._set_depth(key, depth)

            figures["all are sent"] = await _for_each(self._keys, change)
            await self._conclude(
                figures, {"the ConfigMap has it": written, "the status says it is in force": reported}
            )

    async def _singles(self, depth: int) -> None:
        """One SpeculativeModel after the other meets a change, among all the others."""
        chosen = random.Random(0).sample(self._keys, min(self._size.singles, len(self._keys)))
        services: list[float] = []
        settings: list[float] = []
        reports: list[float] = []
        async with self._phase("single changes") as figures:
            for key in chosen:
                services.append(await self._lose_service(key))
                await asyncio.sleep(0.5)
                written, reported = self._expect_depth([key], depth)
                written.begin(key)
                reported.begin(key)
                await self._set_depth(key, depth)
                settings += await written.wait(self._patience)
                reports += await reported.wait(self._patience)
                self._watchers.forget(written, reported)
                await asyncio.sleep(0.5)
            figures["latency"] = {
                "a deleted Service is back": spread(services),
                "the ConfigMap has it": spread(settings),
                "the status says it is in force": spread(reports),
            }
            await self._operator.settle(self._patience)

    async def _lose_service(self, key: Key) -> float:
        path = f"/api/v1/namespaces/{key[0]}/services/{key[1]}"
        old = (await self._api.get(path))["metadata"]["uid"]
        back = self._watchers.expect(
            [key],
            lambda heard: (
                heard.kind == "Service" and not heard.deleted and heard.found["metadata"]["uid"] != old
            ),
        )
        back.begin(key)
        await self._api.delete(path)
        (seconds,) = await back.wait(self._patience)
        self._watchers.forget(back)
        return seconds

    async def _idle(self, name: str) -> None:
        """Nothing happens."""
        async with self._phase(name, quiet=True):
            await asyncio.sleep(self._size.idle_seconds)

    async def _restart(self) -> None:
        """The operator's pod is deleted; the next one finds everything as it should be."""
        async with self._phase("restart", quiet=True) as figures:
            began, old = time.monotonic(), self._operator.uid
            await self._operator.delete()
            await self._operator.find(other_than=old)
            figures["the next process runs"] = time.monotonic() - began

            async def settled() -> bool:
                try:
                    samples = await self._operator.metrics()
                except (aiohttp.ClientError, OSError):  # its port is not open yet
                    return False
                if value(samples, LEADER):
                    figures.setdefault("the next process leads", time.monotonic() - began)
                passes = value(samples, f"{PASSES}_count")
                return passes >= self._size.count and not value(samples, DEPTH)

            await until(settled, self._patience, "operator that has looked at everything")
            figures["all was looked at"] = time.monotonic() - began
            await self._operator.settle(self._patience)

    def _expect_depth(self, keys: Sequence[Key], depth: int) -> tuple[Expectation, Expectation]:
        """That the ConfigMap has the depth, and that the status says it is in force."""
        return (
            self._watchers.expect(
                keys, lambda heard: heard.kind == "ConfigMap" and depth_in(heard.found) == depth
            ),
            self._watchers.expect(
                keys,
                lambda heard: (
                    heard.kind == KIND
                    and heard.found["spec"]["proposer"]["maxDepth"] == depth
                    and is_in_force(heard.found)
                ),
            ),
        )

    async def _set_depth(self, key: Key, depth: int) -> None:
        await self._api.merge(f"{_models(key)}/{key[1]}", {"spec": {"proposer": {"maxDepth": depth}}})

    async def _conclude(self, figures: Figures, expected: dict[str, Expectation]) -> None:
        """Wait for what is expected of all, and for the operator to be quiet again."""
        progress = asyncio.create_task(_tell(expected))
        try:
            figures["latency"] = {
                what: spread(await expectation.wait(self._patience)) for what, expectation in expected.items()
            }
        finally:
            progress.cancel()
        self._watchers.forget(*expected.values())
        await self._operator.settle(self._patience)

    @asynccontextmanager
    async def _phase(self, name: str, *, quiet: bool = False) -> AsyncIterator[Figures]:
        """Measure what the operator does meanwhile; in a quiet phase it must write nothing but its Lease."""
        say(f"{name} ...")
        figures: Figures = {"load": os.getloadavg()[0]}
        before, used, begin = await self._operator.metrics(), self._operator.usage(), datetime.now(UTC)
        yield figures
        end, after, using = datetime.now(UTC), await self._operator.metrics(), self._operator.usage()
        seconds = (end - begin).total_seconds()
        restarted = used.pid != using.pid
        figures["seconds"] = seconds
        figures["process"] = _process(None if restarted else used, using)
        figures["metrics"] = _metrics(after if restarted else difference(before, after))
        found = await self._operator.requests(begin, end)
        figures["calls"] = counts(found)
        figures["own calls"] = sum(not request.by_watcher for request in found)
        figures["answers above 399"] = refusals(found)
        if quiet:
            figures["needless writes"] = needless(figures["calls"])
        self.figures[name] = figures
        say(f"{name}: {seconds:.0f} s, {len(found)} requests, {figures.get('latency', '')}")


def is_in_force(found: Object) -> bool:
    """Whether a SpeculativeModel is Ready by its newest spec, with its settings in force."""
    status = found.get("status", {})
    ready: Object = next((c for c in status.get("conditions", ()) if c["type"] == "Ready"), {})
    settings = status.get("settings", {})
    return bool(
        ready.get("status") == "True"
        and ready["observedGeneration"] == found["metadata"]["generation"]
        and settings.get("generation", 0) == settings.get("reportedGeneration")
    )


def depth_in(config_map: Object) -> int:
    """The deepest proposal that the settings in force allow."""
    settings = json.loads(config_map["data"]["settings.json"])
    return int(settings["arms"][settings["inForce"]]["proposer"]["maxDepth"])


def model(key: Key) -> Object:
    """A SpeculativeModel whose pod goes to the simulated node."""
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": KIND,
        "metadata": {"namespace": key[0], "name": key[1]},
        "spec": {"model": {"source": {"package": "simulated"}}, "engine": ENGINE},
    }


def say(text: str) -> None:
    """A line of progress."""
    print(f"{datetime.now(UTC):%H:%M:%S} {text}", file=sys.stderr, flush=True)


def _models(key: Key) -> str:
    return f"/apis/outrider.dev/v1alpha1/namespaces/{key[0]}/speculativemodels"


async def _for_each(keys: Sequence[Key], do: Callable[[Key], Awaitable[None]]) -> float:
    """Do it for all, as fast as the API server takes it; seconds."""
    began, ahead = time.monotonic(), iter(keys)

    async def work() -> None:
        for key in ahead:
            await do(key)

    async with asyncio.TaskGroup() as group:
        for _ in range(_SENDERS):
            group.create_task(work())
    return time.monotonic() - began


async def _tell(expected: dict[str, Expectation]) -> None:
    while True:
        await asyncio.sleep(10)
        say(", ".join(f"{what}: {expectation.left} to come" for what, expectation in expected.items()))


def _process(before: Usage | None, after: Usage) -> Figures:
    """CPU seconds of the phase; memory as it is at its end, and the most so far."""
    return {
        "CPU seconds": after.cpu_seconds - (before.cpu_seconds if before else 0.0),
        "resident MiB": after.resident_mib,
        "most resident MiB": after.peak_mib,
    }


def _metrics(grown: Samples) -> Figures:
    """What the operator says of itself."""
    calls = sums(grown, f"{CALLS}_count", "verb", "kind", "code")
    passes = sums(grown, f"{PASSES}_count", "failed")
    return {
        "calls": {" ".join(key): int(count) for key, count in sorted(calls.items())},
        "passes": int(sum(passes.values())),
        "failed passes": int(passes.get(("true",), 0)),
        "queue wait at most": {"p50": bucket_of(grown, WAITS, 0.5), "p99": bucket_of(grown, WAITS, 0.99)},
        "pass at most": {"p50": bucket_of(grown, PASSES, 0.5), "p99": bucket_of(grown, PASSES, 0.99)},
        "call at most": {"p50": bucket_of(grown, CALLS, 0.5), "p99": bucket_of(grown, CALLS, 0.99)},
    }
