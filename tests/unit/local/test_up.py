"""A second `make up` applies the example again only if the example has changed."""

from __future__ import annotations

import json
from typing import Any

import pytest

from outrider_local.up import _was_applied

SPEC = {"proposer": {"method": "ngram"}}


def live(applied: Any) -> dict[str, Any]:
    """A resource that a user has edited since kubectl applied `applied`."""
    text = json.dumps({"kind": "SpeculativeModel", "spec": applied})
    annotations = {"kubectl.kubernetes.io/last-applied-configuration": text}
    return {"metadata": {"annotations": annotations}, "spec": {"proposer": {"method": "none"}}}


@pytest.mark.parametrize(
    ("resource", "expected"),
    [
        (live(SPEC), True),
        (live({"proposer": {"method": "none"}}), False),
        ({"metadata": {}, "spec": SPEC}, False),
        ({}, False),
    ],
)
def test_edits_are_kept_while_the_example_is_the_same(resource: dict[str, Any], expected: bool) -> None:
    assert _was_applied(resource, SPEC) is expected
