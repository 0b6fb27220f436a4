"""What is done about a release that an earlier helm has left in the middle of something."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from outrider_local import release
from outrider_local.images import References
from outrider_local.report import ProblemError
from outrider_local.settings import Settings

IMAGES = References("operator:1", "serving:1")


class FakeCluster:
    """A helm that refuses a pending release, as the real one does."""

    def __init__(self, *statuses: str) -> None:
        self.statuses = list(statuses)
        self.done: list[str] = []

    def helm(self, *words: str | Path) -> str:
        verb, name, *rest = map(str, words)
        assert name == release.NAME
        assert f"--namespace={release.NAMESPACE}" in rest
        if verb == "history":
            if not self.statuses:
                raise ProblemError("release: not found")
            return json.dumps(
                [{"revision": number, "status": status} for number, status in enumerate(self.statuses, 1)]
            )
        self.done.append(verb)
        if verb == "rollback":
            assert self.statuses[int(rest[0]) - 1] == "deployed"
            self.statuses.append("deployed")
        elif verb == "uninstall":
            self.statuses = []
        elif self.statuses and self.statuses[-1].startswith(("pending-", "uninstalling")):
            raise ProblemError("another operation (install/upgrade/rollback) is in progress")
        else:
            self.statuses.append("deployed")
        return ""


@pytest.mark.parametrize(
    ("statuses", "done"),
    [
        ((), []),
        (("deployed",), []),
        (("failed",), []),
        (("pending-install",), ["uninstall"]),
        (("failed", "pending-upgrade"), ["uninstall"]),
        (("superseded", "deployed", "pending-upgrade"), ["rollback"]),
        (("superseded", "deployed", "pending-rollback"), ["rollback"]),
        (("uninstalling",), ["uninstall"]),
    ],
)
def test_a_helm_that_was_killed_is_undone_first(
    statuses: tuple[str, ...], done: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    settings = Settings(tmp_path, tmp_path, tmp_path)
    settings.state.mkdir()
    cluster = FakeCluster(*statuses)

    assert release.install(settings, cluster, IMAGES)  # type: ignore[arg-type]

    assert cluster.done == [*done, "upgrade"]
    said = capsys.readouterr().out
    assert (f"release outrider was left {statuses[-1]}" in said) if done else ("was left" not in said)

    assert not release.install(settings, cluster, IMAGES)  # type: ignore[arg-type]
