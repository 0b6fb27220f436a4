"""What every test shares: how much of each property is sampled.

`make test` samples each property with fixed seeds; `make test-long` (OUTRIDER_TEST_LONG=1) runs the same
code with full counts.
"""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

LONG = os.environ.get("OUTRIDER_TEST_LONG") == "1"

_quiet = [HealthCheck.too_slow, HealthCheck.function_scoped_fixture]
settings.register_profile(
    "sample", max_examples=30, derandomize=True, deadline=None, suppress_health_check=_quiet
)
settings.register_profile("long", max_examples=300, deadline=None, suppress_health_check=_quiet)
settings.load_profile("long" if LONG else "sample")
