"""The plain data that everything else passes around: a request, what it asks for, what comes back.

All of it is frozen; the comment or docstring of a field says who sets it. Nothing here imports torch.
"""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from enum import StrEnum

from outrider_serving.settings import Method, Objective


class SamplingClass(StrEnum):
    """How tokens are chosen: a telemetry label, and a key of acceptance."""

    GREEDY = "greedy"
    SAMPLED = "sampled"


class FinishReason(StrEnum):
    """Why a completion ended, in OpenAI's words."""

    STOP = "stop"
    LENGTH = "length"


@dataclass(frozen=True, slots=True)
class SamplingParams:
    """The distribution a request asks for. Set by the API, already validated.

    temperature 0 is greedy. With a seed the output is a fixed function of the request (coupled
    verification); without one the tokens are drawn and verified by rejection.
    """

    max_tokens: int
    temperature: float = 1.0
    top_p: float = 1.0
    seed: int | None = None
    stop: tuple[str, ...] = ()
    ignore_eos: bool = False

    @property
    def sampling_class(self) -> SamplingClass:
        """The telemetry label of these parameters."""
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
    """One completion to generate. Set by the API; `received` is time.monotonic() at the HTTP request."""

    id: str
    prompt: tuple[int, ...]
    params: SamplingParams
    labels: Labels
    tenant: str = ""
    objective: Objective | None = None
    speculation: SpeculationOverride = SpeculationOverride()
    received: float = field(default_factory=time.monotonic)


@dataclass(frozen=True, slots=True)
class Usage:
    """What a request has cost so far. Set by the engine.

    `accepted_tokens` counts proposed tokens kept, `verification_steps` counts target passes that
    committed tokens (the first one is the end of prefill).
    """

    prompt_tokens: int = 0
    completion_tokens: int = 0
    verification_steps: int = 0
    proposed_tokens: int = 0
    accepted_tokens: int = 0


@dataclass(frozen=True, slots=True)
class Chunk:
    """Tokens committed in one step, with the text they complete. Set by the engine.

    `text` never holds half a character nor a part of a stop string. `finish_reason` is set on the last
    chunk only. `committed_at` is time.monotonic() when the engine committed the tokens.
    """

    text: str
    token_ids: tuple[int, ...]
    usage: Usage
    committed_at: float
    finish_reason: FinishReason | None = None


class EngineError(Exception):
    """A request could not be completed for a reason inside the server (HTTP 500)."""


class QueueFullError(EngineError):
    """Too many requests wait (HTTP 429); `retry_after` is in seconds."""

    def __init__(self, waiting: int, limit: int, retry_after: int = 1) -> None:
        super().__init__(f"{waiting} requests are waiting, which is the limit ({limit})")
        self.retry_after = retry_after


class EngineClosedError(EngineError):
    """The engine is shutting down or has failed (HTTP 503)."""
