"""Which field moves which hash: this table decides what recreates pods, and later what is judged anew."""

from __future__ import annotations

import hashlib
import json

import pytest

from outrider_operator.children import deployment
from outrider_operator.hashes import arm_hash, pod_hash
from outrider_operator.spec import SpeculativeModelSpec
from unit.operator.builders import CONFIG, FULL, MINIMAL, OWNER, changed

NEITHER = [
    ("replicas", 5),
    ("replacement", "inPlace"),
    ("workloads", [{"name": "chat"}]),
    ("objective", {"ttftMilliseconds": 1, "tpotMilliseconds": 1}),
    ("requests", {"timeoutSeconds": 5}),
    ("requests", {"speculationOverride": False}),
    ("api.port", 81),
    ("api.keysSecretRef", {"name": "x"}),
    ("sharedCache", {"url": "redis://h", "tenantMode": "single", "retention": {"seconds": 60}}),
]
ARM_ONLY = [("proposer.method", "none"), ("proposer.maxDepth", 3), ("proposer.ngram", {"minMatch": 2})]
BOTH = [
    ("model.source", {"package": "other"}),
    ("model.dtype", "float32"),
    ("model.contextLength", 99),
    ("model.servedName", "y"),
    ("model.chatTemplate", "z"),
    ("engine.image", "other:1"),
    ("engine.imagePullSecrets", [{"name": "p"}]),
    ("engine.resources", {"limits": {"cpu": 2}}),
    ("engine.nodeSelector", {"a": "b"}),
    ("engine.tolerations", [{"operator": "Exists"}]),
    ("engine.runtimeClassName", "nvidia"),
    ("engine.loadSeconds", 60),
    ("engine.env", [{"name": "A", "value": "b"}]),
    ("engine.maxRunning", 32),
    ("engine.maxWaiting", 256),
    ("engine.stepTokens", 512),
    ("engine.memoryShare", 0.9),
    ("engine.proposerMemory", "0"),
    ("engine.volumes", [{"name": "v", "mountPath": "/w", "persistentVolumeClaim": {"claimName": "c"}}]),
]


def hashes(spec: dict[str, object]) -> tuple[str, str]:
    parsed = SpeculativeModelSpec.model_validate(spec)
    image = parsed.engine.image or "operator/serving:1"
    return pod_hash(parsed, image), arm_hash(parsed, image)


@pytest.mark.parametrize(("field", "value"), NEITHER)
def test_moves_neither(field: str, value: object) -> None:
    assert hashes(changed(MINIMAL, field, value)) == hashes(MINIMAL)


@pytest.mark.parametrize(("field", "value"), ARM_ONLY)
def test_moves_the_arm_only(field: str, value: object) -> None:
    (pod, arm), (pod_before, arm_before) = hashes(changed(MINIMAL, field, value)), hashes(MINIMAL)
    assert pod == pod_before
    assert arm != arm_before


@pytest.mark.parametrize(("field", "value"), BOTH)
def test_moves_both(field: str, value: object) -> None:
    (pod, arm), (pod_before, arm_before) = hashes(changed(MINIMAL, field, value)), hashes(MINIMAL)
    assert pod != pod_before
    assert arm != arm_before


def test_operators_image_moves_both() -> None:
    spec = SpeculativeModelSpec.model_validate(MINIMAL)
    assert pod_hash(spec, "a:1") != pod_hash(spec, "a:2")


def test_a_default_written_out_is_the_default() -> None:
    written = changed(changed(MINIMAL, "model.dtype", "auto"), "engine.resources", {})
    written = changed(changed(written, "engine.loadSeconds", 1800), "replacement", "surge")
    written = changed(written, "requests", {"speculationOverride": True})
    assert hashes(changed(written, "proposer", {"method": "ngram", "maxDepth": 16})) == hashes(MINIMAL)


def test_values_are_stable_across_versions() -> None:
    """A change here recreates the pods of every user on upgrade: it needs a reason in the changelog."""
    assert hashes(MINIMAL) == ("ff6c028f", "223493ac")
    assert hashes(FULL) == ("b1e18367", "494b4767")


@pytest.mark.parametrize(("spec", "digest"), [(MINIMAL, "9e015cc4375ff35a"), (FULL, "e0d41cfcd6e4c285")])
def test_pod_templates_are_stable_across_versions(spec: dict[str, object], digest: str) -> None:
    """As above. Golden files show what changed, but are written anew too easily to forbid it."""
    parsed = SpeculativeModelSpec.model_validate(spec)
    template = deployment(OWNER, parsed, CONFIG)["spec"]["template"]
    assert hashlib.sha256(json.dumps(template, sort_keys=True).encode()).hexdigest()[:16] == digest


def test_amounts_that_are_the_same_number_are_the_same_value() -> None:
    whole, written = changed(MINIMAL, "engine.memoryShare", 1), changed(MINIMAL, "engine.memoryShare", 1.0)
    assert hashes(whole) == hashes(written)
