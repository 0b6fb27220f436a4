"""What a JSON schema may hold, so that compiling it takes little time whoever wrote it; pure.

llguidance limits most of what a schema costs. It does not limit what is here, and it does not tell of what it
would ignore or get wrong. The bounds are far above what is usual.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any

MAX_BYTES = 128 * 1024
"""Most bytes of a schema, a regular expression or all choices together, in UTF-8."""

_MAX_PATTERNS = 8
"""Patterns of property names, over the whole schema: each pair is compared wherever the schema is used."""
_MAX_OPTIONAL = 400
"""Optional properties of one object: each may come next, and the parser follows at most 2,000 rules."""
_MAX_MULTIPLE = 10_000
"""Least common multiple of all `multipleOf`, in units of the last decimal: each is a state of the parser."""


def schema_excess(schema: Mapping[str, Any]) -> str | None:
    """Why a schema is not supported, beside what llguidance refuses itself; None where nothing was found.

    Every object within the schema is looked at as if it were a schema: references may make it one.
    """
    if "x-guidance" in schema:
        return 'keyword "x-guidance" is reserved'
    patterns, multiples = 0, list[Fraction]()
    for part in _objects(schema):
        if _number(part.get("minProperties")) > 1:
            return 'keyword "minProperties" above 1: a name may come twice, which cannot be excluded'
        patterns += _size(part.get("patternProperties"))
        if _optional(part) > _MAX_OPTIONAL:
            return f'an object has more than {_MAX_OPTIONAL} "properties" that are not "required"'
        multiples.append(_number(part.get("multipleOf")))
    if patterns > _MAX_PATTERNS:
        return f'{patterns} "patternProperties", at most {_MAX_PATTERNS} are allowed in a schema'
    if _states(multiples) > _MAX_MULTIPLE:
        return f'the least common multiple of "multipleOf", without decimal point, is above {_MAX_MULTIPLE}'
    return None


def _objects(schema: Mapping[str, Any]) -> Iterator[Mapping[str, Any]]:
    """Every JSON object in a schema, itself included; without recursion."""
    found: list[Any] = [schema]
    while found:
        value = found.pop()
        if isinstance(value, Mapping):
            yield value
            found += value.values()
        elif isinstance(value, list | tuple):
            found += value


def _size(value: object) -> int:
    return len(value) if isinstance(value, Mapping) else 0


def _optional(part: Mapping[str, Any]) -> int:
    """How many of an object's named properties it may lack."""
    names, required = part.get("properties"), part.get("required")
    if not isinstance(names, Mapping):
        return 0
    if not isinstance(required, list | tuple):
        return len(names)
    return len(names) - len(names.keys() & {name for name in required if isinstance(name, str)})


def _number(value: object) -> Fraction:
    """A finite JSON number by its decimal digits; 0 for anything else."""
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value):
        return Fraction(0)
    return Fraction(str(value))


def _states(multiples: list[Fraction]) -> int:
    """The least common multiple of all that are not 0, in units of the last decimal, or what is too much."""
    unit, common = 1, 0
    for multiple in filter(None, multiples):
        finer = math.lcm(unit, multiple.denominator)
        step = abs(int(multiple * finer))
        common = math.lcm(common * (finer // unit), step) if common else step
        unit = finer
        if common > _MAX_MULTIPLE:
            break
    return common
