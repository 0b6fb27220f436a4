"""What preflight says, from facts about machines that are handed to it."""

from __future__ import annotations

import socket
import subprocess
from dataclasses import replace
from pathlib import Path

import pytest

from outrider_local import ports, preflight
from outrider_local.preflight import GIB, Disk, Machine, Taken
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
    hidden=(),
    taken=(),
    node_runs=False,
    missing_test_tools=(),
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
            replace(GOOD, taken=(Taken(8000, "nginx, process 12", 8003),)),
            "port 8000 on 127.0.0.1, meant for the model's API, is taken by nginx, process 12",
            "make up OUTRIDER_PORT=8003",
        ),
        (
            replace(GOOD, taken=(Taken(16443, "", 16444),)),
            "meant for the Kubernetes API, is taken\n",
            "OUTRIDER_API_PORT=16444",
        ),
        (
            replace(GOOD, hidden=(("XDG_CACHE_HOME", Path("/run/user/1000/outrider")),)),
            "the node reads /run/user/1000/outrider but would not see it",
            "set XDG_CACHE_HOME to another folder",
        ),
        (replace(GOOD, hidden=(("", Path("/run/src/.venv")),)), "/run/src/.venv", "move the checkout"),
    ],
)
def test_each_problem_says_what_is_wrong_and_what_to_do(machine: Machine, what: str, advice: str) -> None:
    text = said(machine)
    assert what in text
    assert advice in text


def test_memory_is_no_matter_when_the_node_runs_already() -> None:
    assert said(replace(GOOD, memory=0, node_runs=True)) == ""


def test_all_problems_are_told_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    machine = replace(
        GOOD, memory=0, taken=(Taken(8000, "", 8001),), apt=False, missing_tools=("runc", "etcd")
    )
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


@pytest.mark.parametrize(
    ("with_ports", "names"), [(True, ["runc"]), (False, ["runc", "redis-server", "redis-sentinel"])]
)
def test_only_tests_need_their_tools(
    with_ports: bool, names: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = replace(GOOD, missing_tools=("runc",), missing_test_tools=("redis-server", "redis-sentinel"))
    installed: list[str] = []
    monkeypatch.setattr(preflight, "gather", lambda _: machine)
    monkeypatch.setattr(preflight, "install", installed.extend)
    preflight.run(SETTINGS, with_ports=with_ports)
    assert installed == names
    assert set(preflight.TEST_TOOLS) == set(machine.missing_test_tools)


@pytest.mark.parametrize("systemd", [True, False])
def test_services_that_packages_start_are_ended_and_that_is_said(
    systemd: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    ran: list[list[str]] = []

    def run(command: list[str], **_: object) -> subprocess.CompletedProcess[bytes]:
        ran.append(command)
        return subprocess.CompletedProcess(command, 0)

    real = Path.exists
    monkeypatch.setattr(preflight.subprocess, "run", run)
    monkeypatch.setattr(
        Path, "exists", lambda path: systemd if str(path) == "/run/systemd/system" else real(path)
    )
    preflight.install(["runc", "etcd-server", "redis-server", "redis-sentinel"])
    ended = [command[-1] for command in ran if "systemctl" in command]
    services = ["etcd", "redis-server", "redis-sentinel"] if systemd else []
    assert ended == services
    said = capsys.readouterr().out
    for service in services:
        assert f"systemctl disable --now {service}" in said


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
        settings = replace(SETTINGS, port=port)
        problem = preflight.check(replace(GOOD, taken=(Taken(port, ports.holder(port), 8001),)), settings)[0]
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


def test_the_suggested_command_has_all_corrections_and_what_was_given() -> None:
    settings = replace(
        SETTINGS, given={"OUTRIDER_NAME": "two", "OUTRIDER_PORT": "8000", "XDG_STATE_HOME": "/a b"}
    )
    machine = replace(GOOD, taken=(Taken(16443, "", 16445), Taken(8000, "", 8002)))
    command = "make up OUTRIDER_NAME=two OUTRIDER_PORT=8002 XDG_STATE_HOME='/a b' OUTRIDER_API_PORT=16445"
    assert [problem.advice for problem in preflight.check(machine, settings)] == [
        f"choose another: {command}"
    ] * 2


def test_the_port_suggested_is_free_also_at_the_end_of_the_range(monkeypatch: pytest.MonkeyPatch) -> None:
    taken = {65535, 65534, 9000, 9001}
    monkeypatch.setattr(ports, "is_free", lambda port: port not in taken)
    assert ports.next_free(65535, 65533) == 65532
    assert ports.next_free(9000, 9002) == 9003


@pytest.mark.parametrize(
    ("cache", "checkout", "hidden"),
    [
        ("/home/me/.cache/outrider", "/src", []),
        ("/run/user/1000/outrider", "/src", ["XDG_CACHE_HOME"]),
        ("/sys/outrider", "/proc/src", ["XDG_CACHE_HOME", ""]),
        ("/var/cache/outrider", "/var/lib/me/src", []),
        ("/var/tmp/outrider", "/var/data/src", ["XDG_CACHE_HOME", ""]),
    ],
)
def test_folders_that_the_node_would_not_see(cache: str, checkout: str, hidden: list[str]) -> None:
    mountinfo = "\n".join(
        f"2{number} 1 254:{number} / {point} rw - ext4 /dev/vda rw"
        for number, point in enumerate(("/", "/var", "/var/tmp", "/var/data"))
    )
    settings = replace(SETTINGS, cache=Path(cache), checkout=Path(checkout))
    assert [variable for variable, _ in preflight.hidden_folders(settings, mountinfo)] == hidden
