"""The pods that serve a model, and how much their engine does at once, as a SpeculativeModel sets them."""

from __future__ import annotations

from typing import Annotated, Final, Self

from pydantic import Field, StringConstraints, model_validator

from outrider_operator.podspec import (
    ENV_VALUES_BOUND,
    MAX_ENV_VALUES,
    RESERVED_MOUNT_PATTERN,
    RESERVED_MOUNTS,
    EnvVar,
    LabelValue,
    LocalReference,
    ObjectName,
    PullPolicy,
    Quantity,
    Toleration,
    Volume,
    amount,
    cel,
    keyed,
)
from outrider_operator.resources import REQUEST_WITHIN_LIMIT, Resources
from outrider_serving.settings import Contract, check_distinct

Image = Annotated[str, StringConstraints(min_length=1, max_length=512, pattern=r"^[^\s]+$")]

MAX_PROPOSER_MEMORY: Final = "1Ti"

PROPOSER_MEMORY_BOUND: Final = (
    "isQuantity(string(self)) && !string(self).endsWith('m')"
    " && quantity(string(self)).compareTo(quantity('0')) >= 0"
    f" && quantity(string(self)).compareTo(quantity('{MAX_PROPOSER_MEMORY}')) <= 0",
    f"proposerMemory must be an amount of bytes from 0 to {MAX_PROPOSER_MEMORY}, such as 512Mi",
)
"""A rule of CEL; Engine checks the same. A thousandth of a byte, 512m, was meant to be 512Mi."""

ENGINE_RULES: Final = (
    (
        "!has(self.stepTokens) || !has(self.maxRunning) || self.stepTokens >= self.maxRunning",
        "stepTokens must be at least maxRunning: each request takes a token in every step",
    ),
)
"""CEL of rules that span several fields; Engine checks the same."""


class Engine(Contract):
    """The pods that serve the model."""

    image: Image | None = Field(default=None, description="Serving image; by default that of the operator.")
    image_pull_policy: PullPolicy | None = Field(
        default=None, description="When the image is pulled; by default as the operator is configured."
    )
    image_pull_secrets: list[LocalReference] | None = Field(
        default=None,
        max_length=8,
        description="Secrets to pull the image with.",
        json_schema_extra=keyed("name"),
    )
    resources: Resources = Field(
        default=Resources(),
        description="Compute resources of the container; a GPU is a limit.",
        json_schema_extra=cel(REQUEST_WITHIN_LIMIT),
    )
    node_selector: dict[Annotated[str, StringConstraints(max_length=316)], LabelValue] | None = Field(
        default=None, max_length=16, description="Labels a node must have."
    )
    tolerations: list[Toleration] | None = Field(
        default=None,
        max_length=16,
        description="Taints of nodes that the pods tolerate.",
        json_schema_extra=cel(
            (
                "self.all(t, has(t.key) || t.operator == 'Exists')",
                "a toleration without a key needs operator Exists",
            )
        )
        | {"x-kubernetes-list-type": "atomic"},
    )
    runtime_class_name: ObjectName | None = Field(
        default=None, description="RuntimeClass of the pods, such as `nvidia`."
    )
    env: list[EnvVar] | None = Field(
        default=None,
        max_length=64,
        description="More environment variables of the container.",
        json_schema_extra=keyed("name")
        | cel(
            ("self.all(e, !(has(e.value) && has(e.valueFrom)))", "set value or valueFrom, not both"),
            ENV_VALUES_BOUND,
        ),
    )
    volumes: list[Volume] | None = Field(
        default=None,
        max_length=8,
        description="Volumes with weights.",
        json_schema_extra=keyed("name")
        | cel(
            (
                "self.all(v, self.exists_one(w, w.mountPath == v.mountPath))",
                "each volume needs a mountPath of its own",
            ),
            (
                f"self.all(v, !v.mountPath.matches('{RESERVED_MOUNT_PATTERN}'))",
                "mountPath must not lie in, or hide, a directory of the system: "
                + ", ".join(RESERVED_MOUNTS),
            ),
        ),
    )
    load_seconds: int = Field(
        default=1800,
        ge=30,
        le=86_400,
        description="How long a pod may take to fetch and load the model, in seconds; one that does not "
        "serve by then is restarted. With 600 seconds more, for scheduling it and for pulling the image, the "
        "resource no longer counts as progressing.",
    )
    max_running: int | None = Field(
        default=None,
        ge=1,
        le=65_536,
        description="Most requests in one step of a pod; by default 32. More of them raise throughput and "
        "slow each one down.",
    )
    max_waiting: int | None = Field(
        default=None,
        ge=1,
        le=1_000_000,
        description="Most requests that wait in a pod, by default 256; one more is answered 429.",
    )
    step_tokens: int | None = Field(
        default=None,
        ge=1,
        le=16_777_216,
        description="Most tokens in one target pass, of prompts, proposals and decoding together; by default "
        "2048 on a GPU and 512 on a CPU, or maxRunning if that is more. At least maxRunning.",
    )
    memory_share: float | None = Field(
        default=None,
        ge=0.05,
        le=1,
        description="Share of the GPU's memory, or of the container's on a CPU, for weights, keys and "
        "values, and proposers; by default 0.9 on a GPU and 0.4 on a CPU.",
    )
    proposer_memory: Quantity | None = Field(
        default=None,
        description="How much of that memory is kept free for proposers, such as 512Mi; by default 0.",
        json_schema_extra=cel(PROPOSER_MEMORY_BOUND),
    )

    @model_validator(mode="after")
    def _bounded_env(self) -> Self:
        length = sum(len(variable.value or "") for variable in self.env or [])
        if length > MAX_ENV_VALUES:
            raise ValueError(f"{ENV_VALUES_BOUND[1]} (they have {length})")
        return self

    @model_validator(mode="after")
    def _distinct(self) -> Self:
        for field, values in (
            ("env names", [variable.name for variable in self.env or []]),
            ("volume names", [volume.name for volume in self.volumes or []]),
            ("mountPaths", [volume.mount_path for volume in self.volumes or []]),
        ):
            check_distinct(field, values)
        return self

    @model_validator(mode="after")
    def _room_for_each_request(self) -> Self:
        if self.step_tokens and self.max_running and self.step_tokens < self.max_running:
            raise ValueError(f"{ENGINE_RULES[0][1]} (they are {self.step_tokens} and {self.max_running})")
        return self

    @model_validator(mode="after")
    def _bounded_proposer_memory(self) -> Self:
        text = self.proposer_memory
        if text is not None and (text.endswith("m") or amount(text) > amount(MAX_PROPOSER_MEMORY)):
            raise ValueError(f"{PROPOSER_MEMORY_BOUND[1]} (it is {text})")
        return self
