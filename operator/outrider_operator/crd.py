"""The CustomResourceDefinition of SpeculativeModel, as a plain document."""

from __future__ import annotations

from typing import Any

from outrider_operator import names
from outrider_operator.podspec import cel
from outrider_operator.report import SpeculativeModelStatus
from outrider_operator.schema import structural_schema
from outrider_operator.spec import SPEC_RULES, SpeculativeModelSpec

CRD_NAME = f"{names.PLURAL}.{names.GROUP}"

_NAME_RULES = (
    (
        f"self.metadata.name.size() <= {names.MAX_NAME_LENGTH}",
        f"metadata.name must be at most {names.MAX_NAME_LENGTH} characters long: its pods add to it",
    ),
    (
        "self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must begin with a letter and hold only lower-case letters, digits and '-', "
        "because the Service takes it",
    ),
)


def _column(name: str, path: str, kind: str = "string", description: str = "") -> dict[str, Any]:
    column = {"name": name, "type": kind, "jsonPath": path}
    return column | ({"description": description} if description else {})


def _condition(name: str, field: str = "status") -> str:
    return f'.status.conditions[?(@.type=="{name}")].{field}'


def custom_resource_definition() -> dict[str, Any]:
    """The CRD, generated from the pydantic models."""
    spec = structural_schema(SpeculativeModelSpec) | cel(*SPEC_RULES)
    schema = {
        "type": "object",
        "description": "A model that is served with speculative decoding: exact output, proposed cheaply, "
        "verified by the model itself.",
        "required": ["spec"],
        **cel(*_NAME_RULES),
        "properties": {
            "apiVersion": {"type": "string", "description": "Version of this representation of the object."},
            "kind": {"type": "string", "description": "Kind of the object."},
            "metadata": {"type": "object"},
            "spec": spec,
            "status": structural_schema(SpeculativeModelStatus),
        },
    }
    version = {
        "name": names.VERSION,
        "served": True,
        "storage": True,
        "schema": {"openAPIV3Schema": schema},
        "subresources": {
            "status": {},
            "scale": {
                "specReplicasPath": ".spec.replicas",
                "statusReplicasPath": ".status.replicas",
                "labelSelectorPath": ".status.selector",
            },
        },
        "additionalPrinterColumns": [
            _column("Ready", _condition("Ready"), description="Whether what is wanted is served."),
            _column("Reason", _condition("Ready", "reason"), description="Why, in one word."),
            _column("Proposer", ".status.proposer", description="Proposer in force."),
            _column("Accepted", ".status.accepted", description="Share of proposed tokens that were kept."),
            _column(
                "Attainment", ".status.attainment", description="Share of requests that met their objective."
            ),
            _column("Rollout", ".status.rollout", description="Phase of the running rollout."),
            _column("Age", ".metadata.creationTimestamp", "date"),
        ],
    }
    return {
        "apiVersion": "apiextensions.k8s.io/v1",
        "kind": "CustomResourceDefinition",
        "metadata": {"name": CRD_NAME},
        "spec": {
            "group": names.GROUP,
            "scope": "Namespaced",
            "names": {
                "kind": names.KIND,
                "listKind": f"{names.KIND}List",
                "plural": names.PLURAL,
                "singular": names.SINGULAR,
                "shortNames": [names.SHORT_NAME],
                "categories": ["all"],
            },
            "versions": [version],
        },
    }
