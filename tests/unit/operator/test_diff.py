"""When an object counts as being as wanted, and what is written over foreign entries."""

from __future__ import annotations

from typing import Any

import pytest

from outrider_operator.diff import covers, overlay


@pytest.mark.parametrize(
    ("live", "desired", "same"),
    [
        ({"a": 1, "filled": "in"}, {"a": 1}, True),
        ({"a": 2}, {"a": 1}, False),
        ({}, {"a": 1}, False),
        ({"l": [{"name": "x", "filled": 1}]}, {"l": [{"name": "x"}]}, True),
        ({"l": [{"name": "x"}, {"name": "foreign"}]}, {"l": [{"name": "x"}]}, False),
        ({"l": [{"name": "y"}, {"name": "x"}]}, {"l": [{"name": "x"}, {"name": "y"}]}, False),
        ({"limits": {"cpu": "1", "memory": "1Gi"}}, {"limits": {"cpu": "1000m", "memory": "1024Mi"}}, True),
        ({"requests": {"cpu": "500m"}}, {"requests": {"cpu": "0.5"}}, True),
        ({"requests": {"cpu": "2"}}, {"requests": {"cpu": "1"}}, False),
        (
            {"requests": {"cpu": "1m"}},
            {"requests": {"cpu": "0.00000000001"}},
            True,
        ),  # rounded as it is stored
        ({"limits": {"memory": "9" * 30 + "E"}}, {"limits": {"memory": "9" * 30 + "E"}}, True),
        ({"requests": {"cpu": "1", "memory": "1Gi"}}, {"requests": {"cpu": "1"}}, False),
        ({"a": None}, {"a": {"b": 1}}, False),
        ({"emptyDir": {}}, {"emptyDir": {}}, True),
        ({"emptyDir": {"medium": "Memory"}}, {"emptyDir": {}}, False),
        ({}, {"nodeSelector": {}, "initContainers": []}, True),
        ({"nodeSelector": {"a": "b"}}, {"nodeSelector": {}}, False),
        ({"initContainers": [{"name": "x"}]}, {"initContainers": []}, False),
        ({"automount": 0}, {"automount": False}, True),
        (["x"], ["x", "y"], False),
        ({"selector": {"a": "b"}}, {"selector": {"a": "b"}}, True),
        ({"selector": {"a": "b", "c": "d"}}, {"selector": {"a": "b"}}, False),
        (
            {"podSelector": {"matchLabels": {"a": "b"}, "matchExpressions": [{"key": "c"}]}},
            {"podSelector": {"matchLabels": {"a": "b"}}},
            False,
        ),
        ({"ports": [{"port": 1}]}, {"from": [], "ports": [{"port": 1}]}, True),
        ({"from": [{"podSelector": {}}]}, {"from": []}, False),
    ],
)
def test_covers(live: Any, desired: Any, same: bool) -> None:
    assert covers(live, desired) is same


def test_overlay_drops_foreign_entries_and_keeps_other_fields() -> None:
    live = {
        "metadata": {"resourceVersion": "7", "annotations": {"a": "b"}},
        "spec": {"l": [{"name": "x"}, {"name": "y"}]},
    }
    live["spec"] |= {"nodeSelector": {"a": "b"}, "selector": {"a": "b", "c": "d"}}
    spec = {"l": [{"name": "x"}], "nodeSelector": {}, "selector": {"a": "b"}}
    desired = {"metadata": {"labels": {"c": "d"}}, "spec": spec}
    result = overlay(live, desired)
    assert result == {
        "metadata": {"resourceVersion": "7", "annotations": {"a": "b"}, "labels": {"c": "d"}},
        "spec": spec,
    }
    assert covers(result, desired)
