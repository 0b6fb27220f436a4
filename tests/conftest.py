"""What every test shares: how much of each property is sampled.

`make test` samples each property with fixed seeds; `make test-long` (OUTRIDER_TEST_LONG=1) runs the same
code with full counts.
"""

from __future__ import annotations

import os

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Several processes share the machine's cores: torch's threads would spend their time waiting for each other.
# Servers that tests start have it from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = os.environ.get("OUTRIDER_TEST_LONG") == "1"

_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "sample", max_examples=20, derandomize=True, deadline=None, suppress_health_check=_quiet
)
settings.register_profile("long", max_examples=300, deadline=None, suppress_health_check=_quiet)
settings.load_profile("long" if LONG else "sample")

_ON_A_NODE = "tests/cluster/"
_ON_ANOTHER = (
    "tests/cluster/test_cgroup_v2.py",
    "tests/cluster/test_node.py",
    "tests/cluster/test_shared_cache.py",
    "tests/e2e/",
)
"""What operators do is on the first, which test_rights.py judges, but for what others do there as well."""


class _TwoNodes(LoadScopeScheduling):
    """Of several processes two have a node each, and all the tests on it, in their order."""

    def _split_scope(self, nodeid: str) -> str:
        if nodeid.startswith(_ON_ANOTHER):
            return "another node"
        return "a node" if nodeid.startswith(_ON_A_NODE) else nodeid


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """How `pytest -n` shares the tests out."""
    return _TwoNodes(config, log)
