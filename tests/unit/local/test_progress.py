"""What is shown while a resource comes up, and when waiting is given up."""

from __future__ import annotations

from typing import Any

import pytest

from outrider_local import progress
from outrider_local.report import ProblemError

IMAGE = "localhost/outrider-serving:abc"


def model(*conditions: tuple[str, str, str], generation: int = 2, observed: int | None = 2) -> dict[str, Any]:
    status: dict[str, Any] = {
        "conditions": [
            {"type": kind, "status": value, "reason": reason, "message": "as it is"}
            for kind, value, reason in conditions
        ]
    }
    if observed is not None:
        status["observedGeneration"] = observed
    return {"metadata": {"name": "m", "generation": generation}, "spec": {}, "status": status}


def pod(
    name: str = "m-1", waiting: str = "", restarts: int = 0, image: str = IMAGE, of: str = "m"
) -> dict[str, Any]:
    state = {"waiting": {"reason": waiting}} if waiting else {"running": {}}
    container = {"name": "serving", "ready": False, "restartCount": restarts, "state": state}
    return {
        "metadata": {"name": name, "namespace": "default", "labels": {"outrider.dev/model": of}},
        "spec": {"containers": [{"name": "serving", "image": image}]},
        "status": {"phase": "Pending" if waiting else "Running", "containerStatuses": [container]},
    }


class FakeCluster:
    """Answers `get` from a list of states, one a round; the last one stays."""

    def __init__(self, *rounds: tuple[dict[str, Any], list[dict[str, Any]]]) -> None:
        self.rounds = list(rounds)

    def get(
        self, kind: str, name: str = "", namespace: str = "default", selector: str = ""
    ) -> dict[str, Any]:
        if kind == "events":
            return {
                "items": [
                    {
                        "type": "Warning",
                        "reason": "BackOff",
                        "message": "no",
                        "involvedObject": {"name": about},
                    }
                    for about in ("m-1", "m-set", "m-b-1")
                ]
            }
        if kind == "deployments,replicasets":
            return {"items": [{"metadata": {"name": "m-set"}}] if selector == "outrider.dev/model=m" else []}
        if kind == "pods":
            items = self.rounds[0][1]
            if len(self.rounds) > 1:
                self.rounds.pop(0)
            label, _, value = selector.partition("=")
            return {"items": [one for one in items if one["metadata"]["labels"].get(label) == value]}
        return self.rounds[0][0]

    def kubectl(self, *words: str) -> str:
        assert words[0] == "logs"
        return "Traceback\nValueError: the model is gone\n"


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.time, "sleep", lambda _: None)


def test_every_change_is_shown_once(capsys: pytest.CaptureFixture[str]) -> None:
    starting = model(("Ready", "False", "PodsStarting"))
    cluster = FakeCluster(
        ({"metadata": {"generation": 1}}, []),
        (starting, [pod(waiting="ContainerCreating")]),
        (starting, [pod(waiting="ContainerCreating")]),
        (model(("Ready", "True", "Serving")), [pod()]),
    )
    progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]
    output = capsys.readouterr().out
    assert output.count("waiting for the operator") == 1
    assert output.count("Ready=False  PodsStarting: as it is") == 1
    assert output.count("pod m-1: Pending, ContainerCreating, 0 of 1 ready") == 1
    assert "Ready=True  Serving" in output


def test_a_crash_loop_ends_the_wait_with_the_log() -> None:
    cluster = FakeCluster((model(("Ready", "False", "x")), [pod(waiting="CrashLoopBackOff", restarts=2)]))
    with pytest.raises(ProblemError) as caught:
        progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]
    text = str(caught.value)
    assert "container serving is in CrashLoopBackOff" in text
    assert "| ValueError: the model is gone" in text
    assert "event m-1: BackOff: no" in text
    assert "event m-set: BackOff: no" in text
    assert "m-b" not in text
    assert "kubectl edit specm m" in text


def test_a_timeout_says_where_to_look() -> None:
    cluster = FakeCluster((model(), []))
    with pytest.raises(ProblemError, match="m is not ready after") as caught:
        progress.wait_until_ready(cluster, "m", "default", IMAGE, patience=-0.1)  # type: ignore[arg-type]
    assert "kubectl describe specm m" in caught.value.advice


@pytest.mark.parametrize(
    ("resource", "ready"),
    [
        (model(("Ready", "True", "")), True),
        (model(("Ready", "False", "")), False),
        (model(("Ready", "True", ""), observed=1), False),
        (model(("Ready", "True", ""), observed=None), True),
        (model(("Available", "True", "")), False),
    ],
)
def test_ready_is_for_the_generation_that_was_asked_for(resource: dict[str, Any], ready: bool) -> None:
    assert progress.is_ready(resource) == ready


def test_pods_of_an_older_image_are_waited_out(capsys: pytest.CaptureFixture[str]) -> None:
    ready = model(("Ready", "True", "Serving"))
    cluster = FakeCluster(
        (ready, [pod("m-old", image="localhost/outrider-serving:old")]), (ready, [pod("m-new")])
    )
    progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]
    assert "pod m-new" in capsys.readouterr().out


def test_an_old_pod_in_a_crash_loop_does_not_stop_its_replacement() -> None:
    ready = model(("Ready", "True", "Serving"))
    old = pod("m-old", waiting="CrashLoopBackOff", image="localhost/outrider-serving:old")
    cluster = FakeCluster((model(("Ready", "False", "x")), [old]), (ready, [pod()]))
    progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]


def test_an_image_of_the_resources_own_counts() -> None:
    own = {"spec": {"engine": {"image": "mine:1"}}}
    assert progress.runs_image(own, [pod(image="mine:1")], IMAGE)
    assert not progress.runs_image(own, [pod()], IMAGE)


def test_a_silent_pod_is_heard_by_its_log(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(progress, "_SILENCE", -1.0)
    starting = model(("Ready", "False", "PodsStarting"))
    cluster = FakeCluster((starting, [pod()]), (starting, [pod()]), (model(("Ready", "True", "")), [pod()]))
    progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]
    assert "log: ValueError: the model is gone" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("log", "line"),
    [
        ('{"level": "info", "message": "converting weights"}\n', "converting weights"),
        ("0%|    | 0/236\r50%|##  | 118/236\r100%|####| 236/236", "100%|####| 236/236"),
        ("[1, 2]\n", "[1, 2]"),
        ("", "(nothing yet)"),
    ],
)
def test_the_last_line_of_a_log(log: str, line: str) -> None:
    class Logs(FakeCluster):
        def kubectl(self, *words: str) -> str:
            return log

    assert progress.last_line(Logs(), pod()) == line  # type: ignore[arg-type]


def test_only_the_models_own_living_pods_count() -> None:
    going = pod("m-2")
    going["metadata"]["deletionTimestamp"] = "now"
    cluster = FakeCluster((model(), [pod(), going, pod("m-b-1", of="m-b")]))
    living = progress.living_pods(cluster, "default", "m")  # type: ignore[arg-type]
    assert [one["metadata"]["name"] for one in living] == ["m-1"]


def test_a_neighbour_that_cannot_start_is_not_waited_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Its name begins with this one's, its image is another, and it is in a crash loop."""
    neighbours = [pod("m-b-1", "CrashLoopBackOff", of="m-b"), pod("m-c-1", image="mine:1", of="m-c")]
    cluster = FakeCluster((model(("Ready", "True", "Serving")), [pod(), *neighbours]))
    progress.wait_until_ready(cluster, "m", "default", IMAGE)  # type: ignore[arg-type]
    assert "m-b-1" not in capsys.readouterr().out
