"""What a request may ask of the form of its output, and what is refused, by name and in time."""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable
from typing import Any

import pytest

from outrider_serving.sampling.grammar import (
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from outrider_serving.sampling.matcher import GrammarCompiler
from serving.tiny import make_tokenizer

REFUSED_SCHEMAS: dict[str, dict[str, Any]] = {
    "uniqueItems": {"type": "array", "uniqueItems": True},
    "not": {"properties": {"a": {"not": {"type": "string"}}}},
    "if": {"if": {}, "then": {}},
    "contains": {"contains": {"type": "integer"}},
    "propertyNames": {"propertyNames": {"pattern": "a"}},
    "dependentRequired": {"dependentRequired": {"a": ["b"]}},
    "dependencies": {"dependencies": {"a": ["b"]}},
    "unevaluatedProperties": {"unevaluatedProperties": False},
    "$dynamicRef": {"$dynamicRef": "#a"},
    "minProperties": {"type": "object", "minProperties": 2},
    "x-guidance": {"x-guidance": {"lenient": True}, "not": {}},
    "oneOf": {"oneOf": [{"type": "integer"}, {"type": "number"}]},
    "Unknown format: binary": {"type": "string", "format": "binary"},
    "Invalid type: strin": {"type": "strin"},
    "unclosed group": {"type": "string", "pattern": "a("},
    "look": {"type": "string", "pattern": "(?=a)b"},
    "http://elsewhere/schema": {"$ref": "http://elsewhere/schema"},
    "nothing can match": {"$ref": "#"},
    "Unsatisfiable": {"type": "string", "enum": [1]},
    "minimum": {"type": "number", "minimum": 5, "maximum": 3},
    "surrogate": {"const": "\ud800"},
    "not JSON": {"const": float("nan")},
}


@pytest.mark.parametrize("name", REFUSED_SCHEMAS)
def test_a_schema_that_is_not_supported_is_refused_by_name(name: str) -> None:
    with pytest.raises(GrammarError, match=re.escape(name)):
        json_schema_grammar(REFUSED_SCHEMAS[name])


def test_a_refused_schema_is_told_what_is_allowed() -> None:
    with pytest.raises(GrammarError, match=r"allowed: .*additionalProperties.*date-time"):
        json_schema_grammar({"not": {}})


def test_a_refused_schema_is_not_repeated() -> None:
    with pytest.raises(GrammarError) as refused:
        json_schema_grammar({"not": {}, "description": "classified"})
    assert "classified" not in str(refused.value)


def test_options_that_do_not_exclude_each_other_are_refused_with_what_to_use_instead() -> None:
    with pytest.raises(
        GrammarError, match=r"exclude each other is not supported; use anyOf; allowed"
    ) as refused:
        json_schema_grammar({"properties": {"a": REFUSED_SCHEMAS["oneOf"]}})
    assert "coerce" not in str(refused.value)


def test_names_of_properties_are_not_taken_for_keywords() -> None:
    names = ("not", "minProperties", "multipleOf", "patternProperties", "properties", "required", "if")
    assert json_schema_grammar({"type": "object", "properties": {name: {"type": "null"} for name in names}})


def test_annotations_are_no_constraint() -> None:
    notes = {"title": "t", "description": "d", "default": 3, "examples": [1], "$comment": "c", "x-ours": {}}
    assert json_schema_grammar({"type": "integer", "deprecated": True, "discriminator": {}, **notes})


@pytest.mark.parametrize(
    ("pattern", "reason"),
    [
        ("", "empty"),
        ("a(", "unclosed group"),
        ("[a", "unclosed character class"),
        ("a{2,1}", "repetition"),
        ("*a", "repetition operator missing expression"),
        ("(?=a)a", "look-around"),
        (r"(a)\1", "backreferences"),
        (r"\ba", "lookarounds"),
        ("a^b", "lookarounds"),
        (r"\p{Nonsense}", "Unicode property"),
        ("a\\", "backslash"),
        (r"[^\s\S]", "nothing can match"),
        ("(?x) a # first\n b", "several lines"),
        ("\ud800", "surrogate"),
        ("a" * 200_000, "at most"),
    ],
)
def test_an_expression_that_cannot_be_used_is_refused_with_the_reason(pattern: str, reason: str) -> None:
    with pytest.raises(GrammarError, match=reason):
        regex_grammar(pattern)


@pytest.mark.parametrize("choices", [[], [""], ["a", ""], ["a", 3], ["\ud800"], ["a" * 200_000]])
def test_choices_that_cannot_be_used_are_refused(choices: list[str]) -> None:
    with pytest.raises(GrammarError, match="choices"):
        choice_grammar(choices)


def _nested(depth: int) -> dict[str, Any]:
    schema: dict[str, Any] = {}
    for _ in range(depth):
        schema = {"type": "array", "items": schema}
    return schema


def _product(factors: int) -> dict[str, Any]:
    return {
        "allOf": [
            {"anyOf": [{"type": "object", "properties": {f"p{j}_{i}": {}}} for i in range(10)]}
            for j in range(factors)
        ]
    }


REFUSED_FOR_SIZE: dict[str, Callable[[], str]] = {
    "schema of a megabyte": lambda: json_schema_grammar({"enum": [f"value-{i}" for i in range(70_000)]}),
    "schema nested 200 deep": lambda: json_schema_grammar(_nested(200)),
    "schema nested 900 deep": lambda: json_schema_grammar(_nested(900)),
    "product of alternatives": lambda: json_schema_grammar(_product(30)),
    "500 patterns of names": lambda: json_schema_grammar(
        {"type": "object", "patternProperties": {f"^k{i}$": {} for i in range(500)}}
    ),
    "2,000 optional properties": lambda: json_schema_grammar(
        {"type": "object", "properties": {f"k{i}": {} for i in range(2000)}}
    ),
    "multiples of a large number": lambda: json_schema_grammar({"type": "integer", "multipleOf": 1_000_003}),
    "multiples of two numbers": lambda: json_schema_grammar(
        {"allOf": [{"type": "integer", "multipleOf": 997}, {"multipleOf": 991}]}
    ),
    "multiples of many numbers": lambda: json_schema_grammar(
        {"anyOf": [{"type": "number", "multipleOf": (i + 0.5) * 10.0 ** -(i % 300)} for i in range(2000)]}
    ),
    "parentheses": lambda: regex_grammar("(" * 50_000 + "a" + ")" * 50_000),
    "repetition without end": lambda: regex_grammar("a{99999999999999}"),
    "choices of a megabyte": lambda: choice_grammar([f"value-{i}" for i in range(70_000)]),
}


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", REFUSED_FOR_SIZE)
def test_what_would_take_long_is_refused(name: str) -> None:
    with pytest.raises(GrammarError):
        REFUSED_FOR_SIZE[name]()


HOSTILE: dict[str, Callable[[], str]] = {
    "repeated repetition": lambda: regex_grammar("(a{1000}){1000}"),
    "ambiguous repetition": lambda: regex_grammar("((((a{1,50}){1,50}){1,50}){1,50})"),
    "backtracking": lambda: regex_grammar("^(a+)+$"),
    "exponentially many states": lambda: regex_grammar("(a|b)*a(a|b){2000}"),
    "Unicode classes": lambda: regex_grammar(r"(\w{1,200}\W){1,200}"),
    "long alternation": lambda: regex_grammar("|".join(f"word{i}" for i in range(12_000))),
    "many choices": lambda: choice_grammar([f"value-{i}" for i in range(8_000)]),
    "long enum": lambda: json_schema_grammar({"enum": [f"value-{i}" for i in range(9_000)]}),
    "recursion": lambda: json_schema_grammar({"properties": {"a": {"items": {"$ref": "#"}}}}),
    "recursion without end": lambda: json_schema_grammar(
        {"type": "array", "items": {"$ref": "#"}, "minItems": 1}
    ),
    "doubling": lambda: json_schema_grammar(
        {
            "$defs": {
                **{f"d{i}": {"prefixItems": [{"$ref": f"#/$defs/d{i + 1}"}] * 2} for i in range(40)},
                "d40": {"type": "integer"},
            },
            "$ref": "#/$defs/d0",
        }
    ),
    "large bounds": lambda: json_schema_grammar(
        {"type": "array", "items": {"type": "string", "minLength": 10**9}, "minItems": 10**9}
    ),
    "many patterns": lambda: json_schema_grammar(
        {"anyOf": [{"type": "string", "pattern": f"^[ab]*a[ab]{{{i}}}$"} for i in range(200)]}
    ),
}


@pytest.fixture(scope="module")
def compiler() -> GrammarCompiler:
    return GrammarCompiler(make_tokenizer(), vocab_size=320, eos_token_ids=frozenset({1}))


@pytest.mark.timeout(20)
@pytest.mark.parametrize("name", HOSTILE)
def test_what_is_not_refused_can_be_followed_in_time(compiler: GrammarCompiler, name: str) -> None:
    """Or it reaches a limit, which is an error of this request alone."""
    matcher = compiler.matcher(HOSTILE[name]())
    steps = 0
    with contextlib.suppress(GrammarError):
        while steps < 300 and (allowed := matcher.mask()[2:].nonzero().flatten().tolist()):
            matcher.advance([2 + allowed[steps % len(allowed)]])
            steps += 1
    assert steps > 0


def test_any_json_object_is_a_grammar_of_its_own() -> None:
    assert json_object_grammar() == json_schema_grammar({"type": "object"})
