"""What is refused, naming the field. The API server refuses the same by the rules of the CRD."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import ValidationError

from outrider_operator.names import served_name
from outrider_operator.spec import SpeculativeModelSpec
from unit.operator.builders import FULL, MINIMAL, REDIS, SHARED, TUNED, changed

VOLUME = {"name": "v", "mountPath": "/models", "persistentVolumeClaim": {"claimName": "c"}}
SECRET = {"secretKeyRef": {"name": "s", "key": "k"}}

ACCELERATORS = [
    "nvidia.com/gpu",
    "nvidia.com/mig-1g.10gb",
    "nvidia.com/GPU",
    "amd.com/gpu",
    "amd.com/cpx_nps4",
    "gpu.intel.com/xe",
    "npu.intel.com/accel",
    "habana.ai/gaudi",
    "google.com/tpu",
    "cloud-tpus.google.com/v3",
    "aws.amazon.com/neuroncore",
    "huawei.com/Ascend910",
    "huawei.com/npu",
    "qualcomm.com/qaic",
    "volcano.sh/vgpu-number",
    "tencent.com/vcuda-core",
    "hygon.com/dcunum",
    "cambricon.com/vmlu",
    "enflame.com/gcu",
    "kunlunxin.com/xpu",
    "furiosa.ai/rngd",
    "rebellions.ai/ATOM",
    "tenstorrent.com/n300",
    "deviceclass.resource.kubernetes.io/mig.nvidia.com",
]
NO_ACCELERATORS: dict[str, Any] = {
    "cpu": 8,
    "memory": "8Gi",
    "ephemeral-storage": "2Gi",
    "hugepages-2Mi": "2Gi",
    "rdma/hca_shared_devices": 2,
    "nvidia.com/hostdev": 2,
    "nvidia.com/sriov_input": 2,
    "intel.com/intel_sriov_output": 2,
    "smarter-devices/fuse": 4,
    "sgx.intel.com/epc": 4096,
    "xilinx.com/fpga-xilinx_u200": 2,
}
"""Amounts of what is no accelerator."""

MANY_ACCELERATORS: list[dict[str, Any]] = [
    {"nvidia.com/gpu": 2},
    {"nvidia.com/gpu": "1000m"},
    {"nvidia.com/gpu": 1, "amd.com/gpu": 1},
    {"nvidia.com/gpu": 1, "nvidia.com/mig-1g.10gb": 1},
    {"nvidia.com/mig-1g.10gb": 2},
    {"nvidia.com/mig-1g.10gb": 1, "cpu": 4, "nvidia.com/mig-2g.20gb": "1"},
    {"habana.ai/gaudi": 8},
    {"rdma/hca_shared_devices": 1, "google.com/tpu": "4"},
    {"tencent.com/vcuda-core": "0.5"},
]

REFUSED: list[tuple[str, object, str]] = [
    ("model.source", {}, "exactly one of hub, path and package"),
    ("model.source", {"package": "a", "hub": {"id": "b/c"}}, "exactly one of hub, path and package"),
    ("model.source", {"path": "/models/x"}, "lies on none of engine.volumes"),
    ("model.source", {"path": "models/x"}, "the path must be absolute: begin with /, as in /models/gemma"),
    ("model.source", {"path": "./models"}, "the path must be absolute"),
    ("model.source", {"path": "/"}, "at least 2 characters"),
    ("model.source", {"hub": {"id": "../etc"}}, "should match pattern"),
    ("model.source", {"package": "a b"}, "should match pattern"),
    ("model.revision", "main", "revision is for a hub source"),
    ("model.dtype", "float8", "'auto', 'float32', 'bfloat16' or 'float16'"),
    ("model.contextLength", 1, "greater than or equal to 16"),
    ("model.chatTemplate", "x" * 32_001, "at most 32000 characters"),
    ("model.flavour", "x", "Extra inputs are not permitted"),
    ("replicas", -1, "greater than or equal to 0"),
    ("proposer", {"minDepth": 5, "maxDepth": 2}, "minDepth (5) must not exceed maxDepth (2)"),
    ("proposer", {"maxDepth": 65}, "less than or equal to 64"),
    ("proposer", {"ngram": {"minMatch": 5, "maxMatch": 2}}, "minMatch (5) must not exceed maxMatch (2)"),
    ("workloads", [{"name": "other"}], "reserved"),
    ("workloads", [{"name": "a"}, {"name": "a"}], "distinct names"),
    ("workloads", [{"name": "a"}] * 65, "at most 64 items"),
    ("objective", {"ttftMilliseconds": 0, "tpotMilliseconds": 1}, "greater than or equal to 1"),
    ("api.port", 65_536, "less than or equal to 65535"),
    ("engine.resources", {"limits": {"cpu": -1}}, "should match pattern"),
    (
        "engine.resources",
        {"requests": {"cpu": "1500m"}, "limits": {"cpu": 1}},
        "cpu: the request 1500m exceeds the limit 1",
    ),
    ("engine.resources", {"limits": {"memory": "8 GB"}}, "should match pattern"),
    ("engine.volumes", [VOLUME | {"mountPath": "/etc/models"}], "a directory of the system"),
    ("engine.volumes", [VOLUME | {"mountPath": "/opt/outrider/app"}], "a directory of the system"),
    ("engine.volumes", [VOLUME | {"mountPath": "/opt"}], "hides, a directory of the system"),
    ("engine.volumes", [VOLUME | {"mountPath": "/var"}], "a directory of the system"),
    ("engine.volumes", [VOLUME | {"mountPath": "/x/../etc"}], "be neither . nor .."),
    ("engine.volumes", [VOLUME | {"mountPath": "/.."}], "be neither . nor .."),
    ("engine.volumes", [VOLUME | {"mountPath": "/x/."}], "be neither . nor .."),
    ("engine.volumes", [VOLUME | {"name": "v" * 51}], "at most 50 characters"),
    ("engine.volumes", [VOLUME | {"mountPath": "models"}], "the path must be absolute"),
    ("engine.volumes", [VOLUME | {"mountPath": "/models/"}], "and follow one /"),
    ("engine.volumes", [VOLUME | {"mountPath": "/models\n"}], "each part of the path must be of letters"),
    ("model.source", {"path": "/models/../etc"}, "each part of the path must be of letters"),
    ("model.source", {"path": "/models//x"}, "and follow one /"),
    ("engine.volumes", [VOLUME, VOLUME | {"name": "w"}], "mountPaths must be distinct"),
    ("engine.volumes", [VOLUME, VOLUME | {"mountPath": "/w"}], "volume names must be distinct"),
    ("engine.env", [{"name": "A"}, {"name": "A"}], "env names must be distinct"),
    (
        "proposer.suffix",
        {"scopes": ["history", "history"]},
        "scopes must be distinct (more than once: history)",
    ),
    ("engine.env", [{"name": "1A"}], "should match pattern"),
    ("engine.env", [{"name": "A", "value": "x", "valueFrom": SECRET}], "value or valueFrom, not both"),
    ("engine.env", [{"name": "A", "valueFrom": {}}], "exactly one of secretKeyRef and configMapKeyRef"),
    ("engine.env", [{"name": "OUTRIDER_CHAT_TEMPLATE", "value": "x"}], "use model.chatTemplate"),
    (
        "engine.env",
        [{"name": f"A{n}", "value": "é" * 4096} for n in range(17)],
        "engine.env must not be longer than 65536 characters in all: put long ones into a ConfigMap or "
        "Secret and name it by valueFrom, or mount a volume (they have 69632)",
    ),
    ("engine.loadSeconds", 29, "greater than or equal to 30"),
    ("engine.loadSeconds", 86_401, "less than or equal to 86400"),
    ("engine.maxRunning", 0, "greater than or equal to 1"),
    ("engine.maxRunning", 65_537, "less than or equal to 65536"),
    ("engine.maxWaiting", 0, "greater than or equal to 1"),
    ("engine.maxWaiting", 1_000_001, "less than or equal to 1000000"),
    ("engine.stepTokens", 0, "greater than or equal to 1"),
    ("engine.stepTokens", 16_777_217, "less than or equal to 16777216"),
    ("engine.stepTokens", 1.5, "a valid integer"),
    (
        "engine",
        {"stepTokens": 31, "maxRunning": 32},
        "each request takes a token in every step (they are 31 and 32)",
    ),
    ("engine.memoryShare", 0.04, "greater than or equal to 0.05"),
    ("engine.memoryShare", 1.01, "less than or equal to 1"),
    ("engine.memoryShare", "90%", "a valid number"),
    ("engine.proposerMemory", -1, "should match pattern"),
    ("engine.proposerMemory", "8 GB", "should match pattern"),
    ("engine.proposerMemory", "512m", "from 0 to 1Ti, such as 512Mi (it is 512m)"),
    ("engine.proposerMemory", "1025Gi", "from 0 to 1Ti, such as 512Mi (it is 1025Gi)"),
    ("engine.proposerMemory", 2**40 + 1, "from 0 to 1Ti, such as 512Mi (it is 1099511627777)"),
    ("engine.pageSize", 16, "Extra inputs are not permitted"),
    ("requests", {"timeoutSeconds": 0}, "greater than 0"),
    ("requests", {"timeoutSeconds": 86_401}, "less than or equal to 86400"),
    ("requests", {"timeoutSeconds": "a day"}, "a valid number"),
    ("requests", {"speculationOverride": "perhaps"}, "a valid boolean"),
    ("requests", {"timeout": 5}, "Extra inputs are not permitted"),
    ("replacement", "recreate", "'surge' or 'inPlace'"),
    ("api.keysSecretRef", {"name": "s", "namespace": "other"}, "Extra inputs are not permitted"),
    ("api.keysSecretRef", {"name": "other/s"}, "should match pattern"),
    ("engine.tolerations", [{"value": "x"}], "without a key needs operator Exists"),
]


@pytest.mark.parametrize(("field", "value", "message"), REFUSED)
def test_refused(field: str, value: object, message: str) -> None:
    with pytest.raises(ValidationError) as caught:
        SpeculativeModelSpec.model_validate(changed(MINIMAL, field, value))
    assert message in str(caught.value)


@pytest.mark.parametrize("field", ["limits", "requests"])
@pytest.mark.parametrize("amounts", MANY_ACCELERATORS, ids=str)
def test_more_than_one_accelerator_is_refused_over_all_names(field: str, amounts: dict[str, Any]) -> None:
    counted = {key: amount for key, amount in amounts.items() if key not in NO_ACCELERATORS}
    here = ", ".join(f"{key}: {amount}" for key, amount in counted.items())
    with pytest.raises(ValidationError) as caught:
        SpeculativeModelSpec.model_validate(changed(MINIMAL, "engine.resources", {field: amounts}))
    assert (
        f"{field}: at most one accelerator a pod, written as 0 or 1, but here are {here}; "
        "a model split over several is not supported"
    ) in str(caught.value)


@pytest.mark.parametrize("accelerator", ACCELERATORS)
def test_one_accelerator_beside_what_is_none_is_accepted(accelerator: str) -> None:
    amounts = {**NO_ACCELERATORS, accelerator: 1, "nvidia.com/gpu.shared": 0}
    spec = changed(MINIMAL, "engine.resources", {"limits": amounts, "requests": {accelerator: "1"}})
    assert SpeculativeModelSpec.model_validate(spec).engine.resources.limits == {
        key: str(amount) for key, amount in amounts.items()
    }
    twice = changed(MINIMAL, "engine.resources", {"limits": amounts | {accelerator: 2}})
    with pytest.raises(ValidationError, match=f"but here are {accelerator}: 2;"):
        SpeculativeModelSpec.model_validate(twice)


def test_token_is_given_once() -> None:
    spec = changed(FULL, "engine.env", [{"name": "HF_TOKEN", "value": "x"}])
    with pytest.raises(ValidationError, match="must not set HF_TOKEN beside"):
        SpeculativeModelSpec.model_validate(spec)


@pytest.mark.parametrize("spec", [MINIMAL, FULL, TUNED, SHARED, REDIS])
def test_accepted_and_written_back_the_same(spec: dict[str, Any]) -> None:
    parsed = SpeculativeModelSpec.model_validate(spec)
    again = parsed.model_dump(mode="json", by_alias=True, exclude_none=True)
    assert SpeculativeModelSpec.model_validate(again) == parsed


def test_defaults() -> None:
    spec = SpeculativeModelSpec.model_validate(MINIMAL)
    assert (spec.replicas, spec.api.port, spec.model.dtype) == (1, 8000, "auto")
    assert (spec.replacement, spec.engine.load_seconds) == ("surge", 1800)
    assert (spec.proposer.method, spec.proposer.max_depth) == ("ngram", 16)
    assert (spec.requests.timeout_seconds, spec.requests.speculation_override) == (None, True)


@pytest.mark.parametrize(
    "path", ["/opt/models", "/.cache", "/..x", "/a..b/...", "/variants", "/models.d/v1.0"]
)
def test_a_path_with_dots_or_beside_the_system_is_accepted(path: str) -> None:
    spec = changed(MINIMAL, "engine.volumes", [VOLUME | {"name": "v" * 50, "mountPath": path}])
    assert SpeculativeModelSpec.model_validate(spec).engine.volumes


def test_sizes_of_the_engine_are_its_own_unless_set() -> None:
    engine = SpeculativeModelSpec.model_validate(MINIMAL).engine
    assert engine.model_dump(exclude_defaults=True) == {}
    assert (engine.max_running, engine.step_tokens, engine.memory_share) == (None, None, None)


@pytest.mark.parametrize(
    "sizes",
    [
        {"stepTokens": 32, "maxRunning": 32},
        {"stepTokens": 1},
        {"memoryShare": 1},
        {"memoryShare": 0.05},
        {"proposerMemory": 0},
        {"proposerMemory": "1Ti"},
        {"proposerMemory": "1.3Gi"},
    ],
)
def test_sizes_at_their_bounds_are_accepted(sizes: dict[str, Any]) -> None:
    assert SpeculativeModelSpec.model_validate(changed(MINIMAL, "engine", sizes))


def test_settings_of_a_method_may_wait_for_it() -> None:
    spec = changed(MINIMAL, "proposer", {"method": "none", "ngram": {"maxMatch": 3}})
    ngram = SpeculativeModelSpec.model_validate(spec).proposer.ngram
    assert ngram is not None
    assert ngram.max_match == 3


def test_a_path_on_a_volume_is_accepted() -> None:
    spec = changed(changed(MINIMAL, "engine.volumes", [VOLUME]), "model.source", {"path": "/models/x"})
    assert SpeculativeModelSpec.model_validate(spec).model.source.path == "/models/x"
    with pytest.raises(ValidationError, match="lies on none"):
        SpeculativeModelSpec.model_validate(changed(spec, "model.source", {"path": "/models-of-others/x"}))


def test_values_of_variables_up_to_the_bound_are_accepted() -> None:
    spec = changed(MINIMAL, "engine.env", [{"name": f"A{n}", "value": "é" * 4096} for n in range(16)])
    assert len(SpeculativeModelSpec.model_validate(spec).engine.env or ()) == 16


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        ({"model": {"servedName": "x"}}, "x"),
        ({"model": {"servedName": ""}}, "m"),
        ({"model": {"servedName": ["x"]}}, "m"),
        ({"model": "x"}, "m"),
        ({}, "m"),
        (None, "m"),
        (FULL, "org/name:tuned"),
    ],
)
def test_served_name_of_a_spec_that_need_not_be_valid(spec: object, name: str) -> None:
    assert served_name({"metadata": {"name": "m"}, "spec": spec}) == name
