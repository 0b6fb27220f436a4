"""The CRD: structural, described, bounded, and the same as the files in the repository."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel, Field

from outrider_operator import generate
from outrider_operator.crd import custom_resource_definition
from outrider_operator.schema import structural_schema

Schema = dict[str, Any]

CRD = custom_resource_definition()
ROOT = CRD["spec"]["versions"][0]["schema"]["openAPIV3Schema"]
FORBIDDEN = {
    "$ref",
    "$defs",
    "title",
    "allOf",
    "oneOf",
    "not",
    "const",
    "nullable",
    "uniqueItems",
    "patternProperties",
}


def nodes(schema: Schema, path: str = "") -> Iterator[tuple[str, Schema]]:
    yield path, schema
    for name, inner in schema.get("properties", {}).items():
        yield from nodes(inner, f"{path}.{name}")
    for key in ("items", "additionalProperties"):
        if key in schema:
            yield from nodes(schema[key], f"{path}[]")


ALL = [(path, node) for path, node in nodes(ROOT) if path.startswith((".spec", ".status"))]


def test_structural() -> None:
    for path, node in ALL:
        assert not FORBIDDEN & set(node), path
        assert node.get("type") or node.get("x-kubernetes-int-or-string"), path
        if "properties" in node:
            assert "additionalProperties" not in node, path


def test_every_field_has_a_description() -> None:
    assert [path for path, node in ALL if not path.endswith("[]") and not node.get("description")] == []


def test_every_string_list_and_map_is_bounded() -> None:
    for path, node in ALL:
        kind = node.get("type")
        if kind == "string":
            assert "maxLength" in node or "enum" in node, path
        elif kind == "array":
            assert "maxItems" in node, path
        elif kind == "object" and "additionalProperties" in node:
            assert "maxProperties" in node, path
        elif kind in ("integer", "number") and path.startswith(".spec"):
            assert {"minimum", "maximum"} <= set(node), path


def test_lists_say_how_they_merge() -> None:
    lists = {path: node for path, node in ALL if node.get("type") == "array"}
    for path, node in lists.items():
        keys = node.get("x-kubernetes-list-map-keys")
        kinds = {"map"} if keys else {"atomic", "set"}
        assert node["x-kubernetes-list-type"] in kinds, path
        for key in keys or ():
            assert key in node["items"]["required"], path
    assert lists[".spec.proposer.suffix.scopes"]["x-kubernetes-list-type"] == "set"
    assert lists[".spec.sharedCache.trustedGateways"]["x-kubernetes-list-type"] == "set"
    assert lists[".spec.workloads"]["x-kubernetes-list-map-keys"] == ["name"]
    assert lists[".status.conditions"]["x-kubernetes-list-map-keys"] == ["type"]


def test_status_has_no_floats() -> None:
    assert not [path for path, node in ALL if path.startswith(".status") and node.get("type") == "number"]


def test_rules_have_messages_for_people() -> None:
    rules = [rule for _, node in nodes(ROOT) for rule in node.get("x-kubernetes-validations", ())]
    assert len(rules) >= 15
    assert all(rule["message"] and rule["rule"] for rule in rules)


def test_columns_and_subresources() -> None:
    version = CRD["spec"]["versions"][0]
    columns = [column["name"] for column in version["additionalPrinterColumns"]]
    assert columns == ["Ready", "Reason", "Proposer", "Accepted", "Attainment", "Rollout", "Age"]
    assert set(version["subresources"]) == {"status", "scale"}
    assert CRD["spec"]["names"]["shortNames"] == ["specm"]


def test_defaults_are_complete_and_without_nulls() -> None:
    spec = ROOT["properties"]["spec"]["properties"]
    assert spec["proposer"]["default"] == {"method": "ngram", "minDepth": 1, "maxDepth": 16}
    assert spec["engine"]["default"] == {"resources": {}, "loadSeconds": 1800}
    assert spec["requests"]["default"] == {"speculationOverride": True}
    assert [path for path, node in ALL if node.get("default", "") is None] == []


class Inner(BaseModel):
    """Described by itself."""

    size: int = Field(default=1, ge=0, le=9)


class Outer(BaseModel):
    """An outer model."""

    described: Inner = Field(description="Described where it is used.")
    bare: Inner
    maybe: Inner | None = None
    names: dict[str, str] | None = Field(default=None, max_length=3)
    seconds: float | None = Field(default=None, gt=0, le=5)


def test_what_is_said_beside_a_reference_wins() -> None:
    properties = structural_schema(Outer)["properties"]
    assert properties["described"]["description"] == "Described where it is used."
    assert properties["bare"]["description"] == "Described by itself."


def test_an_optional_field_is_simply_not_required() -> None:
    schema = structural_schema(Outer)
    assert schema["required"] == ["described", "bare"]
    assert schema["properties"]["maybe"]["type"] == "object"
    assert "default" not in schema["properties"]["maybe"]
    assert schema["properties"]["names"]["additionalProperties"] == {"type": "string"}
    assert schema["properties"]["names"]["maxProperties"] == 3


def test_a_bound_that_is_itself_excluded() -> None:
    """JSON Schema has a number there, Kubernetes a flag beside the minimum."""
    seconds = structural_schema(Outer)["properties"]["seconds"]
    assert seconds == {"type": "number", "minimum": 0, "exclusiveMinimum": True, "maximum": 5}


def test_generated_files_are_current() -> None:
    assert generate.main(["--check"]) == 0


def test_generate_writes_once_and_check_finds_a_stale_file(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert generate.main(["--root", str(tmp_path)]) == 0
    assert generate.main(["--check", "--root", str(tmp_path)]) == 0
    crd = tmp_path / "crds" / "outrider.dev_speculativemodels.yaml"
    crd.write_text(crd.read_text() + "# edited\n")
    capsys.readouterr()
    assert generate.main(["--check", "--root", str(tmp_path)]) == 1
    assert "crds/outrider.dev_speculativemodels.yaml is stale" in capsys.readouterr().err
