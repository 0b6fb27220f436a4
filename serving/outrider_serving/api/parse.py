"""From a JSON object to a request model, or to the one error that says what is wrong with it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from outrider_serving.api import neutral
from outrider_serving.api.errors import ApiError, invalid
from outrider_serving.api.schema import (
    MAX_MESSAGES,
    ChatRequest,
    CommonRequest,
    CompletionRequest,
    Message,
    NamedSchema,
    ResponseFormat,
    Speculation,
    StreamOptions,
    StructuredOutputs,
)
from outrider_serving.api.wording import place, shown

AnyRequest = TypeVar("AnyRequest", bound=CommonRequest)


def parse_completion(values: Mapping[str, Any]) -> CompletionRequest:
    """The completion request in a decoded body; ApiError (400) naming the field at fault."""
    return _parse(CompletionRequest, values, neutral.REQUEST)


def parse_chat(values: Mapping[str, Any]) -> ChatRequest:
    """The chat request in a decoded body; ApiError (400) naming the field at fault."""
    values = dict(values)
    messages = values.get("messages")
    if isinstance(messages, list):
        if not 1 <= len(messages) <= MAX_MESSAGES:
            raise invalid(
                f"messages: it must be a list of 1 to {MAX_MESSAGES} messages, but it has {len(messages)}.",
                param="messages",
                code="invalid_value",
            )
        values["messages"] = [
            _plain(message, Message, neutral.MESSAGE, f"messages[{index}].")
            for index, message in enumerate(messages)
        ]
    return _parse(ChatRequest, values, neutral.REQUEST)


def _parse(model: type[AnyRequest], values: Mapping[str, Any], neutral_values: neutral.Neutral) -> AnyRequest:
    fields = _plain(values, model, neutral_values, "")
    for path, inner, inner_neutral in (
        (("stream_options",), StreamOptions, neutral.STREAM_OPTIONS),
        (("speculation",), Speculation, {}),
        (("response_format",), ResponseFormat, {}),
        (("response_format", "json_schema"), NamedSchema, {}),
        (("structured_outputs",), StructuredOutputs, {}),
    ):
        _make_plain(fields, path, inner, inner_neutral)
    try:
        return model.model_validate(fields)
    except ValidationError as error:
        raise _explained(error.errors(include_url=False)[0]) from None


def _make_plain(
    fields: dict[str, Any], path: Sequence[str], model: type[BaseModel], neutral_values: neutral.Neutral
) -> None:
    """The same as `_plain` for an object within others, where it is given."""
    for name in path[:-1]:
        fields = fields.get(name, {})
        if not isinstance(fields, dict):
            return
    if path[-1] in fields:
        fields[path[-1]] = _plain(fields[path[-1]], model, neutral_values, ".".join(path) + ".")


def _plain(value: Any, model: type[BaseModel], neutral_values: neutral.Neutral, within: str) -> Any:
    """An object without nulls, which ask for nothing under any name, and without neutral parameters.

    Names that are unknown then are refused.
    """
    if not isinstance(value, dict):
        return value
    given = {name: item for name, item in value.items() if item is not None}
    rest = neutral.without_neutral(given, neutral_values, within)
    known = {field.alias or name for name, field in model.model_fields.items()}
    unknown = min(rest.keys() - known, default=None)
    if unknown is not None:
        raise invalid(
            f"{within}{unknown[:80]}: this parameter is unknown or not supported. "
            f"Supported are {', '.join(sorted(known))}.",
            param=within + unknown[:80],
            code="unknown_parameter",
        )
    return rest


def _explained(error: ErrorDetails) -> ApiError:
    """The ApiError for the first thing that pydantic found."""
    param = place(error["loc"])
    if error["type"] == "missing":
        return invalid(f"{param}: this parameter is required.", param, code="missing_required_parameter")
    reason = error["msg"][:1].lower() + error["msg"][1:]
    reason = reason.replace("input should be", "it must be")
    if error["type"] == "model_type":
        reason = "it must be an object"
    if not param:  # about the request as a whole
        return invalid(f"{reason}.", reason.split(" ", 1)[0], code="invalid_value")
    came = "" if isinstance(error["input"], dict) else f" {shown(error['input'])} was given, but"
    return invalid(f"{param}:{came} {reason}.", param, code="invalid_value")
