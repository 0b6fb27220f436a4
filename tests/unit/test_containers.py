"""The lint of the container files accepts ours and names each fault."""

from __future__ import annotations

import importlib.util
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
_spec = importlib.util.spec_from_file_location("lint_containers", ROOT / "tools" / "lint_containers.py")
assert _spec is not None
assert _spec.loader is not None
lint = importlib.util.module_from_spec(_spec)
_spec.loader.exec_module(lint)


@pytest.mark.parametrize("image", ["operator", "serving"])
def test_ours_pass(image: str) -> None:
    assert lint.problems((ROOT / f"containers/{image}.Dockerfile").read_text(), image) == []


@pytest.mark.parametrize(
    ("old", "new", "named"),
    [
        ("python:3.12.12-slim-bookworm", "python:latest", "FROM python:latest"),
        ("--require-hashes ", "", "RUN"),
        ("USER 65532:65532", "USER root", "USER"),
        ("USER 65532:65532", "USER 0:0", "USER"),
        ('outrider_operator"]', 'outrider_serving"]', "ENTRYPOINT"),
        ("operator/outrider_operator ", "operator/missing ", "COPY operator/missing"),
        ("PYTHONPATH=/opt/outrider/app:", "PYTHONPATH=/app:", "ENV"),
    ],
)
def test_a_fault_is_named(old: str, new: str, named: str) -> None:
    text = (ROOT / "containers/operator.Dockerfile").read_text()
    assert old in text
    assert any(problem.startswith(named) for problem in lint.problems(text.replace(old, new), "operator"))
