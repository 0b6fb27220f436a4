"""The form that a request asks its output to have, as the grammar that the engine takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider_serving.api.errors import invalid
from outrider_serving.api.schema import Body, ResponseFormat, StructuredOutputs
from outrider_serving.sampling.grammar import (
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)


def grammar_of(body: Body) -> str:
    """The grammar of a constrained body's form; compiles it once, which may take seconds.

    Raises:
        ApiError: (400) the form is malformed, or asks for what no grammar can hold the output to.
    """
    param, build = _form(body)
    try:
        return build()
    except GrammarError as error:
        raise invalid(f"{param}: {error}.", param, code="invalid_value") from error


def _form(body: Body) -> tuple[str, Callable[[], str]]:
    """The field that holds the form, and how to make its grammar."""
    match body.structured_outputs or body.response_format:
        case StructuredOutputs(regex=str(pattern)):
            return "structured_outputs.regex", partial(regex_grammar, pattern)
        case StructuredOutputs(choice=list(choices)):
            return "structured_outputs.choice", partial(choice_grammar, choices)
        case StructuredOutputs(content=dict(schema)):
            return "structured_outputs.json", partial(json_schema_grammar, schema)
        case ResponseFormat(json_schema=named) if named is not None:
            return "response_format.json_schema.schema", partial(json_schema_grammar, named.content)
        case _:
            return "response_format", json_object_grammar
