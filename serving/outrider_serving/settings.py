"""What a serving pod is told, and what it reports back: the one contract between the two halves.

The operator imports this module and only this one, so it must never import torch or anything heavy.
`PodSettings` is the content of the mounted settings file; the operator writes it, a pod re-reads it while
it runs. `PodState` is what a pod answers on its admin port. Field descriptions here become the
descriptions of the custom resource, whose schema is generated from these models.
"""

from __future__ import annotations

from collections.abc import Sequence
from enum import StrEnum
from typing import Annotated, Self

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, model_validator
from pydantic.alias_generators import to_camel

MAX_DEPTH = 64
"""Upper bound of any depth limit: a deeper chain has never been worth its verification."""

OTHER_WORKLOAD = "other"
"""The workload of every request that names none of the declared workloads."""

ADMIN_PORT = 9464
"""Where a pod serves its admin endpoints; never part of the Service."""

Name = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]


def check_distinct(field: str, values: Sequence[str]) -> None:
    """Nothing may stand there twice.

    Raises:
        ValueError: the message says what does.
    """
    if twice := sorted({value for value in values if values.count(value) > 1}):
        raise ValueError(f"{field} must be distinct (more than once: {', '.join(twice)})")


class Contract(BaseModel):
    """A model that refuses unknown fields and is spelled in camelCase outside Python."""

    model_config = ConfigDict(
        alias_generator=to_camel, populate_by_name=True, extra="forbid", frozen=True, use_enum_values=False
    )


class Method(StrEnum):
    """How proposals are made."""

    NONE = "none"
    NGRAM = "ngram"
    SUFFIX = "suffix"


class NgramSettings(Contract):
    """Settings of the n-gram proposer: look the last tokens up in the request's own text."""

    min_match: int = Field(default=1, ge=1, le=32, description="Shortest suffix, in tokens, to look up.")
    max_match: int = Field(default=4, ge=1, le=32, description="Longest suffix, in tokens, to look up first.")

    @model_validator(mode="after")
    def _ordered(self) -> Self:
        if self.min_match > self.max_match:
            raise ValueError(f"minMatch ({self.min_match}) must not exceed maxMatch ({self.max_match})")
        return self


class Scope(StrEnum):
    """Where the suffix proposer looks."""

    REQUEST = "request"
    HISTORY = "history"


class SuffixSettings(Contract):
    """Settings of the suffix proposer: look the longest known suffix of a text up in earlier text."""

    scopes: tuple[Scope, ...] = Field(
        default=(Scope.REQUEST, Scope.HISTORY),
        min_length=1,
        max_length=2,
        json_schema_extra={"x-kubernetes-list-type": "set"},
        description="Where to look: request, the request's own prompt and output; history, the finished "
        "outputs of its tenant. The better-scored continuation is proposed.",
    )
    max_match: int = Field(
        default=32, ge=1, le=64, description="Longest suffix, in tokens, that is compared."
    )
    places: int = Field(
        default=16, ge=1, le=64, description="Earlier places that are looked at in each scope, at most."
    )
    min_probability: float = Field(
        default=0.1,
        ge=0,
        le=1,
        description="A proposal ends before the share of the places that went on like it falls below this.",
    )
    width: int = Field(
        default=1,
        ge=1,
        le=8,
        description="A proposal has so many tokens for each of its depth: a chain with 1, a tree with more.",
    )
    history_tokens: int = Field(
        default=1_000_000,
        ge=4_096,
        le=100_000_000,
        description="Tokens of history that a pod keeps, of all tenants together; a million takes 44 MiB as "
        "a rule, at most 61. Where they are too many, the oldest go of the tenant that has most.",
    )

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        check_distinct("scopes", self.scopes)
        return self


class Proposer(Contract):
    """What proposes tokens for the target to verify."""

    method: Method = Field(
        default=Method.NGRAM,
        description="none decodes one token a step; ngram proposes what followed the same tokens earlier in "
        "the request; suffix what mostly followed the longest known suffix, there or in a tenant's history.",
    )
    min_depth: int = Field(
        default=1, ge=1, le=MAX_DEPTH, description="A proposal shorter than this is not verified at all."
    )
    max_depth: int = Field(
        default=16,
        ge=1,
        le=MAX_DEPTH,
        description="Most tokens proposed in one step; measured times and acceptance decide on fewer.",
    )
    ngram: NgramSettings | None = Field(
        default=None,
        description="Settings of method ngram, whenever it proposes: also for a request that asks for it.",
    )
    suffix: SuffixSettings | None = Field(
        default=None,
        description="Settings of method suffix, whenever it proposes: also for a request that asks for it.",
        # A pod of an earlier release refuses a file with a field that it does not know.
        exclude_if=lambda settings: settings is None,
    )

    @model_validator(mode="after")
    def _consistent(self) -> Self:
        if self.min_depth > self.max_depth:
            raise ValueError(f"minDepth ({self.min_depth}) must not exceed maxDepth ({self.max_depth})")
        return self


class Objective(Contract):
    """Latency limits that a request must meet to count towards goodput."""

    ttft_milliseconds: int = Field(
        ge=1, le=3_600_000, description="Limit from receipt of the request to the first token written."
    )
    tpot_milliseconds: int = Field(
        ge=1, le=600_000, description="Limit of (last token - first token) / (tokens - 1)."
    )
    max_gap_milliseconds: int | None = Field(
        default=None, ge=1, le=3_600_000, description="Limit of the longest pause between two writes, if any."
    )


class Workload(Contract):
    """A kind of traffic, named by the X-Outrider-Workload header or metadata.workload of a request."""

    name: Name = Field(description="Label of the workload; `other` stands for everything undeclared.")
    objective: Objective | None = Field(
        default=None, description="Objective of this workload; without it the model's default holds."
    )

    @model_validator(mode="after")
    def _not_reserved(self) -> Self:
        if self.name == OTHER_WORKLOAD:
            raise ValueError(f"name {OTHER_WORKLOAD!r} is reserved for undeclared traffic")
        return self


class TenantMode(StrEnum):
    """Whose finished outputs may be proposed to a request."""

    KEY = "key"
    SINGLE = "single"
    HEADER = "header"
    REQUEST = "request"


class RequestLimits(Contract):
    """What a request may ask for."""

    timeout_seconds: float | None = Field(
        default=None,
        gt=0,
        le=86_400,
        description="Most seconds a request may take, and what holds for one that does not say; "
        "none: no limit.",
    )
    speculation_override: bool = Field(
        default=True, description="Whether a request may choose its own proposer and depth."
    )
    token_milliseconds: int | None = Field(
        default=None,
        ge=1,
        le=10_000,
        description="Each token is written by itself, and at least so many milliseconds after another. "
        "Where that is no faster than the model without speculation, neither sizes nor times of chunks tell "
        "what was proposed. None: tokens are written as they are committed.",
        # A pod of an earlier release refuses a file with a field that it does not know.
        exclude_if=lambda pace: pace is None,
    )


class Arm(Contract):
    """One side of a rollout: what is in force when it is."""

    proposer: Proposer = Field(description="The proposer of this arm.")


STABLE = "stable"
"""The arm that serves when no rollout runs."""


MAX_COUNT = 2**53
"""Of what is counted: every reader of JSON takes it as it is, and the API server as an integer."""


class PodSettings(Contract):
    """The settings file of a pod. A changed file takes effect without a restart."""

    generation: int = Field(ge=0, le=MAX_COUNT, description="Counts changes; a pod reports the one in force.")
    arms: dict[Name, Arm] = Field(min_length=1, max_length=2, description="Arms by name.")
    in_force: Name = Field(description="Name of the arm in force.")
    workloads: list[Workload] = Field(default_factory=list, max_length=64, description="Declared workloads.")
    objective: Objective | None = Field(default=None, description="Default objective.")
    requests: RequestLimits = Field(
        default=RequestLimits(),
        description="Limits of what a request may ask for.",
        # A pod of an earlier release refuses a file with a field that it does not know.
        exclude_if=lambda limits: limits == RequestLimits(),
    )

    @model_validator(mode="after")
    def _resolvable(self) -> Self:
        if self.in_force not in self.arms:
            raise ValueError(f"inForce {self.in_force!r} is not one of the arms {sorted(self.arms)}")
        names = [workload.name for workload in self.workloads]
        if len(names) != len(set(names)):
            raise ValueError("workloads must have distinct names")
        return self

    @property
    def proposer(self) -> Proposer:
        """The proposer of the arm in force."""
        return self.arms[self.in_force].proposer

    def workload(self, name: str | None) -> str:
        """The bounded label for what a request calls its workload."""
        return next((w.name for w in self.workloads if w.name == name), OTHER_WORKLOAD)

    def objective_of(self, workload: str) -> Objective | None:
        """The objective in force for a workload label, or None where nothing limits it."""
        own = next((w.objective for w in self.workloads if w.name == workload), None)
        return own or self.objective


def default_settings(proposer: Proposer | None = None) -> PodSettings:
    """What a pod does that was given no settings file: one stable arm, no objective."""
    return PodSettings(generation=0, arms={STABLE: Arm(proposer=proposer or Proposer())}, in_force=STABLE)


class Report(Contract):
    """What a pod says; an operator ignores what a newer pod says beyond it."""

    model_config = ConfigDict(extra="ignore")


class ModelState(Report):
    """The model that a pod serves, as it resolved it."""

    name: str = Field(description="Name under which requests address the model.")
    revision: str = Field(
        description="Commit of the hub, or for a path or package a digest of config, tokenizer and weights."
    )
    dtype: str = Field(description="Weights' dtype in memory.")
    context_length: int = Field(ge=0, le=MAX_COUNT, description="Most tokens of prompt and output together.")


class PodState(Report):
    """What a pod answers to GET /admin/state."""

    ready: bool = Field(description="True once a token was generated and until the pod drains.")
    generation: int = Field(ge=0, le=MAX_COUNT, description="Generation of the settings in force.")
    in_force: str = Field(description="Name of the arm in force.")
    settings_error: str | None = Field(
        default=None, description="Why the newest settings file was refused; the earlier one stays in force."
    )
    keys_error: str | None = Field(
        default=None,
        description="What of the newest API keys was refused, by tenant; the others' are in force.",
    )
    proposer_error: str | None = Field(
        default=None,
        description="Why a proposer of the settings is not loaded; requests are served without it.",
    )
    shared_cache_error: str | None = Field(
        default=None,
        description="Why finished outputs are not shared now; requests are served without it. The same words "
        "as long as the reason is the same: what changes is written to the resource.",
    )
    model: ModelState | None = Field(default=None, description="The loaded model; absent while it loads.")
