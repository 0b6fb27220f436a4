"""How many CPUs a container has, as the kernel's files say it."""

from pathlib import Path

import pytest

from outrider_serving.engine.process.cpus import cpu_quota


@pytest.mark.parametrize(
    ("content", "cpus"),
    [
        ("200000 100000", 2),
        ("150000 100000", 2),
        ("10000 100000", 1),
        ("max 100000", None),
        ("", None),
        ("0 100000", None),
    ],
)
def test_version_2(tmp_path: Path, content: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert cpu_quota(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", None)])
def test_version_1(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_quota(tmp_path) == cpus


def test_no_group_at_all(tmp_path: Path) -> None:
    assert cpu_quota(tmp_path) is None
