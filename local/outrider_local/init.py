"""The node's process 1: starts the components in order, restarts what ends, reaps orphans, stops it all."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from outrider_local import addresses
from outrider_local.components import STOP_ORDER, commands
from outrider_local.gobuild import Programs
from outrider_local.layout import Layout
from outrider_local.report import ProblemError
from outrider_local.shell import SYSTEM_PATH, output, succeeds, tail, without_proxies

_PATIENCE = 120.0
_RESTART_AFTER = (1.0, 2.0, 5.0, 15.0, 30.0)


class StopRequested(BaseException):
    """Raised by SIGTERM."""


class Init:
    """The components of a running node."""

    def __init__(self, layout: Layout, programs: Programs, images: list[Path]) -> None:
        self._layout = layout
        self._images = images
        self._commands = commands(layout, programs)
        self._running: dict[str, subprocess.Popen[bytes]] = {}
        self._restarts: dict[str, int] = {}
        self._due: dict[str, float] = {}
        self._began = time.monotonic()
        self._environment = without_proxies(os.environ) | {
            "PATH": f"{programs.search_path()}:{SYSTEM_PATH}",
            "KUBECONFIG": str(layout.kubeconfig_of("admin")),
        }

    def run(self, ready: Callable[[], None]) -> None:
        """Bring the node up, call ``ready``, and stay until SIGTERM."""
        signal.signal(signal.SIGTERM, _request_stop)
        try:
            self._bring_up()
            ready()
            while True:
                self._reap()
                self._restart()
                time.sleep(0.5)
        except StopRequested:
            self._log("asked to stop")
        finally:
            self._stop()

    def _bring_up(self) -> None:
        self._start("etcd")
        self._start("containerd")
        self._wait("etcd", lambda: _listens(addresses.ETCD_PORT))
        self._start("kube-apiserver")
        self._wait("containerd", lambda: self._succeeds("ctr", "version"))
        for image in self._images:
            output("ctr", "--namespace=k8s.io", "images", "import", image, env=self._environment)
        self._wait("kube-apiserver", lambda: self._kubectl("get", "--raw", "/readyz"))
        for name in ("kube-controller-manager", "kube-scheduler", "kubelet", "kube-proxy", "coredns"):
            self._start(name)
        node_ready = ("wait", "--for=condition=Ready", f"node/{addresses.NODE}", "--timeout=1s")
        self._wait("the node", lambda: self._kubectl(*node_ready))
        self._wait("the default service account", lambda: self._kubectl("get", "serviceaccount", "default"))
        self._wait("DNS", lambda: _listens(addresses.DNS_READY_PORT) and _dns_ready())

    def _start(self, name: str) -> None:
        with (self._layout.log / f"{name}.log").open("ab") as log:
            self._running[name] = subprocess.Popen(
                self._commands[name], stdin=subprocess.DEVNULL, stdout=log, stderr=log, env=self._environment
            )

    def _wait(self, what: str, test: Callable[[], bool]) -> None:
        end = time.monotonic() + _PATIENCE
        while not test():
            for name, process in self._running.items():
                if process.poll() is not None:
                    log = self._layout.log / f"{name}.log"
                    raise ProblemError(
                        f"{name} ended with status {process.returncode}; the end of {log}:\n{tail(log)}"
                    )
            if time.monotonic() > end:
                raise ProblemError(
                    f"waited {_PATIENCE:.0f} s for {what}", f"look into the logs in {self._layout.log}"
                )
            time.sleep(0.1)
        self._log(f"{what}: ready")

    def _reap(self) -> None:
        """Collect every child that has ended: components, and orphans such as containerd's shims."""
        components = {process.pid: name for name, process in self._running.items()}
        while True:
            try:
                ended = os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT)
            except ChildProcessError:
                return
            if ended is None:
                return
            name = components.get(ended.si_pid)
            if name is None:
                os.waitpid(ended.si_pid, 0)
                continue
            status = self._running.pop(name).wait()
            count = self._restarts.get(name, 0)
            delay = _RESTART_AFTER[min(count, len(_RESTART_AFTER) - 1)]
            self._restarts[name] = count + 1
            self._due[name] = time.monotonic() + delay
            self._log(f"{name} ended with status {status}: starting it again in {delay:g} s")

    def _restart(self) -> None:
        for name in [name for name, due in self._due.items() if time.monotonic() >= due]:
            del self._due[name]
            self._start(name)

    def _stop(self) -> None:
        """Ask the components to end. What is left ends with this process, by the kernel's hand."""
        for name in STOP_ORDER:
            if name in self._running:
                self._running[name].terminate()
        end = time.monotonic() + 1
        while time.monotonic() < end and any(process.poll() is None for process in self._running.values()):
            time.sleep(0.05)

    def _succeeds(self, *command: str) -> bool:
        return succeeds(*command, env=self._environment)

    def _kubectl(self, *words: str) -> bool:
        return _listens(addresses.API_PORT) and self._succeeds("kubectl", "--request-timeout=2s", *words)

    def _log(self, text: str) -> None:
        print(f"{time.monotonic() - self._began:.2f} s: {text}", file=sys.stdout, flush=True)


def _request_stop(*_: object) -> None:
    raise StopRequested


def _listens(port: int) -> bool:
    with socket.socket() as client:
        return client.connect_ex((addresses.LOOPBACK, port)) == 0


def _dns_ready() -> bool:
    """Ask CoreDNS's readiness port, without urllib's proxy handling."""
    try:
        with socket.create_connection((addresses.LOOPBACK, addresses.DNS_READY_PORT), timeout=2) as client:
            client.sendall(b"GET /ready HTTP/1.0\r\n\r\n")
            return b" 200 " in client.recv(64)
    except OSError:
        return False
