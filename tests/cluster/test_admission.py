"""What the API server itself accepts and refuses, with the words that a user then reads."""

from __future__ import annotations

import json
import re
import subprocess
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import yaml

from cluster_fixture import LocalCluster
from outrider_local import release
from outrider_local.report import ProblemError
from outrider_operator.children import Owner, children
from outrider_operator.diff import covers
from outrider_operator.spec import SpeculativeModelSpec
from unit.operator.builders import CONFIG, FULL, MINIMAL, SHARED, SIZES, TUNED

Object = dict[str, Any]

REPOSITORY = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((REPOSITORY / "examples").glob("*.yaml"))
PACKAGE = {"source": {"package": "weights"}}
HUB = {"source": {"hub": {"id": "org/name"}}}
VOLUME = {"name": "v", "mountPath": "/models", "persistentVolumeClaim": {"claimName": "c"}}
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}


@pytest.fixture(scope="module")
def api(cluster: LocalCluster) -> LocalCluster:
    """A cluster that has the chart, and so the CustomResourceDefinition."""
    release.install(cluster.settings, cluster, cluster.images)
    return cluster


def model(spec: Object, name: str = "refused") -> Object:
    return {
        "apiVersion": "outrider.dev/v1alpha1",
        "kind": "SpeculativeModel",
        "metadata": {"name": name},
        "spec": {"model": PACKAGE, **spec},
    }


def dry_run(api: LocalCluster, resource: Object) -> Object:
    """What the API server would store."""
    stored = api.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", "-ojson", stdin=json.dumps(resource)
    )
    return dict(json.loads(stored))


def refusal(api: LocalCluster, resource: Object) -> str:
    with pytest.raises(ProblemError) as caught:
        dry_run(api, resource)
    return str(caught.value)


REFUSED: dict[str, tuple[Object, str]] = {
    "no source": (
        {"model": {"source": {}}},
        "spec.model.source: Invalid value: set exactly one of hub, path",
    ),
    "two sources": (
        {"model": {"source": {"package": "a", **HUB["source"]}}},
        "set exactly one of hub, path and package",
    ),
    "no model": ({"model": None}, "spec.model: Required value"),
    "path without a volume": (
        {"model": {"source": {"path": "/models/x"}}},
        "must lie on one of engine.volumes",
    ),
    "a path that is not absolute": (
        {"model": {"source": {"path": "models/x"}}},
        'spec.model.source.path: Invalid value: "models/x": the path must be absolute: begin with /, as in',
    ),
    "a path by a detour": (
        {"model": {"source": {"path": "/models/../etc"}}, "engine": {"volumes": [VOLUME]}},
        'spec.model.source.path: Invalid value: "/models/../etc": each part of the path must be of letters',
    ),
    "path beside the volume": (
        {"model": {"source": {"path": "/models-of-others/x"}}, "engine": {"volumes": [VOLUME]}},
        "model.source.path must lie on one of engine.volumes",
    ),
    "revision of a package": ({"model": {**PACKAGE, "revision": "main"}}, "revision is for a hub source"),
    "unknown dtype": (
        {"model": {**PACKAGE, "dtype": "float8"}},
        'supported values: "auto", "float32", "bfloat16"',
    ),
    "context of nothing": ({"model": {**PACKAGE, "contextLength": 0}}, "greater than or equal to 16"),
    "negative replicas": ({"replicas": -1}, "spec.replicas in body should be greater than or equal to 0"),
    "contradictory depths": (
        {"proposer": {"minDepth": 5, "maxDepth": 2}},
        "minDepth must not exceed maxDepth",
    ),
    "depth above the default limit": (
        {"proposer": {"minDepth": 17}},
        "minDepth must not exceed maxDepth",
    ),
    "a depth of 65": ({"proposer": {"maxDepth": 65}}, "less than or equal to 64"),
    "unknown method": ({"proposer": {"method": "magic"}}, 'supported values: "none", "ngram"'),
    "contradictory matches": (
        {"proposer": {"ngram": {"minMatch": 5}}},
        "ngram.minMatch must not exceed ngram.maxMatch",
    ),
    "two GPUs": (
        {"engine": {"resources": {"limits": {"nvidia.com/gpu": 2}}}},
        "spec.engine.resources.limits: Invalid value: at most one accelerator a pod, written as 0 or 1, but "
        "here are nvidia.com/gpu: 2; a model split over several is not supported",
    ),
    "two GPUs of another make": (
        {"engine": {"resources": {"requests": {"amd.com/gpu": "2"}}}},
        "spec.engine.resources.requests: Invalid value: at most one accelerator a pod, written as 0 or 1, "
        "but here are amd.com/gpu: 2;",
    ),
    "shares of two GPUs": (
        {"engine": {"resources": {"limits": {"nvidia.com/gpu.shared": 2}}}},
        "but here are nvidia.com/gpu.shared: 2;",
    ),
    "two GPUs by their domain": (
        {"engine": {"resources": {"limits": {"gpu.intel.com/i915": "2"}}}},
        "but here are gpu.intel.com/i915: 2;",
    ),
    "a thousandth of a GPU": (
        {"engine": {"resources": {"limits": {"nvidia.com/gpu": "1m"}}}},
        "but here are nvidia.com/gpu: 1m;",
    ),
    "two slices of a GPU": (
        {"engine": {"resources": {"limits": {"nvidia.com/mig-1g.10gb": 2}}}},
        "but here are nvidia.com/mig-1g.10gb: 2;",
    ),
    "eight accelerators of another kind": (
        {"engine": {"resources": {"limits": {"habana.ai/gaudi": 8, "cpu": 4}}}},
        "but here are habana.ai/gaudi: 8;",
    ),
    "less than nothing": (
        {"engine": {"resources": {"requests": {"cpu": -1}}}},
        "spec.engine.resources.requests: Invalid value: an amount must not be negative",
    ),
    "more than the limit": (
        {"engine": {"resources": {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}}}},
        "a request must not exceed its limit",
    ),
    "not a quantity": ({"engine": {"resources": {"limits": {"memory": "8 GB"}}}}, "limits.memory"),
    "a volume on the system": (
        {"engine": {"volumes": [{**VOLUME, "mountPath": "/etc/ssl"}]}},
        "mountPath must not lie in, or hide, a directory of the system",
    ),
    "a volume over the program": (
        {"engine": {"volumes": [{**VOLUME, "mountPath": "/opt"}]}},
        "mountPath must not lie in, or hide, a directory of the system",
    ),
    "a volume on the system by a detour": (
        {"engine": {"volumes": [{**VOLUME, "mountPath": "/x/../etc"}]}},
        'spec.engine.volumes[0].mountPath: Invalid value: "/x/../etc": each part of the path must be of',
    ),
    "a volume of a long name": (
        {"engine": {"volumes": [{**VOLUME, "name": "v" * 51}]}},
        "spec.engine.volumes[0].name: Too long: may not be more than 50",
    ),
    "two volumes at one path": (
        {"engine": {"volumes": [VOLUME, {**VOLUME, "name": "w"}]}},
        "each volume needs a mountPath of its own",
    ),
    "two volumes of one name": (
        {"engine": {"volumes": [VOLUME, {**VOLUME, "mountPath": "/w"}]}},
        "Duplicate value",
    ),
    "a variable with two values": (
        {"engine": {"env": [{"name": "A", "value": "x", "valueFrom": SECRET}]}},
        "set value or valueFrom, not both",
    ),
    "a variable from nowhere": (
        {"engine": {"env": [{"name": "A", "valueFrom": {}}]}},
        "set exactly one of secretKeyRef and configMapKeyRef",
    ),
    "200 KiB of variables": (
        {"engine": {"env": [{"name": f"A{number}", "value": "x" * 3200} for number in range(64)]}},
        "spec.engine.env: Invalid value: the values of engine.env must not be longer than 65536 characters "
        "in all: put long ones into a ConfigMap or Secret and name it by valueFrom, or mount a volume",
    ),
    "one long variable": (
        {"engine": {"env": [{"name": "A", "value": "x" * 4097}]}},
        "spec.engine.env[0].value: Too long: may not be more than 4096",
    ),
    "no time to load": (
        {"engine": {"loadSeconds": 29}},
        "spec.engine.loadSeconds in body should be greater than or equal to 30",
    ),
    "no room in a step": (
        {"engine": {"maxRunning": 0}},
        "spec.engine.maxRunning in body should be greater than or equal to 1",
    ),
    "no queue": (
        {"engine": {"maxWaiting": 0}},
        "spec.engine.maxWaiting in body should be greater than or equal to 1",
    ),
    "fewer tokens than requests in a step": (
        {"engine": {"stepTokens": 31, "maxRunning": 32}},
        "spec.engine: Invalid value: stepTokens must be at least maxRunning",
    ),
    "hardly any memory": (
        {"engine": {"memoryShare": 0.04}},
        "spec.engine.memoryShare in body should be greater than or equal to 0.05",
    ),
    "more memory than there is": (
        {"engine": {"memoryShare": 1.01}},
        "spec.engine.memoryShare in body should be less than or equal to 1",
    ),
    "half a byte for proposers": (
        {"engine": {"proposerMemory": "512m"}},
        'spec.engine.proposerMemory: Invalid value: "512m": proposerMemory must be an amount of bytes from 0 '
        "to 1Ti, such as 512Mi",
    ),
    "less than nothing for proposers": (
        {"engine": {"proposerMemory": -1}},
        "proposerMemory must be an amount of bytes from 0 to 1Ti",
    ),
    "more for proposers than any machine has": (
        {"engine": {"proposerMemory": "1025Gi"}},
        "proposerMemory must be an amount of bytes from 0 to 1Ti",
    ),
    "something else for proposers": (
        {"engine": {"proposerMemory": "8 GB"}},
        "proposerMemory must be an amount of bytes from 0 to 1Ti",
    ),
    "no time for a request": (
        {"requests": {"timeoutSeconds": 0}},
        "spec.requests.timeoutSeconds in body should be greater than 0",
    ),
    "more than a day for a request": (
        {"requests": {"timeoutSeconds": 86401}},
        "spec.requests.timeoutSeconds in body should be less than or equal to 86400",
    ),
    "a limit of requests that does not exist": (
        {"requests": {"timeout": 5}},
        'unknown field "spec.requests.timeout"',
    ),
    "a password in the url": (
        {"sharedCache": {"url": "redis://team:secret@redis", "tenantMode": "single"}},
        "a user or a password does not belong in the url, where everyone reads it who may read the resource: "
        "put them into a Secret, as username and password, and name that in authSecretRef",
    ),
    "a cache of another kind": (
        {"sharedCache": {"url": "memcached://cache", "tenantMode": "single"}},
        "the url must be redis://host:port/database, redis-sentinel://host:port,host:port/service/database",
    ),
    "a port too high for a cache": (
        {"sharedCache": {"url": "redis://redis:65536", "tenantMode": "single"}},
        "the url must be redis://host:port/database",
    ),
    "Sentinels of nothing": (
        {"sharedCache": {"url": "redis-sentinel://a,b", "tenantMode": "single"}},
        "the url must be redis://host:port/database",
    ),
    "a password for no cache": (
        {"sharedCache": {"authSecretRef": {"name": "s"}}},
        "spec.sharedCache: Invalid value: authSecretRef is for a url: without one, pods share nothing",
    ),
    "a CA for no cache": (
        {"sharedCache": {"caSecretRef": {"name": "s"}}},
        "spec.sharedCache: Invalid value: caSecretRef is for a url",
    ),
    "a CA without TLS": (
        {"sharedCache": {"url": "redis://h", "tenantMode": "single", "caSecretRef": {"name": "s"}}},
        "caSecretRef is for a url of TLS: rediss://, rediss-sentinel:// or rediss-cluster://",
    ),
    "a prefix for no cache": ({"sharedCache": {"keyPrefix": "x:"}}, "keyPrefix is for a url"),
    "a prefix that is a pattern": (
        {"sharedCache": {"url": "redis://h", "tenantMode": "single", "keyPrefix": "x*"}},
        "spec.sharedCache.keyPrefix in body should match",
    ),
    "a wait for no cache": ({"sharedCache": {"warmSeconds": 5}}, "warmSeconds is for a url"),
    "a size of no cache": (
        {"sharedCache": {"tenantMode": "single", "retention": {"size": "1Mi"}}},
        "retention.size is for a url",
    ),
    "less than a record": (
        {"sharedCache": {"url": "redis://h", "tenantMode": "single", "retention": {"size": "15Ki"}}},
        "size must be an amount of bytes from 16Ki to 1Ti, such as 64Mi",
    ),
    "half a byte of text": (
        {"sharedCache": {"url": "redis://h", "tenantMode": "single", "retention": {"size": "64m"}}},
        "size must be an amount of bytes from 16Ki to 1Ti, such as 64Mi",
    ),
    "text for a moment": (
        {"sharedCache": {"tenantMode": "single", "retention": {"seconds": 59}}},
        "spec.sharedCache.retention.seconds in body should be greater than or equal to 60",
    ),
    "another kind of tenant": (
        {"sharedCache": {"tenantMode": "team"}},
        'supported values: "key", "single", "header", "request"',
    ),
    "tenants by key without keys": (
        {"sharedCache": {"tenantMode": "key"}},
        "sharedCache.tenantMode key needs api.keysSecretRef: without keys nobody is told apart",
    ),
    "tenants by header from anyone": (
        {"sharedCache": {"tenantMode": "header"}},
        "tenantMode header needs trustedGateways, whose word is taken",
    ),
    "a gateway that has nothing to say": (
        {"sharedCache": {"tenantMode": "single", "trustedGateways": ["10.0.0.0/8"]}},
        "trustedGateways is for tenantMode header",
    ),
    "a gateway by its name": (
        {"sharedCache": {"tenantMode": "header", "trustedGateways": ["gateway.example"]}},
        "trustedGateways must be networks, such as 10.1.0.0/16, or addresses",
    ),
    "a cache that nobody shares": (
        {"sharedCache": {"url": "redis://redis"}},
        "sharedCache.url and sharedCache.retention do nothing where each request sees only its own text: "
        "set api.keysSecretRef, or sharedCache.tenantMode to key, single or header",
    ),
    "retention of nothing": (
        {
            "api": {"keysSecretRef": {"name": "s"}},
            "sharedCache": {"tenantMode": "request", "retention": {"seconds": 60}},
        },
        "do nothing where each request sees only its own text",
    ),
    "another way to replace": (
        {"replacement": "recreate"},
        'spec.replacement: Unsupported value: "recreate": supported values: "surge", "inPlace"',
    ),
    "a Secret of another namespace": (
        {"api": {"keysSecretRef": {"name": "s", "namespace": "other"}}},
        'unknown field "spec.api.keysSecretRef.namespace"',
    ),
    "a Secret of another namespace by its name": (
        {"api": {"keysSecretRef": {"name": "other/s"}}},
        "spec.api.keysSecretRef.name in body should match",
    ),
    "a claim of another namespace": (
        {"engine": {"volumes": [{**VOLUME, "persistentVolumeClaim": {"claimName": "other/c"}}]}},
        "spec.engine.volumes[0].persistentVolumeClaim.claimName in body should match",
    ),
    "a token given twice": (
        {
            "model": {"source": {"hub": {"id": "org/name", "tokenSecretRef": {"name": "s"}}}},
            "engine": {"env": [{"name": "HF_TOKEN", "value": "x"}]},
        },
        "engine.env must not set HF_TOKEN beside model.source.hub.tokenSecretRef",
    ),
    "a template by another way": (
        {"engine": {"env": [{"name": "OUTRIDER_CHAT_TEMPLATE", "value": "x"}]}},
        "use model.chatTemplate",
    ),
    "a toleration of nothing": ({"engine": {"tolerations": [{"value": "x"}]}}, "needs operator Exists"),
    "the reserved workload": ({"workloads": [{"name": "other"}]}, "the name other is reserved for traffic"),
    "a workload twice": ({"workloads": [{"name": "a"}, {"name": "a"}]}, "Duplicate value"),
    "an objective of nothing": (
        {"objective": {"ttftMilliseconds": 5}},
        "spec.objective.tpotMilliseconds: Required",
    ),
    "a port too high": ({"api": {"port": 70000}}, "less than or equal to 65535"),
    "a field that does not exist": ({"flavour": "x"}, 'unknown field "spec.flavour"'),
}


@pytest.mark.parametrize("case", REFUSED)
def test_refused_with_words_that_name_the_field(api: LocalCluster, case: str) -> None:
    spec, words = REFUSED[case]
    assert words in refusal(api, model(spec))


@pytest.mark.parametrize("other", ["amd.com/gpu", "nvidia.com/mig-1g.10gb"])
@pytest.mark.parametrize("field", ["limits", "requests"])
def test_accelerators_of_several_names_are_refused_together(
    api: LocalCluster, field: str, other: str
) -> None:
    amounts = {"nvidia.com/gpu": 1, other: 1, "rdma/hca": 1}
    words = refusal(api, model({"engine": {"resources": {field: amounts}}}))
    (here,) = re.findall(r"but here are (.*?); a model split over several is not supported", words)
    assert sorted(here.split(", ")) == sorted(["nvidia.com/gpu: 1", f"{other}: 1"])  # in any order


def test_a_path_that_is_not_absolute_is_not_told_by_a_regular_expression(api: LocalCluster) -> None:
    volumes = [{**VOLUME, "mountPath": "models"}]
    words = refusal(api, model({"model": {"source": {"path": "models/x"}}, "engine": {"volumes": volumes}}))
    for field in ("spec.model.source.path", "spec.engine.volumes[0].mountPath"):
        assert re.search(rf"{re.escape(field)}: Invalid value: \S+: the path must be absolute", words)
    assert "should match" not in words
    assert "each part of the path" not in words


UNKNOWN = {"api": {"keysSecretRef": {"name": "s", "namespace": "other"}}, "flavour": "x"}


def test_an_unknown_field_is_pruned_with_a_warning_where_the_user_asks_for_no_more(api: LocalCluster) -> None:
    """kubectl refuses unknown fields by itself; a client that does not is told what is left out."""
    asked = ("create", "--dry-run=server", "--validate=warn", "-f", "-", "-ojson")
    done = subprocess.run(
        [api.programs.path("kubectl"), *asked],
        env=api.environment,
        input=json.dumps(model(UNKNOWN)),
        capture_output=True,
        text=True,
        check=True,
    )
    spec = json.loads(done.stdout)["spec"]
    assert spec["api"]["keysSecretRef"] == {"name": "s"}
    assert "flavour" not in spec
    for field in ("spec.api.keysSecretRef.namespace", "spec.flavour"):
        assert f'Warning: unknown field "{field}"' in done.stderr


def test_variables_up_to_their_bound_are_accepted(api: LocalCluster) -> None:
    variables = [{"name": f"A{number}", "value": "é" * 4096} for number in range(16)]
    variables.append({"name": "B", "valueFrom": SECRET})
    spec = dry_run(api, model({"engine": {"env": variables}}))["spec"]
    assert len(spec["engine"]["env"]) == 17


@pytest.mark.parametrize(
    ("name", "words"),
    [
        ("a" * 38, "metadata.name must be at most 37 characters long"),
        ("1a", "metadata.name must begin with a letter"),
        ("a.b", "metadata.name must begin with a letter and hold only lower-case letters, digits and '-'"),
    ],
)
def test_a_name_that_its_children_cannot_take(api: LocalCluster, name: str, words: str) -> None:
    assert words in refusal(api, model({}, name))


def test_the_longest_name_is_accepted(api: LocalCluster) -> None:
    assert dry_run(api, model({}, "a" * 37))["metadata"]["name"] == "a" * 37


def test_defaults_are_filled_in(api: LocalCluster) -> None:
    spec = dry_run(api, model({"proposer": {"ngram": {}}}))["spec"]
    assert spec["proposer"] == {
        "method": "ngram",
        "minDepth": 1,
        "maxDepth": 16,
        "ngram": {"minMatch": 1, "maxMatch": 4},
    }
    assert (spec["replicas"], spec["replacement"]) == (1, "surge")
    assert spec["engine"] == {"resources": {}, "loadSeconds": 1800}
    assert spec["api"] == {"port": 8000}
    assert spec["requests"] == {"speculationOverride": True}
    assert spec["model"]["dtype"] == "auto"


def test_a_request_within_its_limit_is_accepted(api: LocalCluster) -> None:
    amounts = {"limits": {"cpu": 2, "memory": "1Gi", "nvidia.com/gpu": "1"}, "requests": {"cpu": "1999m"}}
    spec = dry_run(api, model({"engine": {"resources": amounts}}))["spec"]
    assert spec["engine"]["resources"] == amounts


@pytest.mark.parametrize("accelerator", ["nvidia.com/gpu", "nvidia.com/mig-1g.10gb", "habana.ai/gaudi"])
def test_one_accelerator_beside_what_is_none_is_accepted(api: LocalCluster, accelerator: str) -> None:
    limits = {accelerator: 1, "amd.com/gpu": "0", "cpu": 8, "hugepages-2Mi": "1Gi", "memory": "8Gi"}
    limits |= {"rdma/hca_shared_devices": 2, "nvidia.com/hostdev": 2, "xilinx.com/fpga": "2"}
    limits |= {f"example.com/device-{number}": 1 for number in range(8)}
    amounts = {"limits": limits, "requests": limits}
    assert len(limits) == 16
    assert dry_run(api, model({"engine": {"resources": amounts}}))["spec"]["engine"]["resources"] == amounts


@pytest.mark.parametrize(
    "sizes",
    [
        SIZES,
        {"stepTokens": 32, "maxRunning": 32},
        {"stepTokens": 8},
        {"memoryShare": 1},
        {"memoryShare": 0.05},
        {"proposerMemory": 0},
        {"proposerMemory": 1 << 29},
        {"proposerMemory": "1Ti"},
    ],
    ids=str,
)
def test_sizes_of_the_engine_are_stored_as_they_are_given(api: LocalCluster, sizes: Object) -> None:
    spec = dry_run(api, model({"engine": sizes}))["spec"]
    assert spec["engine"] == {"resources": {}, "loadSeconds": 1800, **sizes}
    assert SpeculativeModelSpec.model_validate(spec)


@pytest.mark.parametrize(
    ("cache", "stored"),
    [
        (SHARED["sharedCache"], SHARED["sharedCache"]),
        (
            {"url": "rediss://r", "tenantMode": "single", "caSecretRef": {"name": "s"}, "retention": {}},
            {"caSecretRef": {"name": "s", "key": "ca.crt"}},
        ),
        ({"url": "redis-cluster://10.0.0.1:7000,10.0.0.2:7001", "tenantMode": "single"}, {}),
        ({"url": "redis://[fd00::1]:6379/15", "tenantMode": "single", "retention": {"size": 16_384}}, {}),
        ({"tenantMode": "header", "trustedGateways": ["10.0.0.1", "::1", "fd00::/8", "0.0.0.0/0"]}, {}),
        ({"tenantMode": "request"}, {}),
    ],
    ids=str,
)
def test_a_shared_cache_is_stored_as_it_is_given(api: LocalCluster, cache: Object, stored: Object) -> None:
    spec = dry_run(api, model({"sharedCache": cache}))["spec"]
    assert spec["sharedCache"] == cache | stored
    assert SpeculativeModelSpec.model_validate(spec)


@pytest.mark.parametrize("seconds", [0.5, 86_400])
def test_limits_of_requests_are_stored_as_they_are_given(api: LocalCluster, seconds: float) -> None:
    spec = dry_run(api, model({"requests": {"timeoutSeconds": seconds}}))["spec"]
    assert spec["requests"] == {"timeoutSeconds": seconds, "speculationOverride": True}


@pytest.mark.parametrize("spec", [MINIMAL, FULL, TUNED, SHARED], ids=["minimal", "full", "tuned", "shared"])
def test_children_are_stored_as_they_are_wanted(api: LocalCluster, spec: Object) -> None:
    """Else the operator would write them again at every look."""
    owner = Owner(name="m", namespace="default", uid="uid-1")
    config = replace(CONFIG, monitoring_namespaces=("monitoring",))
    for child in children(owner, SpeculativeModelSpec.model_validate(spec), config, 1):
        asked = ("apply", "--server-side", "--dry-run=server", "--validate=strict", "-f", "-", "-ojson")
        stored = json.loads(api.kubectl(*asked, stdin=json.dumps(child)))
        assert covers(stored, child), child["kind"]


@pytest.mark.parametrize("example", EXAMPLES, ids=lambda path: path.name)
def test_examples_are_accepted(api: LocalCluster, example: Path) -> None:
    documents = [document for document in yaml.safe_load_all(example.read_text()) if document]
    for document in documents:
        assert dry_run(api, document)["metadata"]["name"] == document["metadata"]["name"]


def test_it_explains_itself_by_its_short_name(api: LocalCluster) -> None:
    assert "exactly one of hub, path and package" in api.kubectl("explain", "specm.spec.model.source")


def test_the_chart_for_some_namespaces_asks_for_no_cluster_wide_right(api: LocalCluster) -> None:
    chart = str(REPOSITORY / "charts" / "outrider")
    rendered = api.helm("template", "x", chart, "--kube-version=1.36.0", "--set=watchNamespaces={default}")
    kinds = {document["kind"] for document in yaml.safe_load_all(rendered) if document}
    assert {"Role", "RoleBinding"} <= kinds
    assert not {"ClusterRole", "ClusterRoleBinding"} & kinds
    objects = [d for d in yaml.safe_load_all(rendered) if d and d["kind"] != "CustomResourceDefinition"]
    listed = {"apiVersion": "v1", "kind": "List", "items": objects}
    assert "created" in api.kubectl(
        "create", "--dry-run=server", "--validate=strict", "-f", "-", stdin=json.dumps(listed)
    )


def rendered_chart(api: LocalCluster, *flags: str) -> list[Object]:
    chart = str(REPOSITORY / "charts" / "outrider")
    text = api.helm("template", "123", chart, "--namespace=456", "--kube-version=1.36.0", *flags)
    return [document for document in yaml.safe_load_all(text) if document]


@pytest.mark.parametrize("flags", [(), ("--set-string=watchNamespaces={789}",)])
def test_the_chart_takes_names_that_look_like_numbers(api: LocalCluster, flags: tuple[str, ...]) -> None:
    for document in rendered_chart(api, *flags):
        metadata = document["metadata"]
        names = [metadata["name"], metadata.get("namespace", ""), *metadata["labels"].values()]
        names += [subject["namespace"] for subject in document.get("subjects", ())]
        assert {type(name) for name in names} == {str}, document["kind"]


@pytest.mark.parametrize("part", ["operator", "serving", "crds", "serving.imagePullPolicy"])
def test_the_chart_says_which_value_is_missing(api: LocalCluster, part: str) -> None:
    with pytest.raises(ProblemError, match=f"missing property '{part.rpartition('.')[2]}'"):
        rendered_chart(api, f"--set={part}=null")
