"""OpenAI's parameters that we do not honour, with the values that ask for nothing.

Clients and frameworks send many of them with their defaults. A neutral value is accepted, any other is
refused by name: nothing is ignored in silence.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from outrider_serving.api.errors import invalid
from outrider_serving.api.wording import shown

Neutral = Mapping[str, Sequence[Any]]
"""Names with their neutral values, beside null."""

REQUEST: Neutral = {
    "audio": [],
    "function_call": ["none", "auto"],
    "functions": [[]],
    "modalities": [["text"]],
    "parallel_tool_calls": [True, False],
    "prediction": [],
    "reasoning_effort": [],
    "service_tier": ["auto", "default"],
    "suffix": [""],
    "tool_choice": ["none", "auto"],
    "tools": [[]],
    "verbosity": [],
    "web_search_options": [],
}
"""Of both endpoints: some clients have one set of defaults for the two."""

MESSAGE: Neutral = {
    "annotations": [[]],
    "audio": [],
    "function_call": [],
    "refusal": [],
    "tool_calls": [[]],
}
"""What the stock client's own answer carries when an application sends it back as history."""

STREAM_OPTIONS: Neutral = {"include_obfuscation": [False]}


def without_neutral(values: Mapping[str, Any], neutral: Neutral, within: str = "") -> dict[str, Any]:
    """`values` without the parameters of `neutral`; ApiError (400) for one that asks for something.

    There are no nulls in `values`. `within` is how the error calls the object that holds them, with a dot at
    its end.
    """
    for name in values.keys() & neutral.keys():
        if not any(_same(values[name], value) for value in neutral[name]):
            allowed = " or ".join(shown(value) for value in (*neutral[name], None))
            raise invalid(
                f"{within}{name}: {shown(values[name])} is not supported; only {allowed} is accepted.",
                param=within + name,
                code="unsupported_parameter",
            )
    return {name: value for name, value in values.items() if name not in neutral}


def _same(left: Any, right: Any) -> bool:
    """Equal as JSON: 0 equals 0.0, but true does not equal 1."""
    return left == right and isinstance(left, bool) == isinstance(right, bool)
