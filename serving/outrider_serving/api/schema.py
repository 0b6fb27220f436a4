"""What a request may say: every parameter that is honoured, and nothing else.

A parameter that is not in these models, or not neutral in `neutral.py`, is refused by name.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal, Self

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    FailFast,
    Field,
    PlainValidator,
    model_validator,
)
from pydantic_core import PydanticCustomError

from outrider_serving.settings import MAX_DEPTH, Method

MAX_STOPS = 16
"""Most stop strings of a request."""

MAX_STOP_LENGTH = 1024
"""Longest stop string, in characters."""

MAX_MESSAGES = 2048
"""Most messages of a conversation: each costs time on the event loop."""

MAX_METADATA = 16
"""Most entries of the metadata."""

INT64 = 1 << 63


def _prompt(value: Any) -> str | list[int]:
    """One prompt: a string or token ids, bare or as the only member of a list."""
    if isinstance(value, list) and value and all(isinstance(item, str | list) for item in value):
        if len(value) > 1:
            raise PydanticCustomError(
                "batch",
                "one request takes one prompt: send {count} requests",
                {"count": len(value)},
            )
        value = value[0]
    if isinstance(value, str):
        return value
    if isinstance(value, list) and all(isinstance(id_, int) and not isinstance(id_, bool) for id_ in value):
        return value
    raise PydanticCustomError(
        "prompt", "it must be a string, a list of token ids, or a list with one of either", {}
    )


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
    return (
        isinstance(part, dict)
        and part.keys() == {"type", "text"}
        and part["type"] == "text"
        and isinstance(part["text"], str)
    )


class Wire(BaseModel):
    """A model of JSON that a client sent: types are strict, unknown names are refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class StreamOptions(Wire):
    """How a stream reports."""

    include_usage: bool = False


class Speculation(Wire):
    """Our extension: how this request's tokens are proposed. It never changes the law of the output."""

    proposer: Annotated[Method, Field(strict=False)] | None = None
    max_depth: int | None = Field(default=None, ge=1, le=MAX_DEPTH)

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.proposer is Method.NONE and self.max_depth is not None:
            raise PydanticCustomError("depth", "max_depth is for a proposer, but proposer is none", {})
        return self


class CommonRequest(Wire):
    """The parameters that both endpoints share."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    stop: Annotated[tuple[str, ...], BeforeValidator(_stops)] = ()
    max_tokens: int | None = Field(default=None, ge=1)
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()
    ignore_eos: bool = False
    user: str | None = None
    metadata: Annotated[dict[str, str], BeforeValidator(_metadata)] = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for stream: true only", {})
        return self

    @property
    def include_usage(self) -> bool:
        """Whether a stream ends with a usage chunk."""
        return self.stream_options is not None and self.stream_options.include_usage

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, as far as the request says."""
        return self.max_tokens

    @property
    def limit_param(self) -> str:
        """Name of the parameter that `limit` came from."""
        return "max_tokens"


class CompletionRequest(CommonRequest):
    """The body of POST /v1/completions."""

    prompt: Annotated[str | list[int], PlainValidator(_prompt)]


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Annotated[str, BeforeValidator(_content)]


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions."""

    messages: Annotated[list[Message], FailFast()]
    max_completion_tokens: int | None = Field(default=None, ge=1)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "limits", "max_tokens and max_completion_tokens are the same limit: give one of them", {}
            )
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, under its new or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_param(self) -> str:
        """Name of the parameter that `limit` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"
