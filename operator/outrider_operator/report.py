"""What the operator reports: the status of a SpeculativeModel, without floats."""

from __future__ import annotations

import re
from enum import StrEnum
from typing import Annotated

from pydantic import Field, StringConstraints

from outrider_operator.podspec import keyed
from outrider_serving.settings import Contract

MAX_MESSAGE = 1024
"""Longest message of a condition that the operator writes; the schema allows what Kubernetes does."""

MAX_REASON = 1024

Text = Annotated[str, StringConstraints(max_length=256)]


class ConditionType(StrEnum):
    """What a condition speaks of."""

    READY = "Ready"
    AVAILABLE = "Available"
    PROGRESSING = "Progressing"
    NAME_CONFLICT = "NameConflict"
    KEYS_REFUSED = "KeysRefused"
    PROPOSER_NOT_LOADED = "ProposerNotLoaded"
    SERVED_NAME_CONFLICT = "ServedNameConflict"
    SHARED_CACHE_NOT_CONNECTED = "SharedCacheNotConnected"


class ConditionStatus(StrEnum):
    """Whether it holds."""

    TRUE = "True"
    FALSE = "False"
    UNKNOWN = "Unknown"


class Condition(Contract):
    """One aspect of the state, in the shape of metav1.Condition."""

    type: Annotated[str, StringConstraints(min_length=1, max_length=316)] = Field(
        description="Ready, Available, Progressing; NameConflict while a foreign object is in the way, "
        "KeysRefused while an entry of the API keys is not usable, ProposerNotLoaded while a pod serves "
        "without a proposer that it was asked for, ServedNameConflict while another "
        "SpeculativeModel of the namespace is served under the same name, SharedCacheNotConnected while a "
        "pod serves without sharing what it learns."
    )
    status: ConditionStatus = Field(description="Whether the condition holds.")
    reason: Annotated[
        str,
        StringConstraints(
            min_length=1, max_length=MAX_REASON, pattern=r"^[A-Za-z]([A-Za-z0-9_,:]*[A-Za-z0-9_])?$"
        ),
    ] = Field(description="The cause in one word, for programs.")
    message: Annotated[str, StringConstraints(max_length=32_768)] = Field(
        description="The cause, for people."
    )
    observed_generation: int = Field(ge=0, description="Generation of the resource that this was seen for.")
    last_transition_time: Annotated[str, StringConstraints(max_length=64)] = Field(
        description="When the status last changed.", json_schema_extra={"format": "date-time"}
    )


def reason_word(text: str, fallback: str) -> str:
    """A reason as a condition may carry it, from one that a kubelet or a controller made up."""
    word = re.sub(r"[^A-Za-z0-9_,:]+", "_", text[:MAX_REASON])
    return re.sub(r"^[^A-Za-z]+|[,:]+$", "", word) or fallback


class SettingsStatus(Contract):
    """The pods' settings file, and which of it the pods say is in force."""

    generation: int = Field(ge=0, description="Generation of the settings that pods were given.")
    in_force: Annotated[str, StringConstraints(max_length=63)] = Field(description="Arm in force.")
    reported_generation: int | None = Field(
        default=None, ge=0, description="Lowest generation that a serving pod reports to have in force."
    )


class ModelStatus(Contract):
    """The model, as the pods resolved it."""

    name: Text = Field(description="Name by which requests address it.")
    revision: Text = Field(description="Commit of the hub, or digest of config, tokenizer and weights.")
    dtype: Text = Field(description="Dtype of the weights in memory.")
    context_length: int = Field(ge=0, description="Most tokens of prompt and output together.")


class SpeculativeModelStatus(Contract):
    """What is."""

    observed_generation: int | None = Field(
        default=None, ge=0, description="Generation of the resource that this status speaks of."
    )
    conditions: list[Condition] | None = Field(
        default=None, max_length=16, description="Aspects of the state.", json_schema_extra=keyed("type")
    )
    replicas: int | None = Field(default=None, ge=0, description="Pods that exist.")
    ready_replicas: int | None = Field(default=None, ge=0, description="Pods that are ready.")
    selector: Annotated[str, StringConstraints(max_length=512)] | None = Field(
        default=None, description="Label selector of the pods, for the scale subresource."
    )
    settings: SettingsStatus | None = Field(
        default=None, description="The pods' settings, and which of them are in force."
    )
    model: ModelStatus | None = Field(default=None, description="The model, as the pods resolved it.")
    proposer: Text | None = Field(
        default=None,
        description="Proposer that serving pods have in force; the wanted one while nothing serves.",
    )
    accepted: Text | None = Field(default=None, description="Share of proposed tokens that were kept.")
    attainment: Text | None = Field(default=None, description="Share of requests that met their objective.")
    rollout: Text | None = Field(default=None, description="Phase of the running rollout.")
