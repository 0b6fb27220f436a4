"""From a checked request to what the engine takes: tokens, sampling, labels and limits fixed at arrival."""

from __future__ import annotations

from collections.abc import Set
from dataclasses import dataclass, field, replace

from outrider_serving.api.completion import Echo
from outrider_serving.api.errors import ApiError, invalid
from outrider_serving.api.records import CHAT
from outrider_serving.api.schema import Body, CommonRequest, CompletionRequest
from outrider_serving.api.state import ServedModel
from outrider_serving.api.text import check_ids
from outrider_serving.api.tokens import Vocabulary
from outrider_serving.api.wording import shown
from outrider_serving.engine.schedule.fairness import most_at_once
from outrider_serving.engine.types import (
    Labels,
    Request,
    SamplingClass,
    SamplingParams,
    SpeculationOverride,
)
from outrider_serving.settings import Objective, PodSettings, RequestLimits
from outrider_serving.tenancy import Whose

MAX_WHOLE_LOGPROBS = 1_000_000
"""Most logprobs of an answer that is not streamed, in all its choices: they are held until it is written,
some 120 bytes for each."""


@dataclass(frozen=True, slots=True)
class Arrival:
    """What is known of a request once its body was accepted; everything later is judged by it.

    `stream` also says what the first token written means: an event of its own, or a commit. Times are of
    time.monotonic(); `deadline` is None where nothing limits the request, `token_seconds` where its tokens
    come as they are committed.
    """

    id: str
    model: str
    stream: bool
    received: float
    whose: Whose
    labels: Labels
    deadline: float | None = None
    objective: Objective | None = field(default=None)
    token_seconds: float | None = None

    @property
    def tenant(self) -> str:
        """Whose it is."""
        return self.whose.tenant


@dataclass(frozen=True, slots=True)
class Call:
    """What an answer is made from.

    Attributes:
        requests: for the engine, one for each choice, in order.
        vocabulary: what the tokens of prompt and answer stand for.
        stops: stop strings.
        echo: the prompt, where the answer begins with it.
    """

    requests: tuple[Request, ...]
    vocabulary: Vocabulary
    stops: tuple[str, ...] = ()
    echo: Echo | None = None


def arrive(
    body: CommonRequest,
    settings: PodSettings,
    *,
    request_id: str,
    endpoint: str,
    whose: Whose,
    workload_header: str | None,
    received: float,
) -> Arrival:
    """Fix labels, objective and deadline by the settings in force; ApiError (400) for what they forbid."""
    if body.speculation.overrides and not settings.requests.speculation_override:
        raise invalid(
            "speculation: the settings of this server do not let a request choose proposer and depth.",
            param="speculation",
            code="forbidden_by_settings",
        )
    timeout = _timeout(body, settings.requests)
    workload = settings.workload(workload_header or body.metadata.get("workload"))
    return Arrival(
        id=request_id,
        model=body.model,
        stream=body.stream,
        received=received,
        whose=whose,
        labels=Labels(workload, endpoint, _sampling_class(body), settings.in_force, settings.generation),
        deadline=None if timeout is None else received + timeout,
        objective=settings.objective_of(workload),
        token_seconds=_seconds(settings.requests.token_milliseconds),
    )


def _seconds(milliseconds: int | None) -> float | None:
    return None if milliseconds is None else milliseconds / 1000


def _timeout(body: CommonRequest, limits: RequestLimits) -> float | None:
    most = limits.timeout_seconds
    if body.timeout is None or most is None or body.timeout <= most:
        return most if body.timeout is None else body.timeout
    raise invalid(
        f"timeout: {shown(body.timeout)} was given, but the settings of this server allow at most {most:g} "
        "seconds.",
        param="timeout",
        code="forbidden_by_settings",
    )


def _sampling_class(body: CommonRequest) -> SamplingClass:
    if body.constrained:
        return SamplingClass.CONSTRAINED
    return SamplingClass.GREEDY if body.temperature == 0 else SamplingClass.SAMPLED


async def prepare(body: Body, arrival: Arrival, model: ServedModel) -> Call:
    """What the answer to a body is made from.

    Raises:
        ApiError: (400) naming what this model cannot do.
        QueueFullError: too many prompts wait to be encoded, or forms to be checked, altogether or of this
            tenant.
    """
    encoder = model.encoder
    check_choices(body, arrival.tenant, model)
    check_tokens(body, encoder.vocab_size, encoder.eos_token_ids)
    least = encoder.least_tokens(body)
    if least >= model.state.context_length:
        raise _too_long(f"at least {least}", model.state.context_length, arrival.labels.endpoint)
    prompt = await encoder.encode_body(body, arrival.tenant)
    limit = token_limit(body, len(prompt), model.state.context_length, arrival.labels.endpoint)
    check_size(body, len(prompt), limit)
    grammar = await model.forms.grammar_of(body, arrival.tenant) if body.constrained else None
    echo = None
    if isinstance(body, CompletionRequest) and body.echo:
        echo = await encoder.echo(body.prompt, prompt, arrival.tenant, offsets=body.logprobs is not None)
    params = sampling_params(body, limit, encoder.vocab_size, grammar)
    return Call(choices(arrival, body, prompt, params), encoder.vocabulary, body.stop, echo)


def check_choices(body: Body, tenant: str, model: ServedModel) -> None:
    """ApiError (400) for more choices than the engine ever takes at once: coming again would not help."""
    # What has a form waits to be compiled at first, where none runs.
    places = 0 if body.constrained else model.max_running
    most = most_at_once(tenant, places, model.max_waiting)
    if body.n > max(1, most):
        raise invalid(
            f"n: {body.n} was given, but each choice takes a place of the engine, and it has {most} for one "
            "request (--max-running, --max-waiting).",
            param="n",
            code="invalid_value",
        )


def check_tokens(body: Body, vocab_size: int, eos_token_ids: Set[int]) -> None:
    """ApiError (400) for a token that the model does not have, and for leaving no token to choose."""
    for param, ids in (
        ("logit_bias", [token for token, _ in body.logit_bias]),
        ("allowed_token_ids", body.allowed_token_ids or ()),
        ("banned_token_ids", body.banned_token_ids),
        ("stop_token_ids", body.stop_token_ids),
    ):
        check_ids(ids, vocab_size, param)
    allowed, banned = body.allowed_token_ids, body.banned_token_ids
    ending = set(body.stop_token_ids) | (set() if body.ignore_eos else eos_token_ids)
    too_early = ending if body.min_tokens else set()
    # Mostly the count tells: a set of a whole vocabulary takes milliseconds.
    if allowed is None and (not banned or len(banned) + len(too_early) < vocab_size):
        return
    left = set(range(vocab_size) if allowed is None else allowed).difference(banned)
    if not left - too_early:
        param = "banned_token_ids" if allowed is None else "allowed_token_ids"
        needed = " that does not end the text before min_tokens" if left else ""
        raise invalid(f"{param}: no token is left to generate{needed}.", param, "invalid_value")


def token_limit(body: Body, prompt_tokens: int, context_length: int, endpoint: str) -> int:
    """Most tokens to generate; ApiError (400) if prompt and output do not fit the context."""
    room = context_length - prompt_tokens
    if room < 1:
        raise _too_long(str(prompt_tokens), context_length, endpoint)
    if body.limit is not None and body.limit > room:
        raise invalid(
            f"{body.limit_param}: {shown(body.limit)} was given, but the prompt has {prompt_tokens} of "
            f"the {context_length} tokens of the model's context, so that at most {room} can be generated.",
            param=body.limit_param,
            code="context_length_exceeded",
        )
    wanted = body.default_limit if body.limit is None else body.limit
    limit = room if wanted is None else min(wanted, room)
    if body.min_tokens > limit:
        raise invalid(
            f"min_tokens: {shown(body.min_tokens)} was given, but at most {limit} tokens are generated "
            f"({body.limit_param}).",
            param="min_tokens",
            code="invalid_value",
        )
    return limit


def _too_long(tokens: str, context_length: int, endpoint: str) -> ApiError:
    return invalid(
        f"The prompt has {tokens} tokens, but the model's context holds {context_length} of prompt and "
        "output together: at least one must be left for the output.",
        param="messages" if endpoint == CHAT else "prompt",
        code="context_length_exceeded",
    )


def check_size(body: Body, prompt_tokens: int, limit: int) -> None:
    """ApiError (400) for an answer that could have too many logprobs; a stream may have any number."""
    if body.stream or body.likeliest is None:
        return
    echoed = prompt_tokens if _echoes(body) else 0
    entries = body.n * (echoed + limit) * (body.likeliest + 1)
    if entries > MAX_WHOLE_LOGPROBS:
        raise invalid(
            f"logprobs: the answer could have {entries}, but one that is not streamed has at most "
            f"{MAX_WHOLE_LOGPROBS}. Here n is {body.n}, each choice can have {echoed + limit} tokens "
            f"({echoed} of the echoed prompt, {limit} by {body.limit_param}), and each token has "
            f"{body.likeliest + 1}. Set stream, or ask for fewer of these.",
            param="logprobs",
            code="answer_too_large",
        )


def _echoes(body: Body) -> bool:
    return isinstance(body, CompletionRequest) and body.echo


def sampling_params(body: Body, limit: int, vocab_size: int, grammar: str | None) -> SamplingParams:
    """The law of the first choice's tokens, at most `limit` of them."""
    return SamplingParams(
        max_tokens=limit,
        min_tokens=body.min_tokens,
        temperature=body.temperature,
        top_k=body.top_k if 0 < body.top_k < vocab_size else 0,
        top_p=body.top_p,
        min_p=body.min_p,
        presence_penalty=body.presence_penalty,
        frequency_penalty=body.frequency_penalty,
        repetition_penalty=body.repetition_penalty,
        logit_bias=body.logit_bias,
        allowed_token_ids=body.allowed_token_ids,
        banned_token_ids=body.banned_token_ids,
        seed=body.seed,
        stop_token_ids=body.stop_token_ids,
        ignore_eos=body.ignore_eos,
        logprobs=body.likeliest,
        prompt_logprobs=body.likeliest if _echoes(body) else None,
        grammar=grammar,
    )


def choices(
    arrival: Arrival, body: Body, prompt: tuple[int, ...], params: SamplingParams
) -> tuple[Request, ...]:
    """The engine's requests: one for each choice, which differ in their number.

    Only the first asks for the logprobs of the prompt, which are the same for all: they keep a request from
    taking over what has been read of its prompt.
    """
    other = replace(params, prompt_logprobs=None)
    return tuple(
        Request(
            id=f"{arrival.id}-{choice}" if choice else arrival.id,
            prompt=prompt,
            params=replace(other, choice=choice) if choice else params,
            labels=arrival.labels,
            tenant=arrival.tenant,
            history=arrival.whose.history,
            private=body.store is False,
            group=arrival.id,
            deadline=arrival.deadline,
            speculation=SpeculationOverride(body.speculation.proposer, body.speculation.max_depth),
            received=arrival.received,
        )
        for choice in range(body.n)
    )
