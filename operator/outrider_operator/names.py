"""Every name the operator gives or answers to: the API group, labels, field manager, children's names."""

from __future__ import annotations

from typing import Any, Final

GROUP: Final = "outrider.dev"
VERSION: Final = "v1alpha1"
API_VERSION: Final = f"{GROUP}/{VERSION}"
KIND: Final = "SpeculativeModel"
PLURAL: Final = "speculativemodels"
SINGULAR: Final = "speculativemodel"
SHORT_NAME: Final = "specm"

FIELD_MANAGER: Final = "outrider-operator"

NAME_LABEL: Final = "app.kubernetes.io/name"

OPERATOR_NAME: Final = "outrider-operator"
"""Value of NAME_LABEL on the operator's own pods, as the chart sets it."""

NAMESPACE_LABEL: Final = "kubernetes.io/metadata.name"
"""What every namespace carries: its own name."""

MODEL_LABEL: Final = f"{GROUP}/model"
"""Name of the SpeculativeModel: what the Service selects, and what the operator watches children by."""

POD_HASH_LABEL: Final = f"{GROUP}/pod-hash"
"""Part of a Deployment's selector: two of them can stand beside each other."""

ARM_HASH_LABEL: Final = f"{GROUP}/arm-hash"
"""On the Deployment object only: on a pod template it would recreate pods when the proposer changes."""

ROLE_LABEL: Final = f"{GROUP}/role"
"""On the Deployment object only: the arm that it serves."""

CONTAINER: Final = "engine"
HTTP_PORT_NAME: Final = "http"
ADMIN_PORT_NAME: Final = "admin"
SETTINGS_FILE: Final = "settings.json"
SETTINGS_DIRECTORY: Final = "/etc/outrider/settings"
KEYS_DIRECTORY: Final = "/etc/outrider/keys"
CACHE_AUTH_DIRECTORY: Final = "/etc/outrider/shared-cache-auth"
CACHE_CA_DIRECTORY: Final = "/etc/outrider/shared-cache-ca"
CACHE_CA_FILE: Final = "ca.crt"
CACHE_DIRECTORY: Final = "/var/cache/outrider"

HASH_LENGTH: Final = 8

MAX_NAME_LENGTH: Final = 37
"""63, the limit of a pod's name, less `-<pod hash>`, `-<ReplicaSet hash>` and `-<pod suffix>`: 9 + 11 + 6."""


def deployment_name(model: str, pod_hash: str) -> str:
    """Name of the Deployment that runs the pods of one pod hash."""
    return f"{model}-{pod_hash}"


def cache_prefix(namespace: str, model: str) -> str:
    """What the keys of a SpeculativeModel in Redis begin with: 111 characters at most.

    A namespace has at most 63, and neither it nor a model's name holds a colon: no prefix begins another's.
    """
    return f"outrider:{namespace}:{model}:"


def served_name(resource: dict[str, Any]) -> str:
    """Name by which requests address a model, read off a SpeculativeModel that need not be valid."""
    node: Any = resource
    for key in ("spec", "model", "servedName"):
        node = node.get(key) if isinstance(node, dict) else None
    return node if isinstance(node, str) and node else str(resource["metadata"]["name"])
