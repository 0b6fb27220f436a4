"""How many CPUs a container may use."""

from __future__ import annotations

import math
from pathlib import Path

CGROUP = Path("/sys/fs/cgroup")


def cpu_quota(cgroup: Path = CGROUP) -> int | None:
    """The container's CPUs, rounded up; None where nothing limits them. Reads cgroup v2, then v1."""
    try:
        quota, period = (cgroup / "cpu.max").read_text().split()
    except (OSError, ValueError):
        try:
            quota = (cgroup / "cpu" / "cpu.cfs_quota_us").read_text().strip()
            period = (cgroup / "cpu" / "cpu.cfs_period_us").read_text().strip()
        except OSError:
            return None
    if not quota.isdecimal() or not period.isdecimal() or int(quota) == 0 or int(period) == 0:
        return None  # "max" and -1 are no limit
    return math.ceil(int(quota) / int(period))
