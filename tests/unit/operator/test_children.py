"""The objects that a SpeculativeModel becomes, compared with stored ones.

OUTRIDER_UPDATE_GOLDEN=1 writes them anew; the difference is then for `git diff` to show.
"""

from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider_operator.children import children
from outrider_operator.config import OperatorConfig
from outrider_operator.podspec import PullPolicy
from outrider_operator.spec import SpeculativeModelSpec
from outrider_serving.settings import PodSettings
from unit.operator.builders import CONFIG, FULL, MINIMAL, OWNER, REDIS, SHARED, TUNED, changed

GOLDEN = Path(__file__).parent / "golden"
KINDS = ("ServiceAccount", "ConfigMap", "NetworkPolicy", "Service", "PodDisruptionBudget", "Deployment")
CASES = {"minimal": MINIMAL, "full": FULL, "tuned": TUNED, "shared": SHARED}


def build(spec: dict[str, Any], config: OperatorConfig = CONFIG) -> dict[str, dict[str, Any]]:
    made = children(OWNER, SpeculativeModelSpec.model_validate(spec), config, 4)
    return {child["kind"]: child for child in made}


def template(spec: dict[str, Any]) -> dict[str, Any]:
    return dict(build(spec)["Deployment"]["spec"]["template"])


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("kind", KINDS)
def test_golden(case: str, kind: str) -> None:
    made = build(CASES[case])[kind]
    file = GOLDEN / f"{case}-{kind.lower()}.yaml"
    if os.environ.get("OUTRIDER_UPDATE_GOLDEN") == "1":
        file.write_text(yaml.safe_dump(made, sort_keys=False, width=110), encoding="utf-8")
    assert made == yaml.safe_load(file.read_text(encoding="utf-8"))


def test_every_kind_has_a_golden_file() -> None:
    assert tuple(build(MINIMAL)) == KINDS


def test_settings_file_is_what_a_pod_reads() -> None:
    settings = PodSettings.model_validate_json(build(FULL)["ConfigMap"]["data"]["settings.json"])
    assert settings.generation == 4
    assert settings.proposer.max_depth == 5
    assert [workload.name for workload in settings.workloads] == ["chat", "batch"]
    tuned = PodSettings.model_validate_json(build(TUNED)["ConfigMap"]["data"]["settings.json"])
    assert (tuned.requests.timeout_seconds, tuned.requests.speculation_override) == (90, False)


@pytest.mark.parametrize("spec", [MINIMAL, FULL, changed(MINIMAL, "requests", {"speculationOverride": True})])
def test_a_pod_of_an_earlier_release_can_read_what_limits_no_request(spec: dict[str, Any]) -> None:
    assert "requests" not in json.loads(build(spec)["ConfigMap"]["data"]["settings.json"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("proposer.maxDepth", 3),
        ("proposer.method", "none"),
        ("workloads", [{"name": "chat"}]),
        ("objective", {"ttftMilliseconds": 1, "tpotMilliseconds": 1}),
        ("requests", {"timeoutSeconds": 0.5}),
        ("requests", {"speculationOverride": False}),
    ],
)
def test_what_pods_reread_changes_nothing_but_the_config_map(field: str, value: object) -> None:
    before, after = build(MINIMAL), build(changed(MINIMAL, field, value))
    assert before["ConfigMap"] != after["ConfigMap"]
    assert before["Service"] == after["Service"]
    assert before["Deployment"]["metadata"]["name"] == after["Deployment"]["metadata"]["name"]
    assert before["Deployment"]["spec"] == after["Deployment"]["spec"]


def test_api_port_changes_only_the_service() -> None:
    before, after = build(MINIMAL), build(changed(MINIMAL, "api.port", 80))
    assert {kind for kind in KINDS if before[kind] != after[kind]} == {"Service"}


def test_keys_change_pods_but_not_their_hash() -> None:
    before, after = build(MINIMAL), build(changed(MINIMAL, "api.keysSecretRef", {"name": "tenants"}))
    assert before["Deployment"]["metadata"] == after["Deployment"]["metadata"]
    assert (
        "--api-keys=/etc/outrider/keys"
        in after["Deployment"]["spec"]["template"]["spec"]["containers"][0]["args"]
    )


def test_the_shared_cache_changes_pods_but_not_their_hash() -> None:
    before, after = build(MINIMAL), build(REDIS)
    assert {kind for kind in KINDS if before[kind] != after[kind]} == {"Deployment"}
    assert before["Deployment"]["metadata"] == after["Deployment"]["metadata"]
    (old,), (new,) = (template(spec)["spec"]["containers"] for spec in (MINIMAL, REDIS))
    assert new["args"][: len(old["args"])] == old["args"]
    assert {**new, **{field: old[field] for field in ("args", "startupProbe")}} == old
    assert template(REDIS)["spec"]["volumes"] == template(MINIMAL)["spec"]["volumes"]


@pytest.mark.parametrize("nothing", [{}, {"retention": None}])
def test_a_shared_cache_of_nothing_changes_nothing(nothing: dict[str, Any]) -> None:
    assert build(MINIMAL | {"sharedCache": nothing}) == build(MINIMAL)


def test_secrets_of_the_shared_cache_reach_pods_as_files_that_can_be_rotated() -> None:
    pod = template(SHARED)["spec"]
    (container,) = pod["containers"]
    volumes = {volume["name"]: volume["secret"] for volume in pod["volumes"] if "secret" in volume}
    mounts = {mount["name"]: mount for mount in container["volumeMounts"]}
    assert volumes.keys() == {"shared-cache-auth", "shared-cache-ca"}
    for name, secret in volumes.items():
        assert secret["optional"], "a pod without it serves"
        assert mounts[name]["readOnly"]
        assert "subPath" not in mounts[name]
    assert volumes["shared-cache-ca"]["items"] == [{"key": "root.pem", "path": "ca.crt"}]
    flags = dict(word[2:].split("=", 1) for word in container["args"][2:])
    assert flags["shared-cache-auth"] == mounts["shared-cache-auth"]["mountPath"]
    assert flags["shared-cache-ca"] == mounts["shared-cache-ca"]["mountPath"] + "/ca.crt"
    assert not [variable for variable in container["env"] if "secret" in json.dumps(variable).lower()]


def test_pod_template_carries_neither_arm_hash_nor_role() -> None:
    deployment = build(MINIMAL)["Deployment"]
    own = {"outrider.dev/arm-hash", "outrider.dev/role"}
    assert own <= set(deployment["metadata"]["labels"])
    assert not own & set(deployment["spec"]["template"]["metadata"]["labels"])


def test_service_selects_pods_of_every_pod_hash() -> None:
    labels = template(MINIMAL)["metadata"]["labels"]
    assert build(MINIMAL)["Service"]["spec"]["selector"] == {
        "outrider.dev/model": labels["outrider.dev/model"]
    }


def test_settings_are_mounted_as_a_directory() -> None:
    mounts = template(FULL)["spec"]["containers"][0]["volumeMounts"]
    assert not [mount for mount in mounts if "subPath" in mount]


def test_users_variable_replaces_the_operators() -> None:
    variables = template(FULL)["spec"]["containers"][0]["env"]
    assert [v["value"] for v in variables if v["name"] == "HF_HOME"] == ["/models/cache"]


def test_chat_template_is_safe_from_expansion() -> None:
    variables = {v["name"]: v for v in template(FULL)["spec"]["containers"][0]["env"]}
    assert variables["OUTRIDER_CHAT_TEMPLATE"]["value"] == "{{ messages }} costs $$(HOME) $$5"


def test_pull_policy_of_the_operator_is_the_default() -> None:
    config = OperatorConfig(serving_image="x", image_pull_policy=PullPolicy.NEVER)
    container = build(MINIMAL, config)["Deployment"]["spec"]["template"]["spec"]["containers"][0]
    assert (container["image"], container["imagePullPolicy"]) == ("x", "Never")


def test_grace_leaves_time_to_drain() -> None:
    pod = template(MINIMAL)["spec"]
    flags = dict(argument[2:].split("=", 1) for argument in pod["containers"][0]["args"][2:])
    assert pod["terminationGracePeriodSeconds"] > int(flags["grace-period"]) > int(flags["drain-delay"])


def test_admin_port_is_open_to_the_operator_and_to_nobody_else_unless_told() -> None:
    """A rule without peers would let everyone in, and a selector without labels every namespace."""
    scraped = replace(CONFIG, pod_namespace="ops", monitoring_namespaces=("prometheus", "grafana"))
    for config, namespaces in ((CONFIG, None), (scraped, ["prometheus", "grafana"])):
        spec = build(MINIMAL, config)["NetworkPolicy"]["spec"]
        http, admin = spec["ingress"]
        assert (http["ports"], http["from"]) == ([{"port": 8000, "protocol": "TCP"}], [])
        assert admin["ports"] == [{"port": 9464, "protocol": "TCP"}]
        operator, *others = admin["from"]
        assert operator == {
            "namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": config.pod_namespace}},
            "podSelector": {"matchLabels": {"app.kubernetes.io/name": "outrider-operator"}},
        }
        expressions = [one["namespaceSelector"]["matchExpressions"] for one in others]
        wanted = {"key": "kubernetes.io/metadata.name", "operator": "In", "values": namespaces}
        assert expressions == ([[wanted]] if namespaces else [])
        assert spec["policyTypes"] == ["Ingress"]


def test_network_policy_can_be_left_out() -> None:
    assert set(KINDS) - set(build(MINIMAL, replace(CONFIG, network_policies=False))) == {"NetworkPolicy"}


def test_time_to_load_is_that_of_the_startup_probe_and_of_the_deadline() -> None:
    for seconds, failures in ((1800, 900), (31, 16)):
        deployment = build(changed(MINIMAL, "engine.loadSeconds", seconds))["Deployment"]["spec"]
        probes = deployment["template"]["spec"]["containers"][0]
        startup = probes["startupProbe"]
        assert (startup["httpGet"]["path"], startup["failureThreshold"]) == ("/readyz", failures)
        assert startup["failureThreshold"] * startup["periodSeconds"] >= seconds
        assert probes["livenessProbe"]["httpGet"]["path"] == "/healthz"
        assert deployment["progressDeadlineSeconds"] == seconds + 600


def test_time_to_wait_for_what_others_have_shared_comes_on_top() -> None:
    url = changed(
        changed(MINIMAL, "sharedCache.url", "redis://cache:6379"), "sharedCache.tenantMode", "single"
    )
    for cache, seconds in ((url, 1805), (changed(url, "sharedCache.warmSeconds", 600), 2400)):
        deployment = build(cache)["Deployment"]["spec"]
        startup = deployment["template"]["spec"]["containers"][0]["startupProbe"]
        assert seconds <= startup["failureThreshold"] * startup["periodSeconds"] < seconds + 2
        assert deployment["progressDeadlineSeconds"] == seconds + 600


def test_replacement_changes_how_a_deployment_rolls_and_nothing_else() -> None:
    surge, in_place = build(MINIMAL), build(changed(MINIMAL, "replacement", "inPlace"))
    assert {kind for kind in KINDS if surge[kind] != in_place[kind]} == {"Deployment"}
    rolling = [made["Deployment"]["spec"].pop("strategy")["rollingUpdate"] for made in (surge, in_place)]
    assert rolling == [{"maxSurge": 1, "maxUnavailable": 0}, {"maxSurge": 0, "maxUnavailable": 1}]
    assert surge == in_place


@pytest.mark.parametrize(
    ("source", "argument"),
    [
        ({"hub": {"id": "org/name"}}, "hub:org/name"),
        ({"path": "/models/x"}, "/models/x"),
        ({"package": "weights"}, "package:weights"),
    ],
)
def test_model_argument(source: dict[str, Any], argument: str) -> None:
    volumes = [{"name": "v", "mountPath": "/models", "persistentVolumeClaim": {"claimName": "c"}}]
    spec = {"model": {"source": source}, "engine": {"volumes": volumes}}
    assert template(spec)["spec"]["containers"][0]["args"][:2] == ["serve", argument]
