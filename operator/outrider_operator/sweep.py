"""The look at everything: one list of metadata for each kind, which shows what a watch has not told.

A watch may go silent, and one that begins again does not tell of what was deleted in between. So every resync
interval the names and versions of all that is watched are listed, and only what differs is read. The first
sweep, over an empty cache, is the start.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Sequence
from typing import Final

from outrider_operator import names
from outrider_operator.cache import Cache, Differences, Key
from outrider_operator.client import ApiError, Client
from outrider_operator.observation import Object

logger = logging.getLogger(__name__)

CHILD_KINDS: Final = (
    "ConfigMap",
    "Deployment",
    "NetworkPolicy",
    "Pod",
    "PodDisruptionBudget",
    "Service",
    "ServiceAccount",
)
"""Kinds of which those with our label are watched and listed."""

_READ_ONE_BY_ONE: Final = 20
"""Of more differences than these, the whole kind is read."""


class HistoryLostError(Exception):
    """The API server's store was set back, as by a restored backup: only a new start knows what there is."""


class Sweeper:
    """Sweeps the namespaces that the operator serves: those named, or all."""

    def __init__(self, client: Client, cache: Cache, namespaces: Sequence[str]) -> None:
        self._client = client
        self._cache = cache
        self._namespaces: tuple[str | None, ...] = tuple(namespaces) or (None,)
        self._listed_at: dict[tuple[str, str | None], int] = {}

    async def sweep(self) -> frozenset[Key]:
        """Compare, read what differs; the SpeculativeModels that it may matter to.

        Raises:
            ApiError: a list was refused or did not come.
            HistoryLostError: versions went down, so that the cache cannot tell new from old any more.
        """
        touched: set[Key] = set()
        for namespace in self._namespaces:
            try:
                for kind in (names.KIND, *CHILD_KINDS):
                    touched |= await self._sweep_kind(kind, namespace)
            except ApiError as error:
                if namespace is None or error.status != 403:
                    raise
                # The right goes with the namespace: one that was deleted must not hold up the others.
                logger.warning("namespace %s is left out: %s", namespace, error)
        return frozenset(touched)

    async def _sweep_kind(self, kind: str, namespace: str | None) -> frozenset[Key]:
        labels = "" if kind == names.KIND else names.MODEL_LABEL
        try:
            entries, listed_at = await self._client.list_metadata(kind, namespace, labels=labels)
        except ApiError as error:
            raise ApiError(error.status, f"listing {kind}: {error}") from error
        if listed_at < self._listed_at.get((kind, namespace), 0):
            raise HistoryLostError(f"{kind}: a list of version {listed_at} after a later one")
        self._listed_at[kind, namespace] = listed_at
        scope = None if namespace is None else {namespace}
        differences = self._cache.compare(kind, scope, entries, listed_at)
        return differences.gone | await self._read(kind, namespace, labels, differences)

    async def _read(
        self, kind: str, namespace: str | None, labels: str, differences: Differences
    ) -> frozenset[Key]:
        unknown = differences.unknown
        found: Iterable[Object | None] = ()
        if len(unknown) > _READ_ONE_BY_ONE or (unknown and kind == "Pod"):  # of pods only lists are allowed
            found = await self._client.list_all(kind, namespace, labels=labels)
        elif unknown:
            calls = (self._client.get(kind, entry.namespace, entry.name) for entry in unknown)
            found = await asyncio.gather(*calls)
        return frozenset(key for each in found if each is not None for key in self._cache.put(each))
