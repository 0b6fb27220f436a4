"""Pydantic models as the structural schema that a CustomResourceDefinition asks for.

Pydantic writes JSON Schema with references, titles and `null` alternatives; Kubernetes wants none of them:
a field that may be absent is simply not required.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel

Schema = dict[str, Any]

_KEPT = frozenset(
    {
        "default",
        "description",
        "enum",
        "format",
        "maxItems",
        "maxLength",
        "maxProperties",
        "maximum",
        "minItems",
        "minLength",
        "minProperties",
        "minimum",
        "pattern",
        "required",
        "type",
    }
)
"""Keywords that are taken over as they are; x-kubernetes-* too."""


def structural_schema(model: type[BaseModel]) -> Schema:
    """The schema of a model, self-contained and structural."""
    schema = model.model_json_schema(by_alias=True, mode="validation")
    return _convert(schema, schema.get("$defs", {}))


def _convert(schema: Schema, definitions: dict[str, Schema]) -> Schema:
    """One node: references inlined, what is said beside a reference winning over what it refers to."""
    node = dict(schema)
    while "$ref" in node or "anyOf" in node:
        if "$ref" in node:
            inner = definitions[node.pop("$ref").rpartition("/")[2]]
        elif node.get("x-kubernetes-int-or-string"):
            return _kept(node) | {"anyOf": [{"type": kind} for kind in ("integer", "string")]}
        else:
            inner = _only_alternative(node.pop("anyOf"))
        node = inner | node
    result = _kept(node)
    if "exclusiveMinimum" in node:  # a number in JSON Schema; in Kubernetes it says so of the minimum
        result |= {"minimum": node["exclusiveMinimum"], "exclusiveMinimum": True}
    if result.get("type") == "object":
        if "default" in result:
            result["default"] = _without_nulls(result["default"])
        if "properties" in node:
            result["properties"] = {
                name: _convert(value, definitions) for name, value in node["properties"].items()
            }
        else:
            result["additionalProperties"] = _convert(node["additionalProperties"], definitions)
    elif result.get("type") == "array":
        result["items"] = _convert(node["items"], definitions)
    elif result.get("type") == "integer":
        result["format"] = "int64" if result.get("maximum", 2**31) >= 2**31 else "int32"
    return result


def _without_nulls(value: Schema) -> Schema:
    """A default object as the API server wants it: complete, as rules are checked on it, without nulls."""
    return {
        key: _without_nulls(inner) if isinstance(inner, dict) else inner
        for key, inner in value.items()
        if inner is not None
    }


def _kept(node: Schema) -> Schema:
    """What Kubernetes knows of a node; a default of null only says that the field may be absent."""
    kept = {key: value for key, value in node.items() if key in _KEPT or key.startswith("x-kubernetes-")}
    return {key: value for key, value in kept.items() if key != "default" or value is not None}


def _only_alternative(alternatives: list[Schema]) -> Schema:
    """The one alternative that is not null: a choice of types cannot be structural."""
    (inner,) = [alternative for alternative in alternatives if alternative.get("type") != "null"]
    return inner
