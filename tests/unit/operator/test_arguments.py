"""A pod's command line: `outrider serve` takes it, and what it refuses is traced back to fields."""

from __future__ import annotations

import re
from argparse import Namespace
from typing import Any

import pytest

from outrider_operator.crd import custom_resource_definition
from outrider_operator.podtemplate import arguments
from outrider_operator.spec import SpeculativeModelSpec
from outrider_operator.trouble import Trouble, advice
from outrider_serving import cli
from outrider_serving.engine import options
from outrider_serving.flags import make_parser
from outrider_serving.models.errors import ModelError
from outrider_serving.models.source import check_source, parse_source
from unit.operator.builders import FULL, MINIMAL, REDIS, SHARED, SIZES, TUNED, changed

Object = dict[str, Any]

SPEC = custom_resource_definition()["spec"]["versions"][0]["schema"]["openAPIV3Schema"]["properties"]["spec"]
ENGINE = SPEC["properties"]["engine"]["properties"]


def written(spec: Object) -> list[str]:
    return arguments("ns", "m", SpeculativeModelSpec.model_validate(spec))


def understood(spec: Object) -> Namespace:
    return make_parser().parse_args(written(spec))


def hints(spec: Object, said: str) -> tuple[str, ...]:
    return advice(Trouble("CrashLoopBackOff", said), SpeculativeModelSpec.model_validate(spec))


@pytest.mark.parametrize("spec", [MINIMAL, FULL, TUNED, SHARED, REDIS])
def test_a_pod_understands_its_arguments(spec: Object) -> None:
    chosen, model = understood(spec), SpeculativeModelSpec.model_validate(spec).model
    assert (chosen.dtype, chosen.revision) == (str(model.dtype), model.revision)
    assert (chosen.context_length, chosen.served_name) == (model.context_length, model.served_name or "m")


def test_sizes_of_the_engine_are_what_was_asked_for() -> None:
    chosen = understood(TUNED)
    assert (chosen.max_running, chosen.max_waiting, chosen.step_tokens) == (48, 500, 1024)
    assert (chosen.memory_share, chosen.proposer_memory) == (0.85, 3 << 29)


@pytest.mark.parametrize("field", SIZES)
def test_a_size_adds_its_own_argument_and_no_other(field: str) -> None:
    flag = "--" + re.sub("[A-Z]", lambda upper: f"-{upper[0].lower()}", field)
    plain, sized = written(MINIMAL), written(changed(MINIMAL, f"engine.{field}", SIZES[field]))
    assert sized[: len(plain)] == plain
    assert [argument.partition("=")[0] for argument in sized[len(plain) :]] == [flag]


@pytest.mark.parametrize("field", ["maxRunning", "maxWaiting", "stepTokens", "memoryShare"])
@pytest.mark.parametrize("bound", ["minimum", "maximum"])
def test_a_pod_understands_whatever_is_admitted(field: str, bound: str) -> None:
    value = ENGINE[field][bound]
    name = re.sub("[A-Z]", lambda upper: f"_{upper[0].lower()}", field)
    assert getattr(understood(changed(MINIMAL, f"engine.{field}", value)), name) == value


@pytest.mark.parametrize(
    ("amount", "count"),
    [
        (0, 0),
        (1, 1),
        ("512Mi", 1 << 29),
        ("1G", 10**9),
        ("1Ti", 1 << 40),
        ("1.3Gi", 1_395_864_372),  # rounded up, as Kubernetes does
        ("0.0000000000000000000000000001k", 1),
    ],
)
def test_memory_for_proposers_is_told_in_bytes(amount: int | str, count: int) -> None:
    assert understood(changed(MINIMAL, "engine.proposerMemory", amount)).proposer_memory == count


@pytest.mark.parametrize(
    ("field", "told"),
    [
        ("maxRunning", f"{options.DEFAULT_MAX_RUNNING}."),
        ("maxWaiting", f"{options.DEFAULT_MAX_WAITING};"),
        ("stepTokens", f"{options.STEP_TOKENS_GPU} on a GPU and {options.STEP_TOKENS_CPU} on a CPU"),
        ("memoryShare", f"{options.MEMORY_SHARE_GPU} on a GPU and {options.MEMORY_SHARE_CPU} on a CPU"),
        ("proposerMemory", f"{options.EngineOptions('m').proposer_memory}."),
    ],
)
def test_a_description_tells_the_engines_own_default(field: str, told: str) -> None:
    assert f"by default {told}" in ENGINE[field]["description"]


def test_too_few_tokens_for_the_default_of_running_requests_is_traced_to_the_field(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Admission cannot know the default of whatever image serves."""
    spec = changed(MINIMAL, "engine.stepTokens", 8)
    assert cli.main(written(spec)) == 2
    said = capsys.readouterr().err
    assert "--step-tokens 8 must be at least --max-running 32" in said
    assert hints(spec, said) == ("the flags are spec.engine.stepTokens and spec.engine.maxRunning",)


VOLUME = {"name": "v", "mountPath": "/models", "persistentVolumeClaim": {"claimName": "c"}}


@pytest.mark.parametrize(
    ("source", "field"),
    [
        ({"package": "no_such_package"}, "package"),
        ({"package": "no_such.part"}, "package"),
        ({"path": "/models/nowhere"}, "path"),
    ],
)
def test_a_model_that_is_not_there_is_traced_to_the_field(source: Object, field: str) -> None:
    spec = changed(changed(MINIMAL, "engine.volumes", [VOLUME]), "model.source", source)
    with pytest.raises(ModelError) as caught:
        check_source(parse_source(written(spec)[1]))
    assert hints(spec, f"pod p: {caught.value}") == (f"the model is named by spec.model.source.{field}",)
    assert hints(MINIMAL, f"pod p: {caught.value}") == ()  # it speaks of another model


HUB = changed(MINIMAL, "model.source", {"hub": {"id": "org/name"}})
TOKEN = "spec.model.source.hub.tokenSecretRef names the Secret with the token"


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("model org/name (hub https://h): there is no revision 'v9'", "it is named by spec.model.revision"),
        (
            "model org/name (hub https://h): there is no such repository, or it is private and needs a token",
            f"it is named by spec.model.source.hub.id, and {TOKEN}",
        ),
        (
            "model org/name (hub https://h): access is refused (HTTP 401): give a token that may read it",
            TOKEN,
        ),
        (
            "model org/name has no weights: neither *.safetensors nor *.gguf is in it",
            "the model is named by spec.model.source.hub.id",
        ),
        (
            "model org/name (mamba) cannot be served: it has recurrent state",
            "the model is named by spec.model.source.hub.id",
        ),
        (
            "model org/name names no max_position_embeddings: give a context length",
            "it is given by spec.model.contextLength",
        ),
    ],
)
def test_what_a_pod_says_of_a_hub_model_is_traced_to_the_field(said: str, told: str) -> None:
    assert hints(HUB, f"pod p: container engine ended with exit code 2 (Error): {said}") == (told,)


def test_other_last_words_are_left_as_they_are() -> None:
    for said in ("model org/other: no", "RuntimeError: the model has no name", "killed"):
        assert hints(HUB, said) == ()


def test_a_model_that_does_not_fit_is_traced_to_the_fields() -> None:
    import torch  # here, because it takes seconds and the other tests do without

    from outrider_serving.engine.target.kv import KVShape
    from outrider_serving.engine.target.memory import CapacityError, divide

    with pytest.raises(CapacityError) as caught:
        divide(
            1 << 30,
            0.4,
            1 << 30,
            0,
            shapes=[KVShape(1, 64, 64)],
            dtype=torch.float32,
            page_size=16,
            context_length=2048,
            max_running=32,
        )
    fields = re.findall(r"spec\.[.\w]+\w", " ".join(hints(FULL, str(caught.value))))
    assert fields == [
        "spec.engine.resources.limits.memory",
        "spec.engine.memoryShare",
        "spec.model.contextLength",
        "spec.engine.proposerMemory",
    ]
