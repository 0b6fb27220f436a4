"""Parts of a pod that a SpeculativeModel may set, spelled as Kubernetes spells them."""

from __future__ import annotations

import re
from decimal import Decimal
from enum import StrEnum
from pathlib import PurePosixPath
from typing import Annotated, Any, Self

from kubernetes.utils.quantity import parse_quantity
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    StringConstraints,
    WithJsonSchema,
    model_validator,
)

from outrider_serving.settings import Contract

RESERVED_MOUNTS = (
    "/bin",
    "/dev",
    "/etc",
    "/lib",
    "/lib64",
    "/opt/outrider",
    "/proc",
    "/run",
    "/sbin",
    "/sys",
    "/tmp",
    "/usr",
    "/var",
)
"""Directories of the image, or that the operator mounts; nothing may be mounted on, under or over them."""

RESERVED_MOUNT_PATTERN = "^(({})(/.*)?|{})$".format(
    "|".join(RESERVED_MOUNTS),
    "|".join(sorted({str(PurePosixPath(path).parent) for path in RESERVED_MOUNTS} - {"/"})),
)
"""Matches the reserved directories, what is under them, and what they are in."""


def cel(*rules: tuple[str, ...]) -> dict[str, Any]:
    """Schema extras that make the API server check rules of the Common Expression Language.

    Each is (rule, message), or (rule, message, expression) where an expression of it words the message.
    """
    keys = ("rule", "message", "messageExpression")
    return {"x-kubernetes-validations": [dict(zip(keys, rule, strict=False)) for rule in rules]}


def keyed(*keys: str) -> dict[str, Any]:
    """Schema extras of a list that is merged by these keys, and so cannot hold one of them twice."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def _to_text(value: object) -> object:
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


ObjectName = Annotated[
    str,
    StringConstraints(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$"),
]
DataKey = Annotated[str, StringConstraints(min_length=1, max_length=253, pattern=r"^[-._a-zA-Z0-9]+$")]
LabelName = Annotated[
    str, StringConstraints(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
VolumeName = Annotated[
    str, StringConstraints(min_length=1, max_length=50, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")
]
LabelValue = Annotated[str, StringConstraints(max_length=63)]
_SEGMENT = r"([.]{0,2}[-_a-zA-Z0-9]|[.]{3})[-._a-zA-Z0-9]*"
"""Neither `.` nor `..`, which would name another directory than the one that is written."""

_PATH = rf"^(/{_SEGMENT})+$"
_NOT_ABSOLUTE = "the path must be absolute: begin with /, as in /models/gemma"
_NOT_PLAIN = (
    "each part of the path must be of letters, digits, -, _ and ., be neither . nor .., and follow one /"
)


def _plain_path(path: str) -> str:
    if not path.startswith("/"):
        raise ValueError(_NOT_ABSOLUTE)
    if not re.fullmatch(_PATH, path):
        raise ValueError(_NOT_PLAIN)
    return path


AbsolutePath = Annotated[
    str,
    StringConstraints(min_length=2, max_length=256),
    AfterValidator(_plain_path),
    Field(
        json_schema_extra=cel(
            ("self.startsWith('/')", _NOT_ABSOLUTE),
            (f"!self.startsWith('/') || self.matches('{_PATH}')", _NOT_PLAIN),
        )
    ),
]
"""Checked by rules, not by a pattern: the API server tells of a pattern only its regular expression."""

_QUANTITY = r"^[0-9]+(\.[0-9]+)?(m|k|M|G|T|P|E|Ki|Mi|Gi|Ti|Pi|Ei)?$"
Quantity = Annotated[
    str,
    BeforeValidator(_to_text),
    StringConstraints(min_length=1, max_length=32, pattern=_QUANTITY),
    WithJsonSchema(
        {
            "anyOf": [{"type": "integer"}, {"type": "string"}],
            "x-kubernetes-int-or-string": True,
            "maxLength": 32,
            "pattern": _QUANTITY,
        }
    ),
]


def amount(quantity: str) -> Decimal:
    """How much a Quantity is; of memory, in bytes."""
    return Decimal(parse_quantity(quantity))  # type: ignore[no-untyped-call]


class PullPolicy(StrEnum):
    """When the image is pulled."""

    ALWAYS = "Always"
    IF_NOT_PRESENT = "IfNotPresent"
    NEVER = "Never"


class LocalReference(Contract):
    """An object of the same namespace."""

    name: ObjectName = Field(description="Name of the object, in the namespace of the SpeculativeModel.")


class SecretKeyReference(LocalReference):
    """One key of a Secret of the same namespace."""

    key: DataKey = Field(default="token", description="Key within the Secret.")


class KeyReference(LocalReference):
    """One key of an object of the same namespace."""

    key: DataKey = Field(description="Key within the object.")
    optional: bool = Field(default=False, description="Whether the pod may start without it.")


class EnvSource(Contract):
    """Where the value of a variable comes from: exactly one of the two."""

    secret_key_ref: KeyReference | None = Field(default=None, description="A key of a Secret.")
    config_map_key_ref: KeyReference | None = Field(default=None, description="A key of a ConfigMap.")

    @model_validator(mode="after")
    def _one(self) -> Self:
        if (self.secret_key_ref is None) == (self.config_map_key_ref is None):
            raise ValueError("set exactly one of secretKeyRef and configMapKeyRef")
        return self


class EnvVar(Contract):
    """An environment variable of the engine's container."""

    name: Annotated[str, StringConstraints(max_length=128, pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")] = Field(
        description="Name of the variable."
    )
    value: Annotated[str, StringConstraints(max_length=4096)] | None = Field(
        default=None, description="Its value, as it is written; $(NAME) is expanded as Kubernetes does."
    )
    value_from: EnvSource | None = Field(
        default=None,
        description="Where its value comes from, instead of value.",
        json_schema_extra=cel(
            (
                "has(self.secretKeyRef) != has(self.configMapKeyRef)",
                "set exactly one of secretKeyRef and configMapKeyRef",
            )
        ),
    )

    @model_validator(mode="after")
    def _one(self) -> Self:
        if self.value is not None and self.value_from is not None:
            raise ValueError("set value or valueFrom, not both")
        return self


MAX_ENV_VALUES = 65_536
"""Characters of the values of all variables: they stand in every pod, ReplicaSet and revision of it."""

ENV_VALUES_BOUND = (
    f"self.map(e, has(e.value) ? e.value.size() : 0).sum() <= {MAX_ENV_VALUES}",
    f"the values of engine.env must not be longer than {MAX_ENV_VALUES} characters in all: "
    "put long ones into a ConfigMap or Secret and name it by valueFrom, or mount a volume",
)
"""A rule of CEL; Engine checks the same."""


class TolerationOperator(StrEnum):
    """How the toleration's key relates to its value."""

    EXISTS = "Exists"
    EQUAL = "Equal"


class TaintEffect(StrEnum):
    """The effect of a taint."""

    NO_SCHEDULE = "NoSchedule"
    PREFER_NO_SCHEDULE = "PreferNoSchedule"
    NO_EXECUTE = "NoExecute"


class Toleration(Contract):
    """A taint of nodes that the pods tolerate."""

    key: Annotated[str, StringConstraints(max_length=316)] | None = Field(
        default=None, description="Key of the taint; without one every taint matches."
    )
    operator: TolerationOperator = Field(
        default=TolerationOperator.EQUAL, description="Exists matches any value of the key."
    )
    value: LabelValue | None = Field(default=None, description="Value of the taint, for operator Equal.")
    effect: TaintEffect | None = Field(
        default=None, description="Effect of the taint; without one any effect."
    )
    toleration_seconds: int | None = Field(
        default=None, ge=0, le=86_400 * 365, description="How long a NoExecute taint is tolerated."
    )

    @model_validator(mode="after")
    def _key_or_exists(self) -> Self:
        if self.key is None and self.operator is not TolerationOperator.EXISTS:
            raise ValueError("a toleration without a key needs operator Exists")
        return self


class ClaimReference(Contract):
    """A PersistentVolumeClaim."""

    claim_name: ObjectName = Field(description="Name of the claim.")


class Volume(Contract):
    """A volume with weights, mounted into the engine's container."""

    name: VolumeName = Field(description="Name of the volume.")
    mount_path: AbsolutePath = Field(
        description="Where it is mounted, without `.` and `..`; not a directory of the system."
    )
    read_only: bool = Field(default=True, description="Whether it is mounted read-only.")
    persistent_volume_claim: ClaimReference = Field(
        description="The PersistentVolumeClaim, in the namespace of the SpeculativeModel."
    )

    @model_validator(mode="after")
    def _not_reserved(self) -> Self:
        if re.search(RESERVED_MOUNT_PATTERN, self.mount_path):
            raise ValueError(f"mountPath {self.mount_path} lies in, or hides, a directory of the system")
        return self
