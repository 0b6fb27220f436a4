"""Operators as processes of this machine, under the chart's rights, for tests that end or disturb them.

Each runs in the node's network, so that it reaches pods as one in a pod would, with a token of a service
account that has the rights of the chart's own, and through a `FaultProxy` of its own.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Final, TypeVar

import yaml

from cluster.faultproxy import FaultProxy
from cluster.operated import Object, Operated
from cluster_fixture import LocalCluster
from outrider_local import namespaces, node, release

ACCOUNT: Final = f"{release.NAME}-operator"
"""The chart's service account; its Deployment, role and Lease have the same name."""

QUICK_LEASE_SECONDS: Final = 6
QUICK: Final = ("--resync-seconds=3", "--progress-seconds=0.5", f"--lease-seconds={QUICK_LEASE_SECONDS}")
"""Flags of an operator that is waited for."""


class HostOperator:
    """One operator process at a time; what it logs, whatever process of it, is in one file."""

    def __init__(self, name: str, command: list[str], environment: dict[str, str], folder: Path) -> None:
        self.name = name
        self._command = command
        self._environment = environment
        self._log = folder / f"{name}.log"
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Start it; returns at once. The process has ended, or was never started."""
        assert not self.running, f"operator {self.name} runs"
        with self._log.open("ab") as log:
            self._process = _spawn(self._command, self._environment, log)

    @property
    def pid(self) -> int:
        assert self._process is not None, f"operator {self.name} was never started"
        return self._process.pid

    @property
    def started(self) -> bool:
        """Whether it ever was."""
        return self._process is not None

    @property
    def running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    @property
    def heeds_signals(self) -> bool:
        """Whether it has got so far that SIGTERM does not simply kill it."""
        status = Path(f"/proc/{self.pid}/status").read_text()
        caught = next(line for line in status.splitlines() if line.startswith("SigCgt"))
        return bool(int(caught.split()[1], 16) >> (signal.SIGTERM - 1) & 1)

    @property
    def log(self) -> str:
        return self._log.read_text(errors="replace") if self._log.exists() else ""

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        os.kill(self.pid, number)

    def kill(self) -> None:
        """SIGKILL, and wait until it is gone."""
        self.signal(signal.SIGKILL)
        self.wait(10)

    def wait(self, seconds: float) -> int:
        """The exit status, once it ends by itself; negative for a signal."""
        assert self._process is not None
        return self._process.wait(seconds)

    def end(self) -> None:
        """Make sure that it is gone, stopped or not."""
        if self.running:
            self.kill()


class Operators(Operated):
    """A cluster whose own operator rests, and makers of operators on this machine in its place."""

    def __init__(self, cluster: LocalCluster, namespace: str) -> None:
        super().__init__(cluster, namespace)
        # Not below the node's state: the operators are no part of the node.
        self._folder = Path(tempfile.mkdtemp(prefix="outrider-operators-"))
        self._operators: list[HostOperator] = []
        self._proxies: list[FaultProxy] = []
        self._accounts: list[str] = []

    def proxy(self) -> FaultProxy:
        """A proxy to the API server that injects no fault yet."""
        kubeconfig = yaml.safe_load(self.cluster.kubeconfig.read_text())
        server = kubeconfig["clusters"][0]["cluster"]
        record = node.running(self.cluster.settings)
        assert record is not None
        assert record.init is not None
        authority = base64.b64decode(server["certificate-authority-data"]).decode()
        made = FaultProxy(server["server"], authority, record.init.pid)
        self._proxies.append(made)
        return made

    def operator(
        self, name: str, proxy: FaultProxy, *flags: str, account: str = ACCOUNT, identity: str | None = None
    ) -> HostOperator:
        """An operator, not yet started; without an identity each process of it has one of its own."""
        kubeconfig = self._folder / f"{name}.kubeconfig"
        kubeconfig.write_text(json.dumps(_kubeconfig(proxy.url, self._token(account))))
        command = self.cluster.in_network(
            *("env", f"KUBECONFIG={kubeconfig}", "NO_PROXY=*", "no_proxy=*"),
            *(sys.executable, "-m", "outrider_operator", f"--serving-image={self.cluster.images.serving}"),
            *(f"--pod-namespace={release.NAMESPACE}", "--listen=", *flags),
            *([f"--pod-name={identity}"] if identity else []),
        )
        made = HostOperator(name, command, self.cluster.environment, self._folder)
        self._operators.append(made)
        return made

    def copy_account(self, name: str) -> str:
        """Another service account with all that is bound to the chart's; its name, also of its bindings."""
        subject = {"kind": "ServiceAccount", "name": name, "namespace": release.NAMESPACE}
        metadata = {"name": name, "namespace": release.NAMESPACE}
        made: list[Object] = [{"apiVersion": "v1", "kind": "ServiceAccount", "metadata": metadata}]
        for kind in ("clusterrolebinding", "rolebinding"):
            for binding in self.cluster.get(kind, "", release.NAMESPACE)["items"]:
                if any(bound["name"] == ACCOUNT for bound in binding.get("subjects", ())):
                    named = {**metadata, "name": f"{name}-{binding['metadata']['name']}"}
                    made.append({**binding, "metadata": named, "subjects": [subject]})
        self._accounts.append(json.dumps({"apiVersion": "v1", "kind": "List", "items": made}))
        self.cluster.kubectl("apply", "-f", "-", stdin=self._accounts[-1])
        return name

    def close(self) -> None:
        """End every operator and every proxy; then the copied accounts go."""
        for operator in self._operators:
            operator.end()
        for account in self._accounts:
            self.cluster.kubectl("delete", "--ignore-not-found", "-f", "-", stdin=account)
        for proxy in self._proxies:
            proxy.close()
        shutil.rmtree(self._folder)

    def _token(self, account: str) -> str:
        return self.cluster.kubectl(
            "create", "token", account, f"--namespace={release.NAMESPACE}", "--duration=4h"
        ).strip()


Kind = TypeVar("Kind", bound=Operators)


@contextmanager
def operators(
    cluster: LocalCluster, namespace: str, kind: Callable[[LocalCluster, str], Kind] = Operators
) -> Iterator[Kind]:
    """The chart installed, its operator resting, and a namespace for the tests; afterwards it works again."""
    release.install(cluster.settings, cluster, cluster.images)
    made = kind(cluster, namespace)
    try:
        made.scale_operator(0)
        cluster.kubectl("create", "namespace", namespace)
        yield made
    finally:
        made.close()
        made.kubectl("delete", "specm", "--all", "--timeout=60s")
        # Not waited for: one with pods is looked at again only after half of their grace period.
        cluster.kubectl("delete", "namespace", namespace, "--wait=false")
        made.scale_operator(1)


def _spawn(command: list[str], environment: dict[str, str], log: IO[bytes]) -> subprocess.Popen[bytes]:
    """Start a process that goes when this one is killed, so that none outlives a test run."""
    return subprocess.Popen(
        command,
        env=environment,
        stdin=subprocess.DEVNULL,
        stdout=log,
        stderr=log,
        preexec_fn=lambda: namespaces.die_with_parent(signal.SIGKILL),
    )


def _kubeconfig(server: str, token: str) -> Object:
    return {
        "apiVersion": "v1",
        "kind": "Config",
        "current-context": "test",
        "clusters": [{"name": "test", "cluster": {"server": server}}],
        "users": [{"name": "test", "user": {"token": token}}],
        "contexts": [{"name": "test", "context": {"cluster": "test", "user": "test"}}],
    }
