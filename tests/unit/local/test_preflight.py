"""What preflight says, from facts about machines that are handed to it."""

from __future__ import annotations

import socket
from dataclasses import replace
from pathlib import Path

import pytest

from outrider_local import ports, preflight
from outrider_local.preflight import GIB, Disk, Machine
from outrider_local.report import EXIT_USAGE, ProblemError
from outrider_local.settings import Settings

SETTINGS = Settings(Path("/src"), Path("/home/me/.cache/outrider"), Path("/home/me/.local/state/outrider"))
GOOD = Machine(
    system="Linux",
    architecture="x86_64",
    python=(3, 11),
    root=False,
    sudo=True,
    apt=True,
    missing_tools=(),
    ensurepip=True,
    memory=16 * GIB,
    disks=(Disk("/", 100 * GIB, 15 * GIB, ("the Python packages 6.5",)),),
    state_file_system="ext4",
    cgroup_problem=None,
    taken={},
    node_runs=False,
)


def said(machine: Machine) -> str:
    return "\n".join(str(problem) for problem in preflight.check(machine, SETTINGS))


def test_a_good_machine() -> None:
    assert preflight.check(GOOD, SETTINGS) == []
    assert preflight.packages(GOOD) == []


@pytest.mark.parametrize(
    ("machine", "what", "advice"),
    [
        (replace(GOOD, system="Darwin"), "this is Darwin", "cluster of your own"),
        (replace(GOOD, architecture="riscv64"), "riscv64", "aarch64"),
        (replace(GOOD, python=(3, 9)), "this Python is 3.9", "make PYTHON=python3.12 up"),
        (replace(GOOD, sudo=False), "no sudo", "as root"),
        (replace(GOOD, memory=GIB), "1.0 GiB of memory", "end other programs"),
        (
            replace(
                GOOD, disks=(Disk("/home", 3 * GIB, 8 * GIB, ("the Python packages 6.5", "the node 2")),)
            ),
            "3.0 GiB are free at /home, 8.0 GiB are needed (the Python packages 6.5, the node 2)",
            "XDG_CACHE_HOME",
        ),
        (replace(GOOD, state_file_system="overlay"), "lies on overlay", "ext4, xfs or btrfs"),
        (replace(GOOD, state_file_system="fuse.sshfs"), "lies on fuse.sshfs", "XDG_STATE_HOME"),
        (replace(GOOD, cgroup_problem=ProblemError("no cgroups", "mount them")), "no cgroups", "mount them"),
        (
            replace(GOOD, taken={8000: "nginx, process 12"}),
            "port 8000 on 127.0.0.1, meant for the model's API, is taken by nginx, process 12",
            "make up OUTRIDER_PORT=8001",
        ),
        (
            replace(GOOD, taken={16443: ""}),
            "meant for the Kubernetes API, is taken\n",
            "OUTRIDER_API_PORT=16444",
        ),
    ],
)
def test_each_problem_says_what_is_wrong_and_what_to_do(machine: Machine, what: str, advice: str) -> None:
    text = said(machine)
    assert what in text
    assert advice in text


def test_memory_is_no_matter_when_the_node_runs_already() -> None:
    assert said(replace(GOOD, memory=0, node_runs=True)) == ""


def test_all_problems_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(GOOD, memory=0, taken={8000: ""}, apt=False, missing_tools=("runc", "etcd"))
    monkeypatch.setattr(preflight, "gather", lambda _: machine)

    with pytest.raises(ProblemError) as caught:
        preflight.run(SETTINGS)

    assert caught.value.exit_code == EXIT_USAGE
    for part in ("memory", "port 8000", "not installed: runc, etcd", "Debian calls them runc etcd-server"):
        assert part in str(caught.value)


def test_missing_tools_are_installed_once_each_where_apt_is(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(GOOD, missing_tools=("ip", "iptables"), ensurepip=False)
    installed: list[str] = []
    monkeypatch.setattr(preflight, "gather", lambda _: machine)
    monkeypatch.setattr(preflight, "install", installed.extend)

    preflight.run(SETTINGS)

    assert installed == ["iproute2", "iptables", "python3-venv"]


def test_what_root_does_is_said_before(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(preflight, "gather", lambda _: GOOD)
    preflight.run(SETTINGS)
    output = capsys.readouterr().out
    assert "sudo is used for" in output
    assert "namespaces, mounts and cgroups" in output


def test_disk_needs_shrink_with_what_is_there() -> None:
    def total(*, there: bool, apart: bool = False) -> float:
        wanted = preflight.needs(
            SETTINGS, environment_made=there, uv_apart=apart, built=there, node_runs=there
        )
        return sum(gibibytes for _, gibibytes, _ in wanted)

    assert total(there=False) == 15
    assert total(there=False, apart=True) == 21.5
    assert total(there=True) < 1


def test_a_really_taken_port_names_its_holder() -> None:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        server.listen()
        port = server.getsockname()[1]
        assert not ports.is_free(port)
        problem = preflight.check(replace(GOOD, taken={port: ports.holder(port)}), SETTINGS)[0]
        assert "process" in problem.what
    assert ports.is_free(port)


def test_holder_of_a_port_in_the_kernels_table() -> None:
    rest = "00000000:00000000 00:00000000 00000000 1000 0"
    table = (
        "  sl  local_address rem_address   st tx_queue:rx_queue tr:tm->when retrnsmt uid timeout inode\n"
        f"   0: 0100007F:1F40 00000000:0000 0A {rest} 4711 1 0\n"
        f"   1: 0100007F:1F40 0100007F:9C40 01 {rest} 4712 1 0\n"
    )
    assert ports.listening_inodes(table, 8000) == {"4711"}
    assert ports.listening_inodes(table, 8001) == set()


def test_the_file_system_of_a_path_that_does_not_exist_yet() -> None:
    mountinfo = (Path(__file__).parent / "trees" / "ubuntu-v2" / "mountinfo").read_text()
    assert preflight.file_system(Path("/home/a b/.local/state/outrider"), mountinfo) == "xfs"
    assert preflight.file_system(Path("/srv/outrider"), mountinfo) == "ext4"
