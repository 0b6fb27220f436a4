"""The settings file: what it accepts, what it refuses and in which words."""

from __future__ import annotations

import json
import subprocess
import sys
from typing import Any

import pytest
from pydantic import ValidationError

from outrider_serving.settings import (
    Method,
    Objective,
    PodSettings,
    PodState,
    Proposer,
    Workload,
    default_settings,
)


def document(**changes: Any) -> dict[str, Any]:
    """A valid settings file, with some keys replaced."""
    base: dict[str, Any] = {
        "generation": 3,
        "arms": {"stable": {"proposer": {"method": "ngram", "minDepth": 2, "maxDepth": 6}}},
        "inForce": "stable",
        "workloads": [{"name": "code", "objective": {"ttftMilliseconds": 300, "tpotMilliseconds": 40}}],
        "objective": {"ttftMilliseconds": 1000, "tpotMilliseconds": 100, "maxGapMilliseconds": 500},
    }
    return base | changes


def test_a_file_survives_a_round_trip() -> None:
    settings = PodSettings.model_validate(document())
    text = settings.model_dump_json(by_alias=True, exclude_none=True)
    assert PodSettings.model_validate_json(text) == settings
    assert json.loads(text)["arms"]["stable"]["proposer"]["minDepth"] == 2
    assert settings.proposer == Proposer(method=Method.NGRAM, min_depth=2, max_depth=6)


def test_without_a_file_ngram_serves_without_an_objective() -> None:
    settings = default_settings()
    assert settings.proposer.method is Method.NGRAM
    assert settings.objective_of(settings.workload(None)) is None


@pytest.mark.parametrize(("asked", "label"), [("code", "code"), ("chat", "other"), (None, "other")])
def test_workload_labels_are_bounded_by_the_declared_names(asked: str | None, label: str) -> None:
    assert PodSettings.model_validate(document()).workload(asked) == label


def test_a_workload_without_an_objective_takes_the_default() -> None:
    settings = PodSettings.model_validate(document(workloads=[{"name": "chat"}, {"name": "code"}]))
    default = Objective(ttft_milliseconds=1000, tpot_milliseconds=100, max_gap_milliseconds=500)
    assert settings.objective_of("chat") == default
    own = PodSettings.model_validate(document())
    assert own.objective_of("code") == Objective(ttft_milliseconds=300, tpot_milliseconds=40)
    assert own.objective_of("other") == default


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"inForce": "candidate"}, "inForce 'candidate' is not one of the arms ['stable']"),
        ({"workloads": [{"name": "a"}, {"name": "a"}]}, "distinct names"),
        ({"workloads": [{"name": "other"}]}, "reserved for undeclared traffic"),
        ({"generation": -1}, "greater than or equal to 0"),
        ({"arms": {}}, "at least 1 item"),
        ({"colour": "red"}, "Extra inputs are not permitted"),
        ({"objective": {"ttftMilliseconds": 0, "tpotMilliseconds": 1}}, "greater than or equal to 1"),
        (
            {"arms": {"stable": {"proposer": {"minDepth": 9, "maxDepth": 8}}}},
            "minDepth (9) must not exceed maxDepth (8)",
        ),
        (
            {"arms": {"stable": {"proposer": {"ngram": {"minMatch": 5, "maxMatch": 4}}}}},
            "minMatch (5) must not exceed maxMatch (4)",
        ),
        ({"arms": {"stable": {"proposer": {"method": "magic"}}}}, "'none', 'ngram' or 'suffix'"),
        ({"arms": {"stable": {"proposer": {"maxDepth": 65}}}}, "less than or equal to 64"),
        ({"requests": {"timeoutSeconds": 0}}, "greater than 0"),
        ({"requests": {"timeout": 1}}, "Extra inputs are not permitted"),
    ],
)
def test_a_bad_file_is_refused_with_words_that_name_the_field(changes: dict[str, Any], words: str) -> None:
    with pytest.raises(ValidationError) as refused:
        PodSettings.model_validate(document(**changes))
    assert words in str(refused.value)


def test_a_workload_name_is_a_dns_label() -> None:
    for name in ("Upper", "-a", "a" * 64, ""):
        with pytest.raises(ValidationError):
            Workload(name=name)


def test_the_contract_does_not_import_torch() -> None:
    code = "import sys, outrider_serving.settings; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, env={"PYTHONPATH": ":".join(sys.path)})


def test_settings_of_a_method_may_wait_while_another_is_in_force() -> None:
    proposer = Proposer.model_validate({"method": "none", "ngram": {"minMatch": 2}})
    assert proposer.ngram is not None
    assert proposer.ngram.min_match == 2


def test_a_pod_of_an_earlier_release_can_read_settings_that_limit_no_request() -> None:
    settings = PodSettings.model_validate(document())
    assert "requests" not in settings.model_dump(by_alias=True)
    limited = PodSettings.model_validate(document(requests={"timeoutSeconds": 5}))
    assert PodSettings.model_validate_json(limited.model_dump_json(by_alias=True)) == limited


def test_an_operator_understands_a_newer_pod() -> None:
    answer = {"ready": True, "generation": 2, "inForce": "stable", "temperature": 41}
    assert PodState.model_validate(answer).generation == 2
