"""The regular look at all: what it asks for, and what of it reaches the cache."""

from __future__ import annotations

from typing import Any

import pytest

from outrider_operator.cache import Cache, Entry
from outrider_operator.client import ApiError
from outrider_operator.sweep import CHILD_KINDS, HistoryLostError, Sweeper

Object = dict[str, Any]


def thing(kind: str, name: str, version: int, model: str = "m") -> Object:
    metadata = {
        "namespace": "ns",
        "name": name,
        "resourceVersion": str(version),
        "labels": {"outrider.dev/model": model},
    }
    return {"kind": kind, "metadata": metadata, "spec": {}}


class Api:
    """The part of Client that a sweep uses, over a few objects, which keeps what it was asked."""

    def __init__(self, *objects: Object) -> None:
        self.objects = list(objects)
        self.asked: list[tuple[str, ...]] = []

    def _of(self, kind: str) -> list[Object]:
        return [found for found in self.objects if found["kind"] == kind]

    async def list_metadata(self, kind: str, namespace: str | None, *, labels: str) -> Any:
        self.asked.append(("metadata", kind, namespace or "*", labels))
        entries = [
            Entry("ns", found["metadata"]["name"], int(found["metadata"]["resourceVersion"]))
            for found in self._of(kind)
        ]
        return entries, 100

    async def list_all(self, kind: str, namespace: str | None, *, labels: str) -> list[Object]:
        self.asked.append(("list", kind, namespace or "*", labels))
        return self._of(kind)

    async def get(self, kind: str, namespace: str, name: str) -> Object | None:
        self.asked.append(("get", kind, namespace, name))
        return next((found for found in self._of(kind) if found["metadata"]["name"] == name), None)


def reads(api: Api) -> list[tuple[str, ...]]:
    return [call for call in api.asked if call[0] != "metadata"]


async def test_one_list_of_each_kind_and_nothing_more_while_nothing_differs() -> None:
    cache, found = Cache(), thing("Service", "m", 3)
    cache.put(found)
    api = Api(found)
    assert await Sweeper(api, cache, ()).sweep() == set()  # type: ignore[arg-type]
    assert api.asked == [
        ("metadata", "SpeculativeModel", "*", ""),
        *(("metadata", kind, "*", "outrider.dev/model") for kind in CHILD_KINDS),
    ]


async def test_listed_namespaces_are_asked_for_one_by_one() -> None:
    api = Api()
    await Sweeper(api, Cache(), ("a", "b")).sweep()  # type: ignore[arg-type]
    assert [call[2] for call in api.asked] == ["a"] * 8 + ["b"] * 8


async def test_what_differs_is_read_and_told() -> None:
    cache = Cache()
    cache.put(thing("Service", "m", 3))
    cache.put(thing("ConfigMap", "n", 3, "n"))
    api = Api(thing("Service", "m", 4), thing("Deployment", "o", 5, "o"))
    touched = await Sweeper(api, cache, ()).sweep()  # type: ignore[arg-type]
    assert touched == {("ns", "m"), ("ns", "n"), ("ns", "o")}
    assert sorted(reads(api)) == [("get", "Deployment", "ns", "o"), ("get", "Service", "ns", "m")]
    assert cache.get("ConfigMap", "ns", "n") is None
    assert cache.get("Deployment", "ns", "o") is not None


async def test_many_are_read_in_one_list_and_pods_always() -> None:
    api = Api(*(thing("Service", f"s{number}", 1) for number in range(30)), thing("Pod", "p", 1, "q"))
    touched = await Sweeper(api, Cache(), ()).sweep()  # type: ignore[arg-type]
    assert touched == {("ns", "m"), ("ns", "q")}
    assert reads(api) == [
        ("list", "Pod", "*", "outrider.dev/model"),
        ("list", "Service", "*", "outrider.dev/model"),
    ]


async def test_a_listed_namespace_without_rights_does_not_hold_up_the_others() -> None:
    class Refusing(Api):
        async def list_metadata(self, kind: str, namespace: str | None, *, labels: str) -> Any:
            if namespace == "gone":
                raise ApiError(403, "services is forbidden")
            return await super().list_metadata(kind, namespace, labels=labels)

    api = Refusing(thing("Service", "m", 1))
    assert await Sweeper(api, Cache(), ("gone", "ns")).sweep() == {("ns", "m")}  # type: ignore[arg-type]
    with pytest.raises(ApiError, match="forbidden"):
        await Sweeper(Forbidden(), Cache(), ()).sweep()  # type: ignore[arg-type]


class Forbidden(Api):
    async def list_metadata(self, kind: str, namespace: str | None, *, labels: str) -> Any:
        raise ApiError(403, "services is forbidden")


async def test_a_store_that_was_set_back_is_noticed() -> None:
    class Restored(Api):
        at = 100

        async def list_metadata(self, kind: str, namespace: str | None, *, labels: str) -> Any:
            return [], self.at

    api = Restored()
    sweeper = Sweeper(api, Cache(), ())  # type: ignore[arg-type]
    await sweeper.sweep()
    await sweeper.sweep()
    api.at = 99
    with pytest.raises(HistoryLostError, match="version 99 after a later one"):
        await sweeper.sweep()


async def test_one_that_is_gone_when_it_is_read_is_no_error() -> None:
    class Late(Api):
        async def get(self, kind: str, namespace: str, name: str) -> Object | None:
            return None

    assert await Sweeper(Late(thing("Service", "m", 1)), Cache(), ()).sweep() == set()  # type: ignore[arg-type]
