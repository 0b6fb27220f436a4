"""From a checked request to what the engine takes: tokens, sampling, labels fixed at arrival."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_serving.api.errors import invalid
from outrider_serving.api.records import CHAT
from outrider_serving.api.schema import CommonRequest
from outrider_serving.api.wording import shown
from outrider_serving.engine.types import (
    Labels,
    Request,
    SamplingClass,
    SamplingParams,
    SpeculationOverride,
)
from outrider_serving.settings import Objective, PodSettings

DEFAULT_COMPLETION_TOKENS = 16
"""max_tokens of a completion that does not say, as OpenAI's API has it."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request once its body was accepted; everything later is judged by it.

    `stream` also says what the first token written means: an event of its own, or a commit.
    """

    id: str
    model: str
    stream: bool
    received: float
    tenant: str
    labels: Labels
    objective: Objective | None = field(default=None)


def arrive(
    body: CommonRequest,
    settings: PodSettings,
    *,
    request_id: str,
    endpoint: str,
    tenant: str,
    workload_header: str | None,
    received: float,
) -> Arrival:
    """Fix the labels and the objective of a request by the settings in force."""
    workload = settings.workload(workload_header or body.metadata.get("workload"))
    sampling_class = SamplingClass.GREEDY if body.temperature == 0 else SamplingClass.SAMPLED
    return Arrival(
        id=request_id,
        model=body.model,
        stream=body.stream,
        received=received,
        tenant=tenant,
        labels=Labels(workload, endpoint, sampling_class, settings.in_force, settings.generation),
        objective=settings.objective_of(workload),
    )


def engine_request(
    arrival: Arrival,
    body: CommonRequest,
    prompt: tuple[int, ...],
    *,
    context_length: int,
    default_limit: int | None,
) -> Request:
    """The engine's request; ApiError (400) if prompt and output do not fit the context.

    `default_limit` is the number of tokens to generate where the request does not say; None is the rest
    of the context.
    """
    room = context_length - len(prompt)
    if room < 1:
        raise invalid(
            f"The prompt has {len(prompt)} tokens, but the model's context holds {context_length} "
            "of prompt and output together: at least one must be left for the output.",
            param="messages" if arrival.labels.endpoint == CHAT else "prompt",
            code="context_length_exceeded",
        )
    limit = body.limit
    if limit is not None and limit > room:
        raise invalid(
            f"{body.limit_param}: {shown(limit)} was given, but the prompt has {len(prompt)} of "
            f"the {context_length} tokens of the model's context, so that at most {room} can be generated.",
            param=body.limit_param,
            code="context_length_exceeded",
        )
    if limit is None:
        limit = room if default_limit is None else min(default_limit, room)
    params = SamplingParams(
        max_tokens=limit,
        temperature=body.temperature,
        top_p=body.top_p,
        seed=body.seed,
        stop=body.stop,
        ignore_eos=body.ignore_eos,
    )
    return Request(
        id=arrival.id,
        prompt=prompt,
        params=params,
        labels=arrival.labels,
        tenant=arrival.tenant,
        objective=arrival.objective,
        speculation=SpeculationOverride(body.speculation.proposer, body.speculation.max_depth),
        received=arrival.received,
    )
