"""The two hashes that decide what a change of the spec means.

The *arm hash* covers what can make serving better or worse: proposer, model, revision, image and engine
settings. The *pod hash* is the same without the proposer: it names and selects a Deployment, so a new
proposer never recreates a pod. Replicas and how they are replaced, workloads, objectives, limits of requests,
the API and the shared cache are in neither.

Fields that hold their default are left out of the hashed text, so that a later version of the operator,
which knows more fields, hashes an old spec to the same value.
"""

from __future__ import annotations

import hashlib
import json
from typing import Any

from pydantic import BaseModel

from outrider_operator.names import HASH_LENGTH
from outrider_operator.spec import SpeculativeModelSpec


def pod_hash(spec: SpeculativeModelSpec, image: str) -> str:
    """Hash of what a pod is started with; image is the one that is resolved from spec and operator."""
    return _digest(_pod_parts(spec, image))


def arm_hash(spec: SpeculativeModelSpec, image: str) -> str:
    """Hash of an arm: the pod's, and the proposer."""
    return _digest(_pod_parts(spec, image) | {"proposer": _canonical(spec.proposer)})


def _pod_parts(spec: SpeculativeModelSpec, image: str) -> dict[str, Any]:
    return {"model": _canonical(spec.model), "engine": _canonical(spec.engine) | {"image": image}}


def _canonical(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_defaults=True)


def _digest(content: dict[str, Any]) -> str:
    text = json.dumps(content, sort_keys=True, separators=(",", ":"))
    return hashlib.sha256(text.encode()).hexdigest()[:HASH_LENGTH]
