"""What the cache holds after news in any order, and whom the news concern."""

from __future__ import annotations

import itertools
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_operator.cache import Cache, Entry

Object = dict[str, Any]


def thing(kind: str, name: str, version: int, model: str | None = None, **more: Any) -> Object:
    labels = {} if model is None else {"outrider.dev/model": model}
    metadata = {"namespace": "ns", "name": name, "resourceVersion": str(version), "labels": labels}
    return {"kind": kind, "metadata": metadata, **more}


def specm(name: str, version: int, served: str | None = None) -> Object:
    model = {} if served is None else {"servedName": served}
    return thing("SpeculativeModel", name, version, spec={"model": model})


def filled(*objects: Object) -> Cache:
    cache = Cache()
    for found in objects:
        cache.put(found)
    return cache


def test_what_is_put_is_found_by_name_and_by_model() -> None:
    service, pod = thing("Service", "x", 3, "x"), thing("Pod", "x-1", 4, "x", spec={"containers": []})
    cache = filled(service, pod, thing("Service", "other", 5))
    assert cache.get("Service", "ns", "x") == service
    assert cache.get("Service", "other-ns", "x") is None
    assert [found["kind"] for found in cache.of_model("ns", "x")] == ["Pod", "Service"]
    assert list(cache.of_model("ns", "y")) == []


def test_what_nobody_reads_is_not_kept() -> None:
    found = thing("Pod", "p", 1, "x", spec={"containers": []})
    found["metadata"] |= {"managedFields": [{"manager": "kubelet"}], "annotations": {"long": "x" * 1000}}
    kept = filled(found).get("Pod", "ns", "p")
    assert kept is not None
    assert "spec" not in kept
    assert not {"managedFields", "annotations"} & set(kept["metadata"])
    assert "managedFields" in found["metadata"]  # the caller's own is left as it was


def test_news_concern_the_model_of_the_label_before_and_after() -> None:
    cache = Cache()
    assert cache.put(thing("Service", "x", 1, "a")) == {("ns", "a")}
    assert cache.put(thing("Service", "x", 2, "b")) == {("ns", "a"), ("ns", "b")}
    assert cache.put(thing("Service", "x", 3)) == {("ns", "b")}
    assert cache.put(thing("Service", "x", 4, "")) == set()
    assert list(cache.of_model("ns", "b")) == []


@pytest.mark.parametrize("late", [1, 2])
def test_an_echo_and_old_news_change_nothing(late: int) -> None:
    cache = filled(thing("Service", "x", 2, "a", spec="new"))
    assert cache.put(thing("Service", "x", late, "a", spec="old")) == set()
    found = cache.get("Service", "ns", "x")
    assert found is not None
    assert found["spec"] == "new"


def test_an_answer_that_comes_after_the_deletion_brings_nothing_back() -> None:
    cache = filled(thing("Service", "x", 1, "a"))
    assert cache.remove(thing("Service", "x", 3, "a")) == {("ns", "a")}
    assert cache.put(thing("Service", "x", 2, "a")) == set()
    assert cache.get("Service", "ns", "x") is None
    assert cache.put(thing("Service", "x", 4, "a")) == {("ns", "a")}


def test_a_late_deletion_does_not_take_the_namesake() -> None:
    cache = filled(thing("Service", "x", 5, "a"))
    assert cache.remove(thing("Service", "x", 4, "a")) == set()
    assert cache.get("Service", "ns", "x") is not None


def test_models_that_share_a_served_name_hear_of_each_other() -> None:
    cache = Cache()
    assert cache.put(specm("a", 1)) == {("ns", "a")}
    assert cache.put(specm("b", 2, served="a")) == {("ns", "a"), ("ns", "b")}
    assert cache.namesakes(specm("a", 1)) == ("b",)
    assert cache.put(specm("b", 3, served="b")) == {("ns", "a"), ("ns", "b")}
    assert cache.namesakes(specm("a", 1)) == ()
    assert cache.remove(specm("a", 4)) == {("ns", "a")}


def test_what_changes_nothing_of_the_name_concerns_nobody_else() -> None:
    cache = filled(specm("a", 1), specm("b", 2, served="a"))
    assert cache.put(specm("b", 3, served="a")) == {("ns", "b")}


class TestCompare:
    def test_what_is_newer_or_not_known_is_to_be_read(self) -> None:
        cache = filled(thing("Service", "same", 1), thing("Service", "old", 2))
        listed = [Entry("ns", "same", 1), Entry("ns", "old", 5), Entry("ns", "new", 4)]
        differences = cache.compare("Service", None, listed, 6)
        assert differences.unknown == (Entry("ns", "old", 5), Entry("ns", "new", 4))
        assert differences.gone == set()

    def test_what_is_not_listed_is_gone(self) -> None:
        cache = filled(thing("Service", "x", 3, "a"), thing("Pod", "x", 3, "a"))
        assert cache.compare("Service", None, [], 3).gone == {("ns", "a")}
        assert [found["kind"] for found in cache.of_model("ns", "a")] == ["Pod"]

    def test_what_came_after_the_list_is_kept(self) -> None:
        cache = filled(thing("Service", "x", 4, "a"))
        assert cache.compare("Service", None, [], 3).gone == set()
        assert cache.get("Service", "ns", "x") is not None

    def test_other_namespaces_are_not_spoken_of(self) -> None:
        cache = filled(thing("Service", "x", 1, "a"))
        assert cache.compare("Service", {"elsewhere"}, [], 9).gone == set()
        assert cache.compare("Service", {"ns"}, [], 9).gone == {("ns", "a")}

    def test_one_deleted_after_the_list_was_made_is_not_read_again(self) -> None:
        cache = filled(thing("Service", "x", 1, "a"))
        cache.remove(thing("Service", "x", 3, "a"))
        assert cache.compare("Service", None, [Entry("ns", "x", 1)], 2).unknown == ()


@given(
    history=st.lists(st.sampled_from(["put", "remove"]), min_size=1, max_size=5),
    order=st.randoms(use_true_random=False),
)
def test_news_in_any_order_end_the_same(history: list[str], order: Any) -> None:
    """Whatever order news arrive in, what stays is what the newest of them says."""
    news = list(enumerate(history, start=1))
    order.shuffle(news)
    cache = Cache()
    for version, what in news:
        getattr(cache, what)(thing("Service", "x", version, "a"))
    found = cache.get("Service", "ns", "x")
    assert (found is not None) == (history[-1] == "put")
    assert len(list(cache.of_model("ns", "a"))) == (found is not None)
    if found is not None:
        assert found["metadata"]["resourceVersion"] == str(len(history))


def test_namespaces_are_apart() -> None:
    cache = Cache()
    for version, (namespace, name) in enumerate(itertools.product("ab", "xy"), start=1):
        found = thing("Service", name, version, "m")
        found["metadata"]["namespace"] = namespace
        cache.put(found)
    assert [found["metadata"]["name"] for found in cache.of_model("a", "m")] == ["x", "y"]
