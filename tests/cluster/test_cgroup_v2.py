"""The steps of a cgroup v2 node on a real v2 hierarchy.

Runs wherever one is mounted, also beside v1 without any controller: then what is shown is the order of moves
and the namespace, which is where it could go wrong; the unit tests' recorded trees have the controllers.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from outrider_local import cgroups

STEPS = """
import json, sys
from pathlib import Path
from outrider_local import cgroups, isolate, namespaces
from outrider_local.shell import output
parent, name, *controllers = sys.argv[1:]
inner = cgroups.InnerMount("cgroup2", "", cgroups.ROOT)
plan = cgroups.Plan(2, (f"{parent}/{name}",), (inner,), controllers=tuple(controllers), parent=parent)
cgroups.make(plan)
cgroups.enter(plan)
namespaces.unshare(namespaces.NEW_MOUNT | namespaces.NEW_CGROUP)
cgroups.settle(plan)
output("mount", "--make-rprivate", "/")
isolate.mount_cgroups(plan)
root = Path(cgroups.ROOT)
(root / "kubepods").mkdir()
print(json.dumps({
    "own": Path("/proc/self/cgroup").read_text().splitlines()[-1],
    "in root": (root / "cgroup.procs").read_text(),
    "children": sorted(path.name for path in root.iterdir() if path.is_dir()),
    "handed down": (root / "cgroup.subtree_control").read_text().split(),
}))
"""


def test_a_node_settles_in_its_own_cgroup() -> None:
    mounts = cgroups.parse_mountinfo(Path("/proc/self/mountinfo").read_text())
    unified = [m.point for m in mounts if m.kind == "cgroup2" and "rw" in m.options]
    if not unified or os.geteuid() != 0:
        pytest.skip("needs root and a mounted cgroup v2 hierarchy")
    parent, name = unified[0], f"outrider-test-{os.getpid()}-v2"
    if Path(parent, "cgroup.type").exists():
        pytest.skip(f"{parent} is no real root: other processes would have to be moved")
    controllers = [
        c for c in cgroups.V2_CONTROLLERS if c in Path(parent, "cgroup.controllers").read_text().split()
    ]
    try:
        command = [sys.executable, "-c", STEPS, parent, name, *controllers]
        environment = {**os.environ, "PYTHONPATH": str(Path(cgroups.__file__).parents[1])}
        done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
        said = json.loads(done.stdout)
        assert said["own"] == "0::/node"
        assert said["in root"] == ""
        assert said["children"] == ["kubepods", "node"]
        assert set(said["handed down"]) >= set(controllers)
    finally:
        assert cgroups.remove([f"{parent}/{name}"]) == []
