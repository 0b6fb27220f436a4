"""The operator's flags, and what kopf is told to watch."""

from __future__ import annotations

import logging
import subprocess
import sys

import kopf
import pytest

from outrider_operator.__main__ import config_of, configure_logs, parse
from outrider_operator.handlers import configure_kopf, registry


def test_flags() -> None:
    config = config_of(parse(["--serving-image=a/b:1", "--image-pull-policy=Never", "--namespaces=x, y"]))
    assert config.serving_image == "a/b:1"
    assert config.image_pull_policy == "Never"
    assert config.namespaces == ("x", "y")
    assert (config.resync_seconds, config.progress_seconds) == (30.0, 2.5)


def test_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OUTRIDER_SERVING_IMAGE", "a/b:2")
    monkeypatch.setenv("OUTRIDER_RESYNC_SECONDS", "5")
    config = config_of(parse([]))
    assert (config.serving_image, config.resync_seconds, config.namespaces) == ("a/b:2", 5.0, ())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ([], "--serving-image is needed"),
        (["--serving-image=a", "--resync-seconds=0"], "must lie between 0.1 and 3600"),
        (["--serving-image=a", "--image-pull-policy=Sometimes"], "--image-pull-policy"),
    ],
)
def test_bad_flags(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as caught:
        parse(arguments)
    assert caught.value.code == 2
    assert message in capsys.readouterr().err


def test_environment_is_checked_like_flags(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("OUTRIDER_LOG_FORMAT", "xml")
    with pytest.raises(SystemExit) as caught:
        parse(["--serving-image=a"])
    assert caught.value.code == 2
    assert "--log-format: invalid choice: 'xml'" in capsys.readouterr().err
    monkeypatch.setenv("OUTRIDER_LOG_FORMAT", "json")
    assert parse(["--serving-image=a", "--log-format=text"]).log_format == "text"


def test_probes_are_not_logged() -> None:
    configure_logs("text")
    assert not logging.getLogger("aiohttp.access").isEnabledFor(logging.INFO)
    assert logging.getLogger("outrider_operator").isEnabledFor(logging.INFO)


async def test_a_child_wakes_the_model_that_its_label_names() -> None:
    woken: list[tuple[str, str]] = []
    handlers = registry(lambda namespace, name: woken.append((namespace, name)))._watching.get_all_handlers()
    (of_pods,) = [handler for handler in handlers if str(handler.id) == "pods_event"]
    for model in ("m", ""):
        await of_pods.fn(namespace="ns", labels={"outrider.dev/model": model})  # type: ignore[call-arg]
    assert woken == [("ns", "m")]


def test_kopf_leaves_no_trace_on_resources() -> None:
    """Only event handlers: anything else would put a finalizer or an annotation on the resource."""
    handlers = registry(lambda namespace, name: None)
    assert handlers._watching.get_all_handlers()
    for other in (handlers._changing, handlers._spawning, handlers._indexing):
        assert not other.get_all_handlers()


def test_only_children_of_ours_are_watched() -> None:
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    assert dict.fromkeys(settings.watching.label_selectors.values()) == {"outrider.dev/model": None}
    assert len(settings.watching.label_selectors) == 5
    assert not settings.posting.enabled
    assert settings.scanning.disabled


def test_the_operator_never_loads_torch() -> None:
    code = (
        "import sys, outrider_operator.__main__; sys.exit('torch' in sys.modules or 'fastapi' in sys.modules)"
    )
    assert (
        subprocess.run(
            [sys.executable, "-c", code], check=False, env={"PYTHONPATH": ":".join(sys.path)}
        ).returncode
        == 0
    )
