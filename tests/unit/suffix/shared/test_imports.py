"""What the shared log brings into the processes that use it."""

from __future__ import annotations

import subprocess
import sys

import pytest


@pytest.mark.parametrize(
    ("module", "unwanted"), [("log", {"torch", "numba"}), ("cli", {"torch", "numba", "numpy", "redis"})]
)
def test_nothing_heavy_is_imported(module: str, unwanted: set[str]) -> None:
    code = f"import sys, outrider_serving.suffix.shared.{module}; print(*sys.modules)"
    ran = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert unwanted.isdisjoint(ran.stdout.split())
