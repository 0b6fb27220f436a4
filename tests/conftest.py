"""What every test shares: how much of each property is sampled.

`make test` samples each property with fixed seeds; `make test-long` (OUTRIDER_TEST_LONG=1) runs the same
code with full counts.
"""

from __future__ import annotations

import gc
import os
from collections.abc import Generator

import pytest
from hypothesis import HealthCheck, settings
from xdist.scheduler import LoadScopeScheduling

# Several processes share the machine's cores: torch's threads would spend their time waiting for each other.
# Servers that tests start have it from here.
os.environ.setdefault("OMP_NUM_THREADS", "1")

LONG = os.environ.get("OUTRIDER_TEST_LONG") == "1"

_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "sample", max_examples=12, derandomize=True, deadline=None, suppress_health_check=_quiet
)
settings.register_profile("long", max_examples=300, deadline=None, suppress_health_check=_quiet)
settings.load_profile("long" if LONG else "sample")

_TOGETHER = {
    "another node": ["cluster/test_cgroup_v2", "cluster/test_node", "cluster/test_shared_cache", "e2e/"],
    "a node": ["cluster/"],
    "gateways": ["serving/api/test_gateways"],
    "a server": ["serving/api/test_bad_input", "serving/api/test_live", "serving/api/test_openai_client"],
    "kernels": ["serving/engine/test_compared", "serving/engine/test_graphs", "serving/engine/test_triton"],
    "the real model": [
        "serving/engine/test_grammar_real",
        "serving/engine/test_loading.py::test_the_real_model",
        "serving/engine/test_native.py::test_this_machine",
        "serving/engine/test_real_model",
    ],
}
"""What shares something that takes long to make: one process has all of it. The first that fits counts.

What operators do is on the first node, which test_rights.py judges, but for what others do there as well.
"""


class _Together(LoadScopeScheduling):
    """Processes take one test after the other, but for those that belong together."""

    def _split_scope(self, nodeid: str) -> str:
        path = nodeid.removeprefix("tests/")
        return next((name for name, files in _TOGETHER.items() if path.startswith(tuple(files))), nodeid)


@pytest.hookimpl(wrapper=True)
def pytest_collection() -> Generator[None, object, object]:
    """What modules define and what tests there are stays; to look for garbage in it was a third of all."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.enable()


def pytest_xdist_make_scheduler(config: pytest.Config, log: object) -> LoadScopeScheduling:
    """How `pytest -n` shares the tests out."""
    # Else those with the most tests came first; the nodes' last longest, and are the first as they stand.
    config.option.loadscopereorder = False
    return _Together(config, log)
