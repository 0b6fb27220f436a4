"""The forms that requests ask their output to have, as the grammars that the engine takes."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from outrider_serving.api.errors import invalid
from outrider_serving.api.schema import Body, ResponseFormat, StructuredOutputs
from outrider_serving.api.turns import Turns
from outrider_serving.engine.options import DEFAULT_MAX_WAITING
from outrider_serving.sampling.grammar import (
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)


class Forms:
    """Checks the forms of one model's requests, off the event loop.

    All in one thread of their own, which tenants share fairly (`Turns`): one form may take seconds, and
    nothing else may wait for it. A tenant's own are taken as they come, as nothing tells how long one takes.
    """

    def __init__(self, max_waiting: int = DEFAULT_MAX_WAITING) -> None:
        """Let so many wait for the thread."""
        self._turns = Turns("forms", max_waiting)

    async def grammar_of(self, body: Body, tenant: str) -> str:
        """The grammar of a constrained body's form.

        Raises:
            ApiError: (400) the form is malformed, or asks for what no grammar can hold the output to.
            QueueFullError: too many wait, altogether or of this tenant.
        """
        return await self._turns.run(tenant, 0, grammar_of, body)

    def close(self) -> None:
        """End the thread."""
        self._turns.close()


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
