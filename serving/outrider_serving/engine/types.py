"""The plain data that everything else passes around: a request, what it asks for, what comes back.

All of it is frozen and can be pickled; the comment or docstring of a field says who sets it. Nothing here
imports torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from outrider_serving.settings import Method


class SamplingClass(StrEnum):
    """How tokens are chosen: a telemetry label, and a key of acceptance."""

    GREEDY = "greedy"
    SAMPLED = "sampled"
    CONSTRAINED = "constrained"


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The law of the next token that a request asks for. Set by the API, already validated.

    `sampling.law` says in which order the fields act. temperature 0 is greedy. With a seed the output is a
    fixed function of the request (coupled verification); without one the tokens are drawn and verified by
    rejection. Stop strings are not here: text is the API's.

    Attributes:
        max_tokens: most tokens to commit, at least 1.
        min_tokens: before so many are committed, no token that would end the request has any probability.
        top_k: only the k most probable tokens; 0 for all.
        min_p: only tokens at least this share as probable as the most probable one.
        repetition_penalty: of tokens in prompt or output; 1 does nothing.
        logit_bias: (token id, what is added to its logit), ids distinct.
        allowed_token_ids: the only ids with any probability; None for all.
        choice: index of the completion among those of one call (`n`).
        stop_token_ids: tokens that end the request as an end of sequence does, also with `ignore_eos`.
        logprobs: how many of the likeliest tokens are told beside each token's own; None for no logprobs.
        prompt_logprobs: the same for the tokens of the prompt.
        grammar: what `sampling.grammar` compiles; None where the output is free.
    """

    max_tokens: int
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: tuple[tuple[int, float], ...] = ()
    allowed_token_ids: tuple[int, ...] | None = None
    banned_token_ids: tuple[int, ...] = ()
    seed: int | None = None
    choice: int = 0
    stop_token_ids: tuple[int, ...] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    grammar: str | None = None

    @property
    def sampling_class(self) -> SamplingClass:
        """The telemetry label of these parameters."""
        if self.grammar is not None:
            return SamplingClass.CONSTRAINED
        return SamplingClass.GREEDY if self.temperature == 0 else SamplingClass.SAMPLED


@dataclass(frozen=True, slots=True)
class SpeculationOverride:
    """What the request's `speculation` object says; None leaves the arm's setting in force."""

    method: Method | None = None
    max_depth: int | None = None


@dataclass(frozen=True, slots=True)
class Labels:
    """Telemetry labels of a request, fixed at arrival by the API; all of them bounded."""

    workload: str
    endpoint: str
    sampling_class: SamplingClass
    arm: str
    generation: int


@dataclass(frozen=True, slots=True)
class Request:
    """One completion to generate. Set by the API; times are of time.monotonic(), which processes share.

    Attributes:
        id: unique among the requests in the engine.
        tenant: shares of the engine are equal between tenants; keys and values are never shared between them.
        history: whose finished outputs may be proposed to it, and whose its own output becomes unless it is
            private; None where it has its own text only.
        private: nothing of it may outlive it, so its keys and values are shared within its group only.
        group: id of the call that it is a choice of; choices share the reading of their prompt.
        deadline: when it is to end with DeadlineError if it has not ended; None for never.
        received: when the HTTP request came.
    """

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    labels: Labels
    tenant: str = ""
    history: str | None = None
    private: bool = False
    group: str = ""
    deadline: float | None = None
    speculation: SpeculationOverride = SpeculationOverride()
    received: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class TokenLogprobs:
    """Natural logarithms of the probabilities that the target itself gives, before any parameter.

    Attributes:
        logprob: of the token in question.
        top: (token id, logprob) of the likeliest tokens, most likely first, as many as were asked for.
    """

    logprob: float
    top: tuple[tuple[int, float], ...] = ()


@dataclass(frozen=True, slots=True)
class Delta:
    """What one step added to a request. Set by the engine.

    Attributes:
        tokens: tokens committed, in order, at least one; the last one of a request may be an end of sequence.
        committed_at: time.monotonic() of the commit.
        proposed: proposed tokens verified, over all branches.
        depth: length of the longest path among them.
        accepted: how many leading ones of `tokens` were proposed.
        logprobs: one for each token where the request asked for them.
        reused: prompt tokens whose keys and values were there already; on a request's first delta only.
        prompt_logprobs: of the tokens of the prompt but the first, where they were asked for; on a request's
            first delta only.
        finish_reason: set on the last delta only.
    """

    request_id: str
    tokens: tuple[int, ...]
    committed_at: float
    proposed: int = 0
    depth: int = 0
    accepted: int = 0
    logprobs: tuple[TokenLogprobs, ...] = ()
    reused: int = 0
    prompt_logprobs: tuple[TokenLogprobs, ...] = ()
    finish_reason: FinishReason | None = None


class EngineError(Exception):
    """A request could not be completed for a reason inside the server (HTTP 500)."""


class QueueFullError(EngineError):
    """Too many requests wait (HTTP 429); `retry_after` is in seconds."""

    def __init__(self, waiting: int, limit: int, retry_after: int = 1) -> None:
        super().__init__(waiting, limit, retry_after)
        self.waiting, self.limit, self.retry_after = waiting, limit, retry_after

    def __str__(self) -> str:
        return f"{self.waiting} requests are waiting, which is the limit ({self.limit})"


class DeadlineError(EngineError):
    """The request's deadline passed before its end (HTTP 504)."""


class EngineClosedError(EngineError):
    """The engine is shutting down, or its process has died (HTTP 503)."""
