"""What the chart renders, by the real helm: golden output, rights, pod security, and refused values.

OUTRIDER_UPDATE_GOLDEN=1 writes the golden files. The CustomResourceDefinition is long and generated; its part
is compared with the file in crds/.
"""

from __future__ import annotations

import json
import os
import re
import subprocess
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
import yaml

from outrider_local import gobuild
from outrider_local.settings import from_environment

Object = dict[str, Any]

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
CHART = REPOSITORY / "charts" / "outrider"
VALUES = (CHART / "values.yaml").read_text()
SCHEMA = json.loads((CHART / "values.schema.json").read_text())
CRD = REPOSITORY / "crds" / "outrider.dev_speculativemodels.yaml"
GOLDEN = HERE / "golden"
CASES = sorted(path.stem for path in (HERE / "values").glob("*.yaml"))
RECOMMENDED = {
    *(f"app.kubernetes.io/{name}" for name in ("name", "instance", "component", "part-of", "version")),
    "app.kubernetes.io/managed-by",
    "helm.sh/chart",
}
UNVERSIONED = RECOMMENDED - {"app.kubernetes.io/version", "helm.sh/chart"}
CRD_SOURCE = "# Source: outrider/templates/crd.yaml"
MADE = re.compile(r'(password|users\.acl|outrider\.dev/redis-config): "[^"]+"')
"""What holds a password that is made anew at each rendering."""


def helm(*words: str) -> subprocess.CompletedProcess[str]:
    settings = from_environment(os.environ)
    programs = gobuild.programs(settings.checkout, settings.cache)
    if "helm" in {module.name for module in programs.missing}:
        pytest.fail("helm is not here: run `make test`, or python3 -m outrider_local ready")
    return subprocess.run(
        [str(programs.path("helm")), *words], capture_output=True, text=True, check=False, cwd=REPOSITORY
    )


def template(*words: str, name: str = "outrider", namespace: str = "outrider-system") -> str:
    done = helm("template", name, str(CHART), f"--namespace={namespace}", *words)
    assert done.returncode == 0, done.stderr
    return done.stdout


def rendered(case: str) -> str:
    return template(f"--values={HERE / 'values' / case}.yaml")


def documents(text: str) -> list[Object]:
    return [document for document in yaml.safe_load_all(text) if document]


def one(text: str, kind: str, name: str = "") -> Object:
    (found,) = (
        each for each in documents(text) if each["kind"] == kind and name in ("", each["metadata"]["name"])
    )
    return dict(found)


def arguments(text: str) -> dict[str, str]:
    (container,) = one(text, "Deployment")["spec"]["template"]["spec"]["containers"]
    return dict(argument.removeprefix("--").split("=", 1) for argument in container["args"])


@pytest.fixture(scope="module", params=CASES)
def case(request: pytest.FixtureRequest) -> tuple[str, str]:
    """Name of a values file, and what helm renders by it."""
    return request.param, rendered(request.param)


class TestGolden:
    def test_all_but_the_definition(self, case: tuple[str, str]) -> None:
        name, text = case
        parts = re.split(r"^---\n", text, flags=re.MULTILINE)
        shown = "---\n".join(part for part in parts if not part.startswith(CRD_SOURCE))
        shown = MADE.sub(r'\1: "MADE"', shown)
        golden = GOLDEN / f"{name}.yaml"
        if os.environ.get("OUTRIDER_UPDATE_GOLDEN") == "1":
            golden.write_text(shown)
        assert shown == golden.read_text()

    def test_the_definition_is_that_of_the_file(self, case: tuple[str, str]) -> None:
        name, text = case
        found = [each for each in documents(text) if each["kind"] == "CustomResourceDefinition"]
        if name == "no-crds":
            assert found == []
            return
        wanted = yaml.safe_load(CRD.read_text())
        (crd,) = found
        assert crd["spec"] == wanted["spec"]
        assert crd["metadata"]["name"] == wanted["metadata"]["name"]
        assert crd["metadata"]["annotations"] == {"helm.sh/resource-policy": "keep"}


class TestEveryObject:
    def test_labels_are_complete(self, case: tuple[str, str]) -> None:
        for found in labelled(documents(case[1])):
            # A pod of Redis that carried a version would be replaced with each upgrade, by an empty one.
            is_redis_pod = "outrider.dev/redis-config" in found.get("annotations", {})
            assert set(found["labels"]) >= (UNVERSIONED if is_redis_pod else RECOMMENDED), found
            assert all(
                re.fullmatch(r"[A-Za-z0-9]([-A-Za-z0-9_.]*[A-Za-z0-9])?", v) for v in found["labels"].values()
            )

    def test_names_fit_for_the_longest_release_name(self) -> None:
        flags = ("--set=metrics.serviceMonitor.enabled=true", "--set=redis.enabled=true")
        text = template(*flags, name="r" * 53, namespace="n" * 63)
        limits = {"Service": 63, "Deployment": 63}
        for each in documents(text):
            assert len(each["metadata"]["name"]) <= limits.get(each["kind"], 253)
        services = [each["metadata"]["name"] for each in documents(text) if each["kind"] == "Service"]
        assert sorted(name.rpartition("-")[2] for name in services) == ["metrics", "redis"]

    def test_pods_fit_the_restricted_standard(self, case: tuple[str, str]) -> None:
        templates = [
            each["spec"]["template"] for each in documents(case[1]) if "template" in each.get("spec", {})
        ]
        assert templates
        assert [problem for pod in templates for problem in unrestricted(pod["spec"])] == []

    def test_rights_are_named_one_by_one(self, case: tuple[str, str]) -> None:
        roles = [each for each in documents(case[1]) if each["kind"] in ("Role", "ClusterRole")]
        assert roles
        for rule in (rule for role in roles for rule in role["rules"]):
            assert set(rule) <= {"apiGroups", "resources", "verbs", "resourceNames"}
            for values in rule.values():
                assert values
                assert "*" not in "".join(values)
            assert not {"escalate", "bind", "impersonate", "deletecollection"} & set(rule["verbs"])

    def test_every_role_is_bound_to_the_operator_alone(self, case: tuple[str, str]) -> None:
        found = documents(case[1])
        account = one(case[1], "ServiceAccount")["metadata"]
        subject = {"kind": "ServiceAccount", "name": account["name"], "namespace": account["namespace"]}
        roles = {key(each) for each in found if each["kind"] in ("Role", "ClusterRole")}
        bindings = [each for each in found if each["kind"].endswith("RoleBinding")]
        assert {
            (each["roleRef"]["kind"], each["metadata"].get("namespace"), each["roleRef"]["name"])
            for each in bindings
        } == roles
        assert all(each["subjects"] == [subject] for each in bindings)

    def test_services_and_policies_select_the_pods_of_one_deployment(self, case: tuple[str, str]) -> None:
        pods = {
            each["metadata"]["name"]: each["spec"]["template"]["metadata"]["labels"].items()
            for each in documents(case[1])
            if each["kind"] == "Deployment"
        }
        for each in documents(case[1]):
            if each["kind"] in ("Service", "NetworkPolicy"):
                spec = each["spec"]
                selector = spec["selector"] if "selector" in spec else spec["podSelector"]["matchLabels"]
                (selected,) = (name for name, labels in pods.items() if selector.items() <= labels)
                assert selected.rpartition("-")[0] == "outrider"
                assert ("redis" in each["metadata"]["name"]) == ("redis" in selected)
            elif each["kind"] == "ServiceMonitor":
                service = one(case[1], "Service")["metadata"]["labels"].items()
                assert each["spec"]["selector"]["matchLabels"].items() <= service


def key(found: Object) -> tuple[str, str | None, str]:
    metadata = found["metadata"]
    return found["kind"], metadata.get("namespace"), metadata["name"]


def labelled(found: list[Object]) -> Iterator[Object]:
    """The metadata of each object and pod template."""
    for each in found:
        yield each["metadata"]
        if "template" in each.get("spec", {}):
            yield each["spec"]["template"]["metadata"]


def unrestricted(pod: Object) -> Iterator[str]:
    """What the `restricted` Pod Security Standard of Kubernetes 1.30 and later would refuse."""
    volumes = {
        "configMap",
        "csi",
        "downwardAPI",
        "emptyDir",
        "ephemeral",
        "persistentVolumeClaim",
        "projected",
        "secret",
    }
    context = pod.get("securityContext", {})
    for field in ("hostNetwork", "hostPID", "hostIPC"):
        if pod.get(field):
            yield field
    for volume in pod.get("volumes", ()):
        if not set(volume) - {"name"} <= volumes:
            yield f"volume {volume}"
    for container in (*pod["containers"], *pod.get("initContainers", ())):
        own = container.get("securityContext", {})
        both = {**context, **own}
        if both.get("runAsNonRoot") is not True or both.get("runAsUser") == 0:
            yield "runs as root"
        if both.get("seccompProfile", {}).get("type") not in ("RuntimeDefault", "Localhost"):
            yield "seccompProfile"
        if own.get("allowPrivilegeEscalation") is not False or own.get("privileged"):
            yield "privileges"
        capabilities = own.get("capabilities", {})
        if "ALL" not in capabilities.get("drop", ()) or set(capabilities.get("add", ())) - {
            "NET_BIND_SERVICE"
        }:
            yield "capabilities"
        if any("hostPort" in port for port in container.get("ports", ())):
            yield "hostPort"


class TestValues:
    def test_the_operator_is_told(self) -> None:
        assert arguments(rendered("everything")) == {
            "serving-image": "registry.example/outrider/serving:1.2.3",
            "image-pull-policy": "Always",
            "namespaces": "",
            "resync-seconds": "7.5",
            "log-format": "text",
            "listen": "0.0.0.0:8080",
            "pod-namespace": "$(POD_NAMESPACE)",
            "pod-name": "$(POD_NAME)",
            "lease-name": "outrider-operator",
            "lease-seconds": "30",
            "network-policies": "true",
            "monitoring-namespaces": "monitoring,other-monitoring",
        }
        told = arguments(rendered("namespaces"))
        assert (told["namespaces"], told["network-policies"]) == ("team-a,team-b", "false")
        assert arguments(rendered("no-crds"))["monitoring-namespaces"] == ""

    def test_the_lease_is_the_one_that_the_role_names(self) -> None:
        text = template(name="other")
        role = one(text, "Role", "other-outrider-operator-lease")
        assert role["rules"][1]["resourceNames"] == [arguments(text)["lease-name"]]

    def test_listed_namespaces_get_roles_and_the_cluster_none(self) -> None:
        found = documents(rendered("namespaces"))
        roles = {each["metadata"]["namespace"]: each["rules"] for each in found if each["kind"] == "Role"}
        assert not [each for each in found if each["kind"].startswith("ClusterRole")]
        assert set(roles) == {"team-a", "team-b", "outrider-system"}
        (cluster_wide,) = (each for each in documents(rendered("defaults")) if each["kind"] == "ClusterRole")
        assert roles["team-a"] == roles["team-b"] == cluster_wide["rules"]

    def test_nobody_may_reach_the_operator_when_no_namespace_is_named(self) -> None:
        policy = one(rendered("no-crds"), "NetworkPolicy")["spec"]
        assert (policy["policyTypes"], policy["ingress"]) == (["Ingress"], [])

    def test_standbys_are_spread_unless_the_user_says_otherwise(self) -> None:
        def affinity(text: str) -> Any:
            return one(text, "Deployment")["spec"]["template"]["spec"].get("affinity")

        assert affinity(rendered("defaults")) is None
        assert set(affinity(rendered("everything"))) == {"podAntiAffinity"}
        assert set(affinity(rendered("no-crds"))) == {"nodeAffinity"}


NAMESPACE = "does not match pattern '^[a-z0-9]([-a-z0-9]*[a-z0-9])?$'"


class TestSchema:
    @pytest.mark.parametrize(
        ("setting", "words"),
        [
            (
                "operator.imagePullPolicy=Sometimes",
                "'/operator/imagePullPolicy': value must be one of 'Always', 'IfNotPresent', 'Never'",
            ),
            ("operator.logFormat=xml", "'/operator/logFormat': value must be one of 'json', 'text'"),
            ("operator.replica=1", "'/operator': additional properties 'replica' not allowed"),
            ("operators.replicas=1", "'': additional properties 'operators' not allowed"),
            ("operator.replicas=-1", "'/operator/replicas': minimum: got -1, want 0"),
            ("operator.replicas=one", "'/operator/replicas': got string, want integer"),
            ("operator.resyncSeconds=0", "'/operator/resyncSeconds': minimum: got 0, want 1"),
            ("operator.leaseSeconds=5", "'/operator/leaseSeconds': minimum: got 5, want 6"),
            ("operator.image=a b", "'/operator/image': 'a b' does not match pattern"),
            (
                "operator.resources.request.cpu=1",
                "'/operator/resources': additional properties 'request' not allowed",
            ),
            ("watchNamespaces={Team-A}", f"'/watchNamespaces/0': 'Team-A' {NAMESPACE}"),
            ("watchNamespaces={a,a}", "'/watchNamespaces': items at 0 and 1 are equal"),
            ("monitoring.namespaces={a/b}", f"'/monitoring/namespaces/0': 'a/b' {NAMESPACE}"),
            ("redis.image=", "'/redis/image': minLength: got 0, want 1"),
            ("redis.maxMemory=256mb", "'/redis/maxMemory': '256mb' does not match pattern"),
            ("redis.persistence.size=big", "'/redis/persistence/size': 'big' does not match pattern"),
            ("redis.password=x", "'/redis': additional properties 'password' not allowed"),
            ("crds.install=perhaps", "'/crds/install': got string, want boolean"),
            ("metrics.serviceMonitor.interval=soon", "'/metrics/serviceMonitor/interval': 'soon' does not"),
            (
                r"podLabels.app\.kubernetes\.io/name=mine",
                "'/podLabels/app.kubernetes.io~1name': false schema",
            ),
            (
                "affinity.podAntiAfinity.x=1",
                "'/affinity': additional properties 'podAntiAfinity' not allowed",
            ),
        ],
    )
    def test_a_bad_value_is_refused_by_name(self, setting: str, words: str) -> None:
        done = helm("template", "outrider", str(CHART), f"--set={setting}")
        assert done.returncode != 0
        assert f"at {words}" in done.stderr

    def test_it_is_strict_wherever_kubernetes_does_not_check_itself(self) -> None:
        """Helm hands `global` to every chart."""
        assert set(open_objects(SCHEMA, "")) == {"global", "nodeAffinity", "podAffinity", "podAntiAffinity"}

    def test_every_value_is_there_to_be_read(self) -> None:
        missing = set(value_paths(SCHEMA)) - set(defaults(yaml.safe_load(VALUES)))
        assert {path for path in missing if path[0] not in ("global", "affinity")} == set()

    def test_every_value_is_described(self) -> None:
        lines = VALUES.splitlines()
        plain = [
            line
            for before, line in pairwise(lines)
            if re.match(r" *[A-Za-z]+: *\S", line) and not before.lstrip().startswith("#")
        ]
        assert [line.split(":")[0].strip() for line in plain] == [
            *("cpu", "memory", "memory"),
            *("cpu", "memory", "memory"),
            "tolerations",
        ]


def resolved(schema: Object) -> Object:
    reference = schema.get("$ref", "").removeprefix("#/definitions/")
    return dict(SCHEMA["definitions"][reference]) if reference else schema


def open_objects(schema: Any, name: str) -> Iterator[str]:
    """Names of the objects in a schema that take any property."""
    if not isinstance(schema, dict):
        return
    if schema.get("type") == "object" and "additionalProperties" not in schema:
        yield name
    for key_, each in {**schema.get("properties", {}), **schema.get("definitions", {})}.items():
        yield from open_objects(each, key_)
    yield from open_objects(schema.get("items"), name)


def value_paths(schema: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the properties of a schema, those of list items aside."""
    for name, each in resolved(schema).get("properties", {}).items():
        yield (*path, name)
        yield from value_paths(each, (*path, name))


def defaults(values: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Paths of the chart's own values."""
    for name, each in values.items():
        yield (*path, name)
        if isinstance(each, dict):
            yield from defaults(each, (*path, name))
