"""What a request may say: every parameter that is honoured, and nothing else.

A parameter that is not in these models, or not neutral in `neutral.py`, is refused by name. Names and
meanings are OpenAI's where it has the parameter, vLLM's where only it has. What needs the model to be checked
(token ids, the context) is checked in `prepare.py`.
"""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationInfo, field_validator, model_validator
from pydantic_core import PydanticCustomError

from outrider_serving.api.fields import (
    Content,
    JsonSchema,
    LogitBias,
    Metadata,
    NotStored,
    Prompt,
    SomeTokenIds,
    Stops,
    StopTokenIds,
    TokenIds,
)
from outrider_serving.settings import MAX_DEPTH, Method

MAX_MESSAGES = 2048
"""Most messages of a conversation: each costs time on the event loop."""

MAX_CHOICES = 16
"""Most choices of a request."""

MAX_LOGPROBS = 20
"""Most of the likeliest tokens that are told beside each token, OpenAI's."""

MIN_REPETITION_PENALTY = 0.01
"""Logits are divided by it: with much less they would overflow, and leave no distribution."""

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as OpenAI's API has it."""

INT64 = 1 << 63


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
    positions: bool = False

    @field_validator("max_depth")
    @classmethod
    def _for_a_proposer(cls, max_depth: int | None, others: ValidationInfo) -> int | None:
        if others.data.get("proposer") is Method.NONE and max_depth is not None:
            raise PydanticCustomError("depth", "it is for a proposer, and proposer is none", {})
        return max_depth

    @property
    def overrides(self) -> bool:
        """Whether it asks for something other than what the settings say."""
        return self.proposer is not None or self.max_depth is not None


class NamedSchema(Wire):
    """`json_schema` of a response format. The output follows the schema, `strict` or not."""

    name: str = Field(pattern=r"^[a-zA-Z0-9_-]{1,64}$")
    content: JsonSchema = Field(alias="schema")
    strict: bool = False
    description: str | None = None


class ResponseFormat(Wire):
    """OpenAI's way of asking for JSON."""

    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if (self.type == "json_schema") != (self.json_schema is not None):
            raise PydanticCustomError("format", "json_schema and type json_schema must come together", {})
        return self


class StructuredOutputs(Wire):
    """vLLM's way of asking for output of a form."""

    regex: str | None = None
    choice: Annotated[list[str], Field(fail_fast=True)] | None = None
    content: JsonSchema | None = Field(default=None, alias="json")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if sum(form is not None for form in (self.regex, self.choice, self.content)) != 1:
            raise PydanticCustomError("forms", "exactly one of regex, choice and json must be given", {})
        return self


class CommonRequest(Wire):
    """The parameters that both endpoints share."""

    model: str
    temperature: float = Field(default=1.0, ge=0, le=2)
    top_p: float = Field(default=1.0, gt=0, le=1)
    top_k: int = Field(default=0, ge=-1, lt=INT64, description="0 and -1 are for all.")
    min_p: float = Field(default=0.0, ge=0, le=1)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    repetition_penalty: float = Field(default=1.0, ge=MIN_REPETITION_PENALTY, le=2)
    logit_bias: LogitBias = ()
    allowed_token_ids: SomeTokenIds | None = None
    banned_token_ids: TokenIds = ()
    seed: int | None = Field(default=None, ge=-INT64, lt=INT64)
    n: int = Field(default=1, ge=1, le=MAX_CHOICES)
    stop: Stops = ()
    stop_token_ids: StopTokenIds = ()
    ignore_eos: bool = False
    min_tokens: int = Field(default=0, ge=0)
    max_tokens: int | None = Field(default=None, ge=1)
    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    speculation: Speculation = Speculation()
    timeout: float | None = Field(default=None, gt=0, description="Seconds.")
    store: NotStored | None = None
    user: str | None = None
    metadata: Metadata = Field(default_factory=dict)

    @model_validator(mode="after")
    def _options_of_a_stream(self) -> Self:
        if self.stream_options is not None and not self.stream:
            raise PydanticCustomError("stream_options", "stream_options is for stream: true only", {})
        return self

    @model_validator(mode="after")
    def _one_form(self) -> Self:
        """With a form, nothing else may say which tokens there are: the two could leave none."""
        if not self.constrained:
            return self
        form = "structured_outputs" if self.structured_outputs else "response_format"
        if self.structured_outputs and self.response_format and self.response_format.type != "text":
            raise PydanticCustomError(
                "forms", "structured_outputs cannot be combined with response_format: give one of them", {}
            )
        for name in ("min_tokens", "ignore_eos", "allowed_token_ids", "banned_token_ids"):
            if getattr(self, name):
                raise PydanticCustomError(
                    "forms", "{name} cannot be combined with {form}", {"name": name, "form": form}
                )
        return self

    @property
    def constrained(self) -> bool:
        """Whether the output must have a form."""
        return self.structured_outputs is not None or (
            self.response_format is not None and self.response_format.type != "text"
        )

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

    prompt: Prompt
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)
    echo: bool = False
    best_of: int | None = None

    @model_validator(mode="after")
    def _no_search(self) -> Self:
        if self.best_of not in (None, self.n):
            raise PydanticCustomError(
                "best_of",
                "best_of other than n is not supported: {best_of} was given, but n is {n}",
                {"best_of": str(self.best_of)[:40], "n": self.n},
            )
        return self

    @property
    def default_limit(self) -> int | None:
        """Most tokens to generate where `limit` is None; None for the rest of the context."""
        return DEFAULT_COMPLETION_TOKENS

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told beside each token; None without logprobs."""
        return self.logprobs


class Message(Wire):
    """One message of a conversation."""

    role: Literal["system", "developer", "user", "assistant"]
    content: Content


class ChatRequest(CommonRequest):
    """The body of POST /v1/chat/completions."""

    messages: list[Message] = Field(fail_fast=True)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)

    @model_validator(mode="after")
    def _one_limit(self) -> Self:
        if self.max_tokens is not None and self.max_completion_tokens is not None:
            raise PydanticCustomError(
                "limits", "max_tokens and max_completion_tokens are the same limit: give one of them", {}
            )
        return self

    @model_validator(mode="after")
    def _logprobs_of(self) -> Self:
        if self.top_logprobs and not self.logprobs:
            raise PydanticCustomError("logprobs", "top_logprobs is for logprobs: true only", {})
        return self

    @property
    def limit(self) -> int | None:
        """Most tokens to generate, under its new or its old name."""
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    @property
    def limit_param(self) -> str:
        """Name of the parameter that `limit` came from."""
        return "max_tokens" if self.max_completion_tokens is None else "max_completion_tokens"

    @property
    def default_limit(self) -> int | None:
        """Most tokens to generate where `limit` is None; None for the rest of the context."""
        return None

    @property
    def likeliest(self) -> int | None:
        """How many of the likeliest tokens are told beside each token; None without logprobs."""
        return self.top_logprobs if self.logprobs else None


Body = CompletionRequest | ChatRequest
"""A checked body."""
