"""Cgroup plans from the trees of five kinds of machine (v2 among them, which the tests' machine may lack)."""

from __future__ import annotations

import subprocess
from pathlib import Path

import pytest

from outrider_local import cgroups
from outrider_local.report import ProblemError

TREES = Path(__file__).parent / "trees"


def plan_on(tree: str, files: Path | None = None) -> cgroups.Plan:
    root = TREES / tree

    def read(path: str) -> str | None:
        return cgroups.read_file(f"{files or root}{path}")

    return cgroups.plan("outrider", (root / "mountinfo").read_text(), (root / "cgroup").read_text(), read)


def test_hybrid_machine_uses_v1_below_its_own_cgroups() -> None:
    plan = plan_on("this-hybrid")

    assert plan.version == 1
    assert "/sys/fs/cgroup/memory/shells/9ec3d582/outrider" in plan.directories
    assert "/sys/fs/cgroup/cpu/outrider" in plan.directories
    assert len(plan.directories) == len(cgroups.V1_CONTROLLERS)
    assert plan.cpuset == "/sys/fs/cgroup/cpuset/outrider"
    systemd = next(mount for mount in plan.mounts if mount.point == "/sys/fs/cgroup/systemd")
    assert systemd.options == "none,name=systemd"
    assert not any("unified" in directory for directory in plan.directories)


def test_controllers_that_share_a_hierarchy_are_mounted_once_with_links() -> None:
    plan = plan_on("systemd-v1")

    together = next(mount for mount in plan.mounts if "cpuacct" in mount.options)
    assert together == cgroups.InnerMount(
        "cgroup", "cpu,cpuacct", "/sys/fs/cgroup/cpu,cpuacct", ("cpu", "cpuacct")
    )
    assert "/sys/fs/cgroup/cpu,cpuacct/user.slice/outrider" in plan.directories
    assert len(plan.directories) == len(cgroups.V1_CONTROLLERS) - 1


def test_v2_machine_gets_a_cgroup_at_the_root_and_nobody_is_moved() -> None:
    plan = plan_on("ubuntu-v2")

    assert plan.version == 2
    assert plan.directories == ("/sys/fs/cgroup/outrider",)
    assert plan.controllers == ("cpu", "cpuset", "memory", "pids", "io", "hugetlb")
    assert not plan.evacuate  # processes in the machine's real root do not stand in the way
    assert plan.mounts == (cgroups.InnerMount("cgroup2", "", "/sys/fs/cgroup"),)


def test_v2_container_has_to_clear_its_root_first() -> None:
    plan = plan_on("container-v2")

    assert plan.version == 2
    assert plan.evacuate


def test_read_only_v2_says_what_to_do() -> None:
    with pytest.raises(ProblemError, match="mounted read-only") as caught:
        plan_on("readonly-v2")
    assert "privileged container" in caught.value.advice


def test_v2_without_a_controller_names_it(tmp_path: Path) -> None:
    folder = tmp_path / "sys/fs/cgroup"
    folder.mkdir(parents=True)
    (folder / "cgroup.controllers").write_text("cpu io pids\n")
    with pytest.raises(ProblemError, match="lacks cpuset, memory"):
        plan_on("ubuntu-v2", tmp_path)


def test_v1_without_a_hierarchy_names_it() -> None:
    lines = (TREES / "this-hybrid" / "mountinfo").read_text().splitlines()
    mountinfo = "\n".join(line for line in lines if "systemd" not in line)
    with pytest.raises(ProblemError, match="without name=systemd"):
        cgroups.plan("outrider", mountinfo, "0::/", lambda _: None)


def test_no_cgroups_at_all() -> None:
    with pytest.raises(ProblemError, match="no cgroup hierarchy"):
        cgroups.plan("outrider", "23 1 254:0 / / rw - ext4 /dev/vda rw", "0::/", lambda _: None)


def test_mount_points_with_spaces_are_decoded() -> None:
    mounts = cgroups.parse_mountinfo((TREES / "ubuntu-v2" / "mountinfo").read_text())
    assert mounts[-1].point == "/home/a b"
    assert mounts[-1].kind == "xfs"


def test_v2_steps_on_a_tree_of_plain_files(tmp_path: Path) -> None:
    """The writes that `make` does, on ordinary files instead of a kernel."""
    root = tmp_path / "cgroup"
    root.mkdir()
    (root / "cgroup.procs").write_text("1\n27\n")
    (root / "cgroup.subtree_control").write_text("cpu\n")
    plan = cgroups.Plan(
        2, (f"{root}/outrider",), (), controllers=("cpu", "memory"), parent=str(root), evacuate=True
    )

    cgroups.make(plan)

    assert (root / "outrider").is_dir()
    assert (root / cgroups.EVACUATED_LEAF / "cgroup.procs").read_text() == "27"
    assert (root / "cgroup.subtree_control").read_text() == "+memory"


def test_v1_cpuset_is_filled_before_a_process_comes(tmp_path: Path) -> None:
    parent = tmp_path / "cpuset"
    parent.mkdir()
    (parent / "cpuset.cpus").write_text("0-1\n")
    (parent / "cpuset.mems").write_text("0\n")
    mine = str(parent / "outrider")

    cgroups.make(cgroups.Plan(1, (mine,), (), cpuset=mine))

    assert Path(mine, "cpuset.cpus").read_text() == "0-1\n"
    assert Path(mine, "cpuset.mems").read_text() == "0\n"
    assert Path(mine, "cgroup.clone_children").read_text() == "1"


def test_remove_is_deep_and_reports_what_stays(tmp_path: Path) -> None:
    gone, stays = tmp_path / "gone", tmp_path / "stays"
    (gone / "kubepods" / "burstable").mkdir(parents=True)
    stays.mkdir()
    (stays / "occupied").write_text("")

    left = cgroups.remove([str(gone), str(stays), str(tmp_path / "never")], seconds=0)

    assert left == [str(stays)]
    assert not gone.exists()


def test_cgroups_are_found_by_name_wherever_they_lie(tmp_path: Path) -> None:
    mine = tmp_path / "memory" / "shells" / "9ec3d582" / "outrider-1"
    (mine / "kubepods").mkdir(parents=True)
    (tmp_path / "memory" / "outrider-2").mkdir()
    (tmp_path / "disk" / "outrider-1").mkdir(parents=True)
    mountinfo = "\n".join(
        f"23 1 0:9 / {tmp_path}/{point} rw - {kind} none rw"
        for point, kind in (("memory", "cgroup"), ("disk", "ext4"))
    )
    assert cgroups.find("outrider-1", mountinfo) == [str(mine)]

    with subprocess.Popen(["sleep", "60"]) as process:
        (mine / "kubepods" / "cgroup.procs").write_text(f"{process.pid}\n")
        assert [one.pid for one in cgroups.members([str(mine)])] == [process.pid]
        process.kill()
