"""The operator's flags, and what kopf is told to watch."""

from __future__ import annotations

import itertools
import logging
import subprocess
import sys
from collections.abc import Sized

import kopf
import pytest

from outrider_operator.__main__ import config_of, configure_logs, identity_of, parse
from outrider_operator.handlers import configure_kopf, registry
from outrider_operator.sweep import CHILD_KINDS


def test_flags() -> None:
    config = config_of(parse(["--serving-image=a/b:1", "--image-pull-policy=Never", "--namespaces=x, y"]))
    assert config.serving_image == "a/b:1"
    assert config.image_pull_policy == "Never"
    assert config.namespaces == ("x", "y")
    assert (config.resync_seconds, config.progress_seconds) == (30.0, 2.5)


def test_who_and_where() -> None:
    flags = ["--serving-image=a", "--pod-namespace=ns", "--monitoring-namespaces=m, n", "--listen=[::]:81"]
    options = parse([*flags, "--pod-name=outrider-1", "--network-policies=false"])
    config = config_of(options)
    assert (config.pod_namespace, config.monitoring_namespaces) == ("ns", ("m", "n"))
    assert not config.network_policies
    assert identity_of(options) == "outrider-1"
    assert options.listen == ("::", 81)
    assert parse(["--serving-image=a", "--listen="]).listen is None


def test_two_processes_outside_of_pods_are_told_apart() -> None:
    options = parse(["--serving-image=a"])
    assert config_of(options).pod_namespace == "default"
    assert identity_of(options) != identity_of(options)


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
        (["--serving-image=a", "--lease-seconds=5"], "must lie between 6 and 3600"),
        (["--serving-image=a", "--network-policies=yes"], "yes: must be true or false"),
        (["--serving-image=a", "--listen=8080"], "8080: must be HOST:PORT"),
        (["--serving-image=a", "--listen=:http"], ":http: must be HOST:PORT"),
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


def test_a_request_that_kopf_sends_again_is_no_error(caplog: pytest.LogCaptureFixture) -> None:
    configure_logs("text")
    (handler, *_) = [each for each in logging.getLogger().handlers if each.filters]

    def level(message: str) -> int:
        record = logging.LogRecord("kopf", logging.ERROR, "", 0, message, (), None)
        assert handler.filter(record)
        return record.levelno

    assert level("Request attempt #1/9 failed; will retry: GET https://x") == logging.WARNING
    assert level("Request attempt #9/9 failed; escalating: GET https://x") == logging.ERROR
    assert logging.getLogger("outrider_operator").isEnabledFor(logging.INFO)


async def test_any_news_are_heard() -> None:
    heard: list[tuple[str, bool]] = []
    handlers = registry(lambda found, deleted: heard.append((found["kind"], deleted)))
    for handler in handlers._watching.get_all_handlers():
        for kind in (None, "DELETED"):
            event = {"type": kind, "object": {"kind": str(handler.id)}}
            await handler.fn(event=event)  # type: ignore[call-arg]
    assert len(heard) == 16
    assert ("pods_event", True) in heard


def test_kopf_leaves_no_trace_on_resources() -> None:
    """Only event handlers: anything else would put a finalizer or an annotation on the resource."""
    handlers = registry(lambda found, deleted: None)
    assert handlers._watching.get_all_handlers()
    for other in (handlers._changing, handlers._spawning, handlers._indexing):
        assert not other.get_all_handlers()


def test_only_children_of_ours_are_watched() -> None:
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    assert dict.fromkeys(settings.watching.label_selectors.values()) == {"outrider.dev/model": None}
    assert len(settings.watching.label_selectors) == len(CHILD_KINDS) == 7
    assert not settings.posting.enabled
    assert settings.scanning.disabled
    assert settings.persistence.diffbase_storage.build(body=kopf.Body({"metadata": {"name": "x"}})) == {}


def test_kopf_tries_again_without_end() -> None:
    settings = kopf.OperatorSettings()
    configure_kopf(settings)
    backoffs = settings.networking.error_backoffs
    for _ in range(2):  # each request begins anew
        first = list(itertools.islice(backoffs, 200))  # type: ignore[arg-type]
        assert (first[0], first[10], first[-1]) == (1, 5, 30)
    assert not isinstance(backoffs, Sized)


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
