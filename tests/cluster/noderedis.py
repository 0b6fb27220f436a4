"""A Redis for pods: a process of the node, on the node's address.

It listens in the node's network alone, which no packet enters or leaves: the node and its pods reach it, and
of the machine only what enters that network. Whatever becomes of the tests, the kernel ends it with the node.
"""

from __future__ import annotations

import secrets
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Final

from cluster.operated import eventually
from cluster_fixture import LocalCluster
from outrider_local.addresses import NODE_IP

PORT: Final = 6379
"""Free: who listens in the node's network is known, and nobody does here."""


class NodeRedis:
    """One server with a password; what it holds ends with it."""

    def __init__(self, cluster: LocalCluster) -> None:
        self._cluster = cluster
        self._folder = cluster.settings.state / "redis-of-tests"
        self._log = self._folder / "log"
        self._pid = self._folder / "pid"
        self.auth = self._folder / "auth"
        """A folder with the password, as `outrider suffix` takes it."""
        self.auth.mkdir(parents=True)
        self._set_password()

    @property
    def url(self) -> str:
        return f"redis://{NODE_IP}:{PORT}/0"

    def start(self) -> None:
        """Start it, empty, and wait until it answers."""
        settings = {
            "bind": NODE_IP,
            "port": PORT,
            "requirepass": self.password,
            "save": '""',
            "dir": self._folder,
            "logfile": self._log,
            "pidfile": self._pid,
            "daemonize": "yes",
        }
        file = self._folder / "redis.conf"
        file.write_text("".join(f"{name} {value}\n" for name, value in settings.items()))
        self._cluster.inside("redis-server", str(file))
        eventually(self._answers, 10, self._log.read_text)

    def kill(self) -> None:
        """As a power cut does; it is gone when this returns."""
        pid = self._pid.read_text().strip()  # as the node counts
        gone = f"while kill -0 {pid} 2>/dev/null; do sleep 0.05; done"
        self._cluster.inside("timeout", "10", "sh", "-c", f"kill -KILL {pid}; {gone}")
        self._pid.unlink()

    @contextmanager
    def away(self) -> Iterator[None]:
        """Killed for a while; then it is back, and empty."""
        self.kill()
        try:
            yield
        finally:
            self.start()

    def rotate(self) -> None:
        """Take another password, and let nobody stay who came with the old one."""
        old = self.password
        self._set_password()
        self._cluster.inside(*_client(old, "config", "set", "requirepass", self.password))
        self._cluster.inside(*_client(self.password, "client", "kill", "type", "normal"))

    def end(self) -> None:
        """Make sure that it is gone."""
        if self._pid.exists():
            self.kill()

    def _set_password(self) -> None:
        self.password = secrets.token_hex(16)
        (self.auth / "password").write_text(self.password)

    def _answers(self) -> bool:
        words = ("node", "exec", *_client(self.password, "ping"))
        return self._cluster.attempt(*words, environment=self._cluster.environment).returncode == 0


def _client(password: str, *words: str) -> tuple[str, ...]:
    """A command line that says this to the server, and fails where that refuses."""
    return ("env", f"REDISCLI_AUTH={password}", "redis-cli", "-e", "-h", NODE_IP, "-p", str(PORT), *words)


@contextmanager
def node_redis(cluster: LocalCluster) -> Iterator[NodeRedis]:
    """A server that runs, and has ended after the block."""
    server = NodeRedis(cluster)
    try:
        server.start()
        yield server
    finally:
        server.end()
