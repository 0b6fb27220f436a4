"""Servers for each test, and certificates for all."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from serving.suffix.redis_server import Certificates, RedisServer, Servers, servers


@pytest.fixture
def some(tmp_path: Path) -> Iterator[Servers]:
    with servers(tmp_path / "redis") as started:
        yield started


@pytest.fixture
def server(some: Servers) -> RedisServer:
    return some.redis()


@pytest.fixture(scope="session")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Certificates:
    return Certificates.make(tmp_path_factory.mktemp("certificates"))


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Redis has a quarter of the usual time to answer."""
    monkeypatch.setattr("outrider_serving.suffix.shared.connection.CALL_SECONDS", 0.5)
