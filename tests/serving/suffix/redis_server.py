"""Real Redis servers on loopback, each with a folder of its own; whatever happens, none outlives its test."""

from __future__ import annotations

import contextlib
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import redis

from outrider_local.ports import free_port

PATIENCE = 20.0


@dataclass(frozen=True)
class Certificates:
    """Files of an authority, and of a server on 127.0.0.1 that it signed."""

    authority: Path
    certificate: Path
    key: Path

    @staticmethod
    def make(folder: Path) -> Certificates:
        def openssl(*arguments: str | Path) -> None:
            subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

        made = Certificates(folder / "ca.pem", folder / "server.pem", folder / "server.key")
        curve = ("-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes")
        days = ("-days", "2")
        openssl("req", "-x509", *curve, *days, "-subj", "/CN=test", "-keyout", "ca.key", "-out", "ca.pem")
        openssl("req", *curve, "-subj", "/CN=server", "-keyout", "server.key", "-out", "server.csr")
        (folder / "names").write_text("subjectAltName=IP:127.0.0.1\n")
        signer = ("-CA", "ca.pem", "-CAkey", "ca.key", "-CAcreateserial", "-extfile", "names")
        openssl("x509", "-req", "-in", "server.csr", *signer, *days, "-out", "server.pem")
        return made


class RedisServer:
    """One server; it keeps its port and its folder when it is started again."""

    def __init__(self, folder: Path, *arguments: str, tls: Certificates | None = None) -> None:
        self.folder = folder
        self.port = free_port()
        self.tls = tls
        self._arguments = arguments
        self._process: subprocess.Popen[bytes] | None = None
        folder.mkdir(parents=True, exist_ok=True)

    @property
    def url(self) -> str:
        return f"{'rediss' if self.tls else 'redis'}://127.0.0.1:{self.port}/0"

    def start(self) -> RedisServer:
        until = time.monotonic() + PATIENCE
        with (self.folder / "log").open("ab") as log:
            self._process = subprocess.Popen(self._command(), stdout=log, stderr=log, cwd=self.folder)
        while True:
            try:
                self._is_up()
            except redis.RedisError:
                if self._process.poll() is not None or time.monotonic() > until:
                    text = (self.folder / "log").read_text(errors="replace")
                    self.kill()
                    raise AssertionError(f"redis did not start:\n{text[-2000:]}") from None
                time.sleep(0.02)
            else:
                return self

    def _is_up(self) -> None:
        with self.client() as client:
            client.ping()

    def _command(self) -> list[str]:
        ports = ["--port", str(self.port)]
        if self.tls is not None:
            ports = ["--port", "0", "--tls-port", str(self.port), "--tls-auth-clients", "no"]
            ports += ["--tls-ca-cert-file", str(self.tls.authority)]
            ports += ["--tls-cert-file", str(self.tls.certificate), "--tls-key-file", str(self.tls.key)]
        quiet = ["--bind", "127.0.0.1", "--save", "", "--dir", str(self.folder), "--daemonize", "no"]
        quiet += ["--repl-diskless-sync-delay", "0"]
        return ["redis-server", *ports, *quiet, *self._arguments]

    def client(self, **more: object) -> redis.Redis:
        """A client that fails at once."""
        options: dict[str, object] = {"socket_timeout": 5, "retry": None, "protocol": 2} | more
        if self.tls is not None:
            options |= {"ssl": True, "ssl_ca_certs": str(self.tls.authority)}
        return redis.Redis(host="127.0.0.1", port=self.port, **options)  # type: ignore[arg-type]

    def kill(self) -> None:
        """As a power cut does."""
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            self._process = None


class Sentinel(RedisServer):
    """A Sentinel that watches one master and needs nobody's agreement."""

    def __init__(self, folder: Path, master: RedisServer) -> None:
        super().__init__(folder)
        (folder / "sentinel.conf").write_text(
            f"port {self.port}\nbind 127.0.0.1\ndir {folder}\n"
            f"sentinel monitor outrider 127.0.0.1 {master.port} 1\n"
            "sentinel down-after-milliseconds outrider 500\nsentinel failover-timeout outrider 2000\n"
        )

    @property
    def url(self) -> str:
        return f"redis-sentinel://127.0.0.1:{self.port}/outrider"

    def _command(self) -> list[str]:
        return ["redis-sentinel", str(self.folder / "sentinel.conf")]


class Servers:
    """Starts servers, and ends all of them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._started: list[RedisServer] = []

    def redis(self, *arguments: str, tls: Certificates | None = None) -> RedisServer:
        return self._start(RedisServer(self._next(), *arguments, tls=tls))

    def replica(self, master: RedisServer) -> RedisServer:
        """A server that has all that the master has."""
        replica = self.redis("--replicaof", "127.0.0.1", str(master.port))
        with replica.client() as client:
            until = time.monotonic() + PATIENCE
            while client.info("replication")["master_link_status"] != "up":
                assert time.monotonic() < until
                time.sleep(0.02)
        return replica

    def sentinel(self, master: RedisServer) -> Sentinel:
        sentinel = Sentinel(self._next(), master)
        self._start(sentinel)
        return sentinel

    def cluster(self, size: int = 3) -> list[RedisServer]:
        """Masters that share all slots."""
        nodes = []
        for _ in range(size):
            bus = free_port()
            nodes.append(self.redis("--cluster-enabled", "yes", "--cluster-port", str(bus)))
        for index, node in enumerate(nodes):
            with node.client() as client:
                first, last = 16384 * index // size, 16384 * (index + 1) // size - 1
                client.execute_command("CLUSTER", "ADDSLOTSRANGE", first, last)
                for other in nodes:
                    bus_port = other.client().config_get("cluster-port")["cluster-port"]
                    client.execute_command("CLUSTER", "MEET", "127.0.0.1", other.port, bus_port)
        until = time.monotonic() + PATIENCE
        for node in nodes:
            with node.client() as client:
                while client.execute_command("CLUSTER INFO")["cluster_state"] != "ok":
                    assert time.monotonic() < until
                    time.sleep(0.05)
        return nodes

    def _next(self) -> Path:
        return self._folder / str(len(self._started))

    def _start(self, server: RedisServer) -> RedisServer:
        self._started.append(server)
        return server.start()

    def end(self) -> None:
        for server in self._started:
            server.kill()


@contextlib.contextmanager
def servers(folder: Path) -> Iterator[Servers]:
    """Servers that end with the block."""
    started = Servers(folder)
    try:
        yield started
    finally:
        started.end()
