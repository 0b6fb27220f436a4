"""JSON under a schema: walks end in what an independent check accepts; the forbidden cannot be said."""

from __future__ import annotations

import json
import random
import re
from collections.abc import Callable
from datetime import date
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.sampling.grammar import json_object_grammar, json_schema_grammar
from unit.sampling.grammar_support import COMPILER, EOS, ONE_END, TOKENIZER, tokens_of, walk

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string", "minLength": 1, "maxLength": 8},
        "age": {"type": "integer", "minimum": 0, "maximum": 150},
        "tags": {"type": "array", "items": {"enum": ["a", "the cat", "é🦦"]}, "minItems": 1, "maxItems": 3},
    },
    "required": ["name", "age"],
    "additionalProperties": False,
}


def is_person(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and {"name", "age"} <= value.keys() <= {"name", "age", "tags"}
        and isinstance(value["name"], str)
        and 1 <= len(value["name"]) <= 8
        and type(value["age"]) is int
        and 0 <= value["age"] <= 150
        and ("tags" not in value or is_tags(value["tags"]))
    )


def is_tags(value: Any) -> bool:
    return isinstance(value, list) and 1 <= len(value) <= 3 and set(value) <= {"a", "the cat", "é🦦"}


TREE = {
    "$defs": {
        "node": {
            "type": "object",
            "properties": {"left": {"$ref": "#/$defs/node"}, "leaf": {"type": "boolean"}},
            "additionalProperties": False,
        }
    },
    "$ref": "#/$defs/node",
}


def is_tree(value: Any) -> bool:
    return (
        isinstance(value, dict)
        and value.keys() <= {"left", "leaf"}
        and isinstance(value.get("leaf", True), bool)
        and ("left" not in value or is_tree(value["left"]))
    )


def is_date(value: Any) -> bool:
    """Of any year, which may be a leap year."""
    return re.fullmatch("[0-9]{4}-.{5}", value) is not None and bool(date.fromisoformat("2000" + value[4:]))


SCHEMAS: list[tuple[dict[str, Any], Callable[[Any], bool]]] = [
    (PERSON, is_person),
    (TREE, is_tree),
    ({"type": "object"}, lambda v: isinstance(v, dict)),
    ({"type": ["integer", "null"]}, lambda v: v is None or type(v) is int),
    ({"const": {"a": [1, 2.5, None, "é\n"]}}, lambda v: v == {"a": [1, 2.5, None, "é\n"]}),
    ({"type": "number", "minimum": -3, "exclusiveMaximum": 7.5}, lambda v: -3 <= v < 7.5),
    ({"type": "integer", "multipleOf": 7}, lambda v: type(v) is int and v % 7 == 0),
    ({"type": "number", "multipleOf": 0.25}, lambda v: v % 0.25 == 0),
    ({"type": "string", "pattern": "^[a-c]{2}\\d$"}, lambda v: re.fullmatch("[a-c]{2}[0-9]", v) is not None),
    ({"type": "string", "format": "date"}, is_date),
    ({"anyOf": [{"type": "boolean"}, {"const": "x"}]}, lambda v: isinstance(v, bool) or v == "x"),
    ({"oneOf": [{"const": 1}, {"const": "x"}]}, lambda v: v in (1, "x")),
    (
        {"allOf": [{"type": "string", "maxLength": 3}, {"pattern": "^[ab]*$"}]},
        lambda v: len(v) <= 3 and set(v) <= {"a", "b"},
    ),
    (
        {"prefixItems": [{"type": "null"}, {"const": 2}], "items": False, "type": "array", "minItems": 2},
        lambda v: v == [None, 2],
    ),
    (
        {"patternProperties": {"^n": {"type": "null"}}, "additionalProperties": False, "type": "object"},
        lambda v: all(name[0] == "n" and value is None for name, value in v.items()),
    ),
]


@pytest.mark.parametrize("which", range(len(SCHEMAS)))
def test_walks_end_in_json_that_the_schema_allows(which: int) -> None:
    schema, accepts = SCHEMAS[which]
    grammar, rng, ended = json_schema_grammar(schema), random.Random(which), 0
    for _ in range(20):
        text = walk(COMPILER.matcher(grammar), rng)
        if text is not None:
            assert accepts(json.loads(text)), text
            assert text == text.strip()
            ended += 1
    assert ended > 10


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


@given(value=st.dictionaries(st.text(), JSON, max_size=4), indent=st.sampled_from([None, 0, 2, 4]))
def test_any_object_can_be_said(value: dict[str, Any], indent: int | None) -> None:
    text = json.dumps(value, ensure_ascii=False, indent=indent)
    if not re.search(r"\\u00|\x7f", text):  # control characters without an escape of their own cannot be
        says(json_object_grammar(), text)


def says(grammar: str, text: str) -> None:
    """Fails unless the text and an end are allowed."""
    matcher = ONE_END.matcher(grammar)
    matcher.advance([*TOKENIZER(text).input_ids, EOS])
    assert not matcher.mask().any()


@pytest.mark.parametrize(
    "text", ['{"name":"a","age":3}', '{ "name" : "é\\n",\n  "age": 150,\t"tags": ["a"] }']
)
def test_a_schema_leaves_white_space_free(text: str) -> None:
    says(json_schema_grammar(PERSON), text)


@pytest.mark.parametrize(
    "text",
    [
        '{"name":"a","age":151}',
        '{"name":"","age":3}',
        '{"age":3,"name":"a"}',
        '{"name":"a","age":3,"more":1}',
        '{"name":"a"}',
        '{"name":"a","age":3} ',
        ' {"name":"a","age":3}',
        '{"name":"a",' + " " * 65 + '"age":3}',
        '{"n\\u0061me":"a","age":3}',
    ],
)
def test_a_schema_forbids_what_it_must(text: str) -> None:
    matcher = COMPILER.matcher(json_schema_grammar(PERSON))
    with pytest.raises(ValueError, match="does not allow"):
        matcher.advance([*tokens_of(text), EOS])


def test_a_named_property_cannot_be_had_under_another_spelling() -> None:
    grammar = json_schema_grammar({"type": "object", "properties": {"a": {"type": "integer"}}})
    says(grammar, '{"b": "x"}')
    for text in ('{"a": "x"}', '{"b": 1, "a": "x"}', '{"\\u0061": "x"}'):
        with pytest.raises(ValueError, match="does not allow"):
            COMPILER.matcher(grammar).advance([*tokens_of(text), EOS])
