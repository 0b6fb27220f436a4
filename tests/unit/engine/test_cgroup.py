"""What a container may use, as the kernel's files say it."""

from pathlib import Path

import pytest

from outrider_serving.engine.cgroup import cpu_limit, memory_limit


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
def test_cpus_by_version_2(tmp_path: Path, content: str, cpus: int | None) -> None:
    (tmp_path / "cpu.max").write_text(content + "\n")
    assert cpu_limit(tmp_path) == cpus


@pytest.mark.parametrize(("quota", "cpus"), [("300000", 3), ("-1", None)])
def test_cpus_by_version_1(tmp_path: Path, quota: str, cpus: int | None) -> None:
    (tmp_path / "cpu").mkdir()
    (tmp_path / "cpu" / "cpu.cfs_quota_us").write_text(quota + "\n")
    (tmp_path / "cpu" / "cpu.cfs_period_us").write_text("100000\n")
    assert cpu_limit(tmp_path) == cpus


@pytest.mark.parametrize(
    ("file", "content", "limit"),
    [
        ("memory.max", "2147483648", 2 << 30),
        ("memory.max", "max", None),
        ("memory/memory.limit_in_bytes", "1073741824", 1 << 30),
    ],
)
def test_memory(tmp_path: Path, file: str, content: str, limit: int | None) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / file).write_text(content + "\n")
    assert memory_limit(tmp_path) == limit


def test_version_2_goes_before_version_1(tmp_path: Path) -> None:
    (tmp_path / "memory").mkdir()
    (tmp_path / "memory" / "memory.limit_in_bytes").write_text("1000\n")
    (tmp_path / "memory.max").write_text("max\n")
    assert memory_limit(tmp_path) is None


def test_no_group_at_all(tmp_path: Path) -> None:
    assert cpu_limit(tmp_path) is None
    assert memory_limit(tmp_path) is None
