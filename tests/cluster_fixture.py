"""The cluster of a test process: a real node of its own, beside whatever else runs on the machine.

`tests/cluster` and `tests/e2e` register this module as a plugin; the fixtures are session-wide, so that a
process starts one node, however many folders take part.

- ``cluster``: a node with our images in it, without operator and resources. See ``LocalCluster``.
- ``demo``: what `make up` does, on that same node: the chart, the example, the first tokens. See ``Demo``.
"""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass, replace
from pathlib import Path

import pytest

from outrider_local import gobuild, images, preflight
from outrider_local.cluster import Cluster
from outrider_local.ports import free_port
from outrider_local.processes import start_time
from outrider_local.report import ProblemError
from outrider_local.settings import Settings, from_environment

_PREFIX = "outrider-test-"


class LocalCluster(Cluster):
    """A running node: ``kubectl``, ``helm`` and ``get`` of Cluster, and ways into its network."""

    def __init__(self, settings: Settings, references: images.References) -> None:
        super().__init__(settings)
        self.settings = settings
        #: The images of this checkout, already on the node: ``images.operator``, ``images.serving``.
        self.images = references
        #: Their programs by path, for tests that start them themselves.
        self.programs = gobuild.programs(settings.checkout, settings.cache)
        self._forwards = 0

    def local(self, *words: str) -> str:
        """Run a command of ``outrider_local`` on this node."""
        return run_local(self.settings, *words)

    def attempt(self, *words: str, environment: dict[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command of ``outrider_local`` that may fail, in an environment of its own."""
        return subprocess.run(
            _command_line(*words), env=environment, capture_output=True, text=True, check=False
        )

    def in_network(self, *command: str) -> list[str]:
        """A command line that runs ``command`` on the machine, with the node's network (services, pods)."""
        return _command_line("--name", self.settings.name, "node", "exec", "--network", *command)

    def inside(self, *command: str) -> str:
        """Run a command inside the node (its mounts, processes and network); its output."""
        return self.local("node", "exec", *command)

    def forward(self, address: str, port: int) -> int:
        """Forward a free loopback port to an address of the cluster until the run ends; the loopback port."""
        self._forwards += 1
        listen = free_port()
        self.local(
            "node", "forward", f"--label=test-{self._forwards}", f"--listen={listen}", address, str(port)
        )
        return listen

    @property
    def environment(self) -> dict[str, str]:
        """The environment for processes that talk to this cluster."""
        return {**os.environ, **self.settings.variables(), "KUBECONFIG": str(self.settings.kubeconfig)}


@dataclass(frozen=True)
class Demo:
    """What `make up` said and left."""

    cluster: LocalCluster
    output: str
    seconds: float
    url: str


def run_local(settings: Settings, *words: str) -> str:
    """Run a command of ``outrider_local`` with these settings; fail with its words."""
    done = subprocess.run(
        _command_line(*words),
        env={**os.environ, **settings.variables()},
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode:
        raise AssertionError(
            f"outrider_local {' '.join(words)}: exit {done.returncode}\n{done.stdout}{done.stderr}"
        )
    return done.stdout


def new_settings(label: str) -> Settings:
    """Settings for a node of this run: its own name, ports and state folder."""
    settings = from_environment({**os.environ, "OUTRIDER_NAME": f"{_PREFIX}{os.getpid()}{label}"})
    settings.cache.mkdir(parents=True, exist_ok=True)
    state_home = Path(tempfile.mkdtemp(prefix=f"{_PREFIX}{os.getpid()}-", dir=settings.cache)) / "outrider"
    api_port, port = free_port(), free_port()
    return replace(settings, state_home=state_home, api_port=api_port, port=port)


def end(settings: Settings) -> None:
    """End a node of this run and remove its folder."""
    run_local(settings, "node", "down")
    shutil.rmtree(settings.state_home.parent)


@pytest.fixture(scope="session")
def cluster() -> Iterator[LocalCluster]:
    """A node with our images."""
    settings = new_settings("")
    _end_forgotten(settings)
    missing = gobuild.programs(settings.checkout, settings.cache).missing
    if missing or preflight.gather(settings).missing_tools:
        pytest.fail(
            "the cluster's programs are not here: run `make test`, or python3 -m outrider_local ready"
        )
    # A run that is told to end tears down as one that is interrupted.
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        run_local(settings, "node", "up")
        try:
            references = images.provide(settings)
        except ProblemError as problem:
            raise AssertionError(str(problem)) from None
        yield LocalCluster(settings, references)
    finally:
        end(settings)
        signal.signal(signal.SIGTERM, before)


@pytest.fixture(scope="session")
def demo(cluster: LocalCluster) -> Demo:
    """The operator's release and the example, brought up by the same command as `make up`."""
    began = time.monotonic()
    output = cluster.local("up")
    return Demo(cluster, output, time.monotonic() - began, f"http://127.0.0.1:{cluster.settings.port}/v1")


def _command_line(*words: str) -> list[str]:
    return [sys.executable, "-m", "outrider_local", *words]


def _end_forgotten(settings: Settings) -> None:
    """End nodes of earlier runs that were killed before they could."""
    for folder in settings.cache.glob(f"{_PREFIX}*"):
        pid = int(folder.name.removeprefix(_PREFIX).split("-")[0])
        if pid == os.getpid() or start_time(pid) is not None:
            continue
        for state in (folder / "outrider").glob("[a-z]*"):
            run_local(replace(settings, state_home=folder / "outrider", name=state.name), "node", "down")
        shutil.rmtree(folder)
