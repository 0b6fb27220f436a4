"""Types of request fields that a plain annotation cannot say, with errors that name what is allowed."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

from jiter import from_json
from pydantic import BeforeValidator, PlainValidator
from pydantic_core import PydanticCustomError

MAX_STOPS = 16
"""Most stop strings of a request."""

MAX_STOP_LENGTH = 1024
"""Longest stop string, in characters."""

MAX_STOP_TOKENS = 256
"""Most stop tokens of a request."""

MAX_BIASES = 1024
"""Most entries of logit_bias: each costs time at every token."""

MAX_BIAS = 100.0
"""Largest magnitude of an entry of logit_bias, OpenAI's."""

MAX_METADATA = 16
"""Most entries of the metadata."""


def _prompt(value: Any) -> str | list[int]:
    """One prompt: a string or token ids, bare or as the only member of a list."""
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise PydanticCustomError(
                "batch", "one request takes one prompt: send {count} requests", {"count": len(value)}
            )
        value = value[0]
    if isinstance(value, str) or (isinstance(value, list) and _are_ids(value)):
        return value
    raise PydanticCustomError(
        "prompt", "it must be a string, a list of token ids, or a list with one of either", {}
    )


def _are_ids(values: Sequence[Any]) -> bool:
    return all(isinstance(value, int) and not isinstance(value, bool) for value in values)


def _token_ids(value: Any) -> tuple[int, ...]:
    """Token ids, each once."""
    if not isinstance(value, list) or not _are_ids(value):
        raise PydanticCustomError("token_ids", "it must be a list of token ids", {})
    return tuple(dict.fromkeys(value))


def _some_token_ids(value: Any) -> tuple[int, ...]:
    ids = _token_ids(value)
    if not ids:
        raise PydanticCustomError("token_ids", "it must hold at least one token id", {})
    return ids


def _stop_token_ids(value: Any) -> tuple[int, ...]:
    if isinstance(value, list) and len(value) > MAX_STOP_TOKENS:
        raise PydanticCustomError(
            "token_ids", "it must be at most {limit} token ids", {"limit": MAX_STOP_TOKENS}
        )
    return _token_ids(value)


def _stops(value: Any) -> tuple[str, ...]:
    """Stop strings: one string or a list of them."""
    stops = [value] if isinstance(value, str) else value
    if isinstance(stops, list) and len(stops) > MAX_STOPS:
        raise PydanticCustomError("stop", "it must be at most {limit} strings", {"limit": MAX_STOPS})
    if not isinstance(stops, list) or not all(isinstance(stop, str) for stop in stops):
        raise PydanticCustomError("stop", "it must be a string or a list of strings", {})
    if not all(0 < len(stop) <= MAX_STOP_LENGTH for stop in stops):
        raise PydanticCustomError(
            "stop", "each string must have 1 to {limit} characters", {"limit": MAX_STOP_LENGTH}
        )
    return tuple(stops)


def _logit_bias(value: Any) -> tuple[tuple[int, float], ...]:
    """(Token id, bias) pairs, from an object whose names are ids in decimal."""
    if not isinstance(value, dict) or len(value) > MAX_BIASES:
        raise PydanticCustomError(
            "logit_bias", "it must be an object of at most {limit} entries", {"limit": MAX_BIASES}
        )
    return tuple((_id_of(name), _bias(name, bias)) for name, bias in value.items())


def _id_of(name: str) -> int:
    # One spelling of an id, so that no two names mean the same one.
    if name.isascii() and name.isdigit() and len(name) < 20 and str(int(name)) == name:
        return int(name)
    raise PydanticCustomError(
        "logit_bias", "each name must be a token id in decimal, but {name} is not", {"name": repr(name[:40])}
    )


def _bias(name: str, bias: Any) -> float:
    number = isinstance(bias, int | float) and not isinstance(bias, bool)
    if number and -MAX_BIAS <= bias <= MAX_BIAS:
        return float(bias)
    raise PydanticCustomError(
        "logit_bias", "the bias of {name} must be a number from -100 to 100", {"name": repr(name)}
    )


def _metadata(value: Any) -> Any:
    """Metadata of a bounded size."""
    if isinstance(value, dict) and len(value) > MAX_METADATA:
        raise PydanticCustomError("metadata", "it must have at most {limit} entries", {"limit": MAX_METADATA})
    return value


def _content(value: Any) -> str:
    """The text of a message: a string, or text parts, which are joined as they are."""
    if isinstance(value, str):
        return value
    if isinstance(value, list) and value and all(_is_text_part(part) for part in value):
        return "".join(part["text"] for part in value)
    raise PydanticCustomError(
        "content", 'it must be a string or a list of {"type": "text", "text": "..."} parts', {}
    )


def _is_text_part(part: Any) -> bool:
    """Whether it has a text and nothing else; nulls are nothing."""
    return (
        isinstance(part, dict)
        and part.get("type") == "text"
        and isinstance(part.get("text"), str)
        and sum(value is not None for value in part.values()) == 2
    )


def _not_stored(value: Any) -> bool:
    """`store`: false, which also keeps what the answer needs from others' answers."""
    if value is False:
        return False
    raise PydanticCustomError(
        "store", "there are no stored answers to read back here: it must be false or null", {}
    )


def _json_schema(value: Any) -> Any:
    """A JSON schema: an object, or a string that spells one."""
    if isinstance(value, str):
        try:
            value = from_json(value.encode(), allow_inf_nan=False, catch_duplicate_keys=True)
        except ValueError:
            value = None
    if isinstance(value, dict):
        return value
    raise PydanticCustomError(
        "schema", "it must be a JSON schema: an object, or a string that spells one", {}
    )


Prompt = Annotated[str | list[int], PlainValidator(_prompt)]
TokenIds = Annotated[tuple[int, ...], PlainValidator(_token_ids)]
SomeTokenIds = Annotated[tuple[int, ...], PlainValidator(_some_token_ids)]
StopTokenIds = Annotated[tuple[int, ...], PlainValidator(_stop_token_ids)]
Stops = Annotated[tuple[str, ...], PlainValidator(_stops)]
LogitBias = Annotated[tuple[tuple[int, float], ...], PlainValidator(_logit_bias)]
Metadata = Annotated[dict[str, str], BeforeValidator(_metadata)]
Content = Annotated[str, PlainValidator(_content)]
NotStored = Annotated[bool, PlainValidator(_not_stored)]
JsonSchema = Annotated[dict[str, Any], PlainValidator(_json_schema)]
