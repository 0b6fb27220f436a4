"""What the bench hears of SpeculativeModels and their children, and how long it waits for what it expects."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Final

from tools.fleet.api import Api, Object

Key = tuple[str, str]
"""Namespace and name of a SpeculativeModel."""

KIND: Final = "SpeculativeModel"
MODEL_LABEL: Final = "outrider.dev/model"
MODELS: Final = "/apis/outrider.dev/v1alpha1/speculativemodels"
CHILDREN: Final = {
    "ServiceAccount": "/api/v1/serviceaccounts",
    "ConfigMap": "/api/v1/configmaps",
    "NetworkPolicy": "/apis/networking.k8s.io/v1/networkpolicies",
    "Service": "/api/v1/services",
    "PodDisruptionBudget": "/apis/policy/v1/poddisruptionbudgets",
    "Deployment": "/apis/apps/v1/deployments",
}
"""Where the kinds of children are listed that the operator makes, one of each."""


@dataclass(frozen=True, slots=True)
class Heard:
    """An object as a watch told it."""

    kind: str
    key: Key
    found: Object
    deleted: bool


class Expectation:
    """How long it takes from a moment, one for each SpeculativeModel, until what is heard is as expected."""

    def __init__(self, keys: Iterable[Key], met: Callable[[Heard], bool]) -> None:
        self._began: dict[Key, float] = {}
        self._left = set(keys)
        self._met = met
        self._complete = asyncio.Event()
        self.seconds: dict[Key, float] = {}

    def begin(self, key: Key) -> None:
        """The clock of a SpeculativeModel starts."""
        self._began[key] = time.monotonic()

    def hear(self, heard: Heard) -> None:
        """Take news; what was met once stays so."""
        if heard.key in self._left and heard.key in self._began and self._met(heard):
            self.seconds[heard.key] = time.monotonic() - self._began[heard.key]
            self._left.discard(heard.key)
            if not self._left:
                self._complete.set()

    async def wait(self, seconds: float) -> list[float]:
        """Seconds that each took.

        Raises:
            TimeoutError: some were not met in time.
        """
        try:
            await asyncio.wait_for(self._complete.wait(), seconds)
        except TimeoutError:
            some = ", ".join(f"{namespace}/{name}" for namespace, name in sorted(self._left)[:5])
            raise TimeoutError(f"{len(self._left)} not met within {seconds:.0f} s, such as {some}") from None
        return list(self.seconds.values())

    @property
    def left(self) -> int:
        """How many are still waited for."""
        return len(self._left)


class Watchers:
    """Watches of all kinds, whose news go to whoever listens."""

    def __init__(self, api: Api) -> None:
        self._api = api
        self._listeners: list[Callable[[Heard], None]] = []

    def listen(self, hear: Callable[[Heard], None]) -> None:
        """From now on, tell this one too."""
        self._listeners.append(hear)

    def expect(self, keys: Iterable[Key], met: Callable[[Heard], bool]) -> Expectation:
        """An expectation that is told everything from now on."""
        made = Expectation(keys, met)
        self.listen(made.hear)
        return made

    def forget(self, *expectations: Expectation) -> None:
        """Tell these no more."""
        gone = [expectation.hear for expectation in expectations]
        self._listeners = [each for each in self._listeners if each not in gone]

    async def run(self) -> None:
        """Watch until cancelled."""
        async with asyncio.TaskGroup() as group:
            group.create_task(self._api.watch(MODELS, "", self._teller(KIND)))
            for kind, path in {**CHILDREN, "Pod": "/api/v1/pods"}.items():
                group.create_task(self._api.watch(path, MODEL_LABEL, self._teller(kind)))

    def _teller(self, kind: str) -> Callable[[str, Object], None]:
        def tell(event: str, found: Object) -> None:
            metadata = found["metadata"]
            name = metadata["name"] if kind == KIND else metadata["labels"][MODEL_LABEL]
            heard = Heard(kind, (metadata["namespace"], name), found, event == "DELETED")
            for listener in self._listeners:
                listener(heard)

        return tell
