"""What the API server has told of SpeculativeModels and their children: so that looking costs it nothing.

Fed by watches, by the answers to our own writes (a pass sees what it has just written) and by the sweep,
which heals what a watch missed. Whatever comes late loses against what is newer: versions only go up, also
those of objects that are gone. Pure of the clock and of the client.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterable, Iterator, Set
from dataclasses import dataclass
from typing import Final, TypeVar

from outrider_operator import names
from outrider_operator.observation import Object

Key = tuple[str, str]
"""Namespace and name of a SpeculativeModel."""

_Place = tuple[str, str, str]
"""Kind, namespace and name."""

_T = TypeVar("_T")

_UNREAD: Final = frozenset({"annotations", "managedFields"})
"""Of the metadata."""

NOBODY: Final[frozenset[Key]] = frozenset()


@dataclass(frozen=True, slots=True)
class Entry:
    """One line of a list of metadata."""

    namespace: str
    name: str
    version: int


@dataclass(frozen=True, slots=True)
class Differences:
    """What a list has told that the watch had not."""

    unknown: tuple[Entry, ...]
    """Objects that are newer than, or not in, the cache: to be read."""

    gone: frozenset[Key]
    """SpeculativeModels of objects that are no more."""


class Cache:
    """Objects by kind, namespace and name. Those handed out are not to be changed."""

    def __init__(self) -> None:
        self._objects: dict[_Place, Object] = {}
        self._gone: dict[_Place, int] = {}  # versions of removed objects, until a list confirms them
        self._of_model: dict[Key, set[_Place]] = defaultdict(set)
        self._served: dict[Key, set[str]] = defaultdict(set)

    def get(self, kind: str, namespace: str, name: str) -> Object | None:
        """The object, or None where none is known."""
        return self._objects.get((kind, namespace, name))

    def of_model(self, namespace: str, model: str) -> Iterator[Object]:
        """All objects that carry the label of a SpeculativeModel, in the order of kinds and names."""
        for place in sorted(self._of_model.get((namespace, model), ())):
            yield self._objects[place]

    def models(self) -> Iterator[Object]:
        """Every SpeculativeModel."""
        return (found for place, found in self._objects.items() if place[0] == names.KIND)

    def namesakes(self, resource: Object) -> tuple[str, ...]:
        """Names of the other SpeculativeModels of the namespace that serve under the same name."""
        namespace, name = _key(resource)
        return tuple(sorted(self._served.get((namespace, names.served_name(resource)), set()) - {name}))

    def put(self, found: Object) -> Set[Key]:
        """Take an object as it was told; the SpeculativeModels that it matters to, none if it is not new."""
        place = _place(found)
        if version(found) <= self._version(place):
            return NOBODY
        before = self._objects.get(place)
        touched = self._drop(place) | self._add(place, _slim(found))
        self._gone.pop(place, None)
        if place[0] != names.KIND or before is None or names.served_name(before) != names.served_name(found):
            return touched
        return {_key(found)}  # those who share the served name share it as before

    def remove(self, found: Object) -> Set[Key]:
        """Take an object as deleted; the SpeculativeModels that it may matter to."""
        place = _place(found)
        if version(found) < self._version(place):
            return NOBODY  # a namesake has come since
        self._gone[place] = version(found)
        return self._drop(place)

    def compare(
        self, kind: str, namespaces: Set[str] | None, listed: Iterable[Entry], listed_at: int
    ) -> Differences:
        """Compare with a complete list of a kind, of those namespaces or all, and drop what is gone."""
        present: set[_Place] = set()
        unknown: list[Entry] = []
        for entry in listed:
            place = (kind, entry.namespace, entry.name)
            present.add(place)
            if entry.version > self._version(place):
                unknown.append(entry)
        stale = [
            place
            for place, found in self._objects.items()
            if place[0] == kind
            and (namespaces is None or place[1] in namespaces)
            and place not in present
            and version(found) <= listed_at
        ]
        gone = {key for place in stale for key in self._drop(place)}
        for place in [place for place, at in self._gone.items() if place[0] == kind and at <= listed_at]:
            del self._gone[place]
        return Differences(tuple(unknown), frozenset(gone))

    def _version(self, place: _Place) -> int:
        found = self._objects.get(place)
        return max(self._gone.get(place, 0), version(found) if found else 0)

    def _add(self, place: _Place, found: Object) -> set[Key]:
        self._objects[place] = found
        kind, namespace, name = place
        if kind == names.KIND:
            served = self._served[namespace, names.served_name(found)]
            served.add(name)
            return {(namespace, other) for other in served}
        if model := _model(found):
            self._of_model[namespace, model].add(place)
            return {(namespace, model)}
        return set()

    def _drop(self, place: _Place) -> set[Key]:
        found = self._objects.pop(place, None)
        if found is None:
            return set()
        kind, namespace, name = place
        if kind == names.KIND:
            served = (namespace, names.served_name(found))
            sharing = {(namespace, other) for other in self._served[served]}
            _discard(self._served, served, name)
            return sharing
        if model := _model(found):
            _discard(self._of_model, (namespace, model), place)
            return {(namespace, model)}
        return set()


def version(found: Object) -> int:
    """The resource version, which grows with every change of any object of a kind."""
    return int(found["metadata"]["resourceVersion"])


def _discard(sets: dict[Key, set[_T]], key: Key, item: _T) -> None:
    sets[key].discard(item)
    if not sets[key]:
        del sets[key]


def _key(found: Object) -> Key:
    return found["metadata"]["namespace"], found["metadata"]["name"]


def _place(found: Object) -> _Place:
    return (found["kind"], *_key(found))


def _model(found: Object) -> str:
    """The SpeculativeModel that the label names; a label may be empty, a name may not."""
    return str(found["metadata"].get("labels", {}).get(names.MODEL_LABEL, ""))


def _slim(found: Object) -> Object:
    """Without what nobody here reads, of which there may be much, and what a pod was started with."""
    metadata = {key: value for key, value in found["metadata"].items() if key not in _UNREAD}
    slim = {**found, "metadata": metadata}
    if found["kind"] == "Pod":
        slim.pop("spec", None)
    return slim
