"""Brings in the fixtures `cluster` and `demo`, of which a run has one each."""

from __future__ import annotations

import pytest

import cluster_fixture


def pytest_configure(config: pytest.Config) -> None:
    """Register once, whichever folder comes first."""
    if not config.pluginmanager.has_plugin("cluster_fixture"):
        config.pluginmanager.register(cluster_fixture, "cluster_fixture")
