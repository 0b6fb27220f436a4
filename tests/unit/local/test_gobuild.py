"""When a Go program is built again, and when it is not."""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path

import pytest

from outrider_local import gobuild
from outrider_local.gobuild import MODULES, Module
from outrider_local.settings import from_environment

SOURCES = from_environment({"HOME": "/home/me"}).checkout / "local" / "go"
MODULE = Module("dns", (".",), file="coredns")


@pytest.fixture
def sources(tmp_path: Path) -> Path:
    shutil.copytree(SOURCES / "dns", tmp_path / "dns")
    return tmp_path


def test_the_key_is_the_same_for_the_same_sources(sources: Path) -> None:
    assert gobuild.key(MODULE, sources, "x86_64") == gobuild.key(MODULE, SOURCES, "x86_64")


@pytest.mark.parametrize("file", ["go.sum", "go.mod", "main.go", "new/more.go"])
def test_the_key_changes_with_every_source(sources: Path, file: str) -> None:
    before = gobuild.key(MODULE, sources)
    path = sources / "dns" / file
    path.parent.mkdir(exist_ok=True)
    with path.open("a") as text:
        text.write("\n")
    assert gobuild.key(MODULE, sources) != before


@pytest.mark.parametrize(
    "change", [{"tags": "netgo"}, {"linker": "-X a.b=c"}, {"links": ("dig",)}, {"file": "dns"}]
)
def test_the_key_changes_with_the_build(sources: Path, change: dict[str, str]) -> None:
    assert gobuild.key(replace(MODULE, **change), sources) != gobuild.key(MODULE, sources)
    assert gobuild.key(MODULE, sources, "x86_64") != gobuild.key(MODULE, sources, "aarch64")


def test_other_files_do_not_matter(sources: Path) -> None:
    before = gobuild.key(MODULE, sources)
    (sources / "dns" / "notes.txt").write_text("hello")
    assert gobuild.key(MODULE, sources) == before


@pytest.mark.parametrize("name", sorted(MODULES))
def test_every_module_has_its_sums_committed(name: str) -> None:
    folder = SOURCES / name
    assert (folder / "go.mod").read_text().startswith(f"module outrider.dev/local/{name}\n")
    assert name == "pause" or (folder / "go.sum").stat().st_size > 0


def test_programs_are_found_by_name(tmp_path: Path) -> None:
    programs = gobuild.programs(SOURCES.parents[1], tmp_path)
    assert programs.path("kubectl").name == "kubectl"
    assert programs.path("kubectl").parent == programs.path("kubelet").parent
    assert programs.path("bridge").parent == programs.path("ctr").parent
    assert {module.name for module in programs.missing} == set(MODULES)
    with pytest.raises(Exception, match="no module builds nginx"):
        programs.path("nginx")


@pytest.mark.parametrize(
    ("text", "version"),
    [
        ("go version go1.26.8 linux/amd64", (1, 26, 8)),
        ("go version go1.27 linux/arm64", (1, 27, 0)),
        ("module outrider.dev/local/kube\n\ngo 1.26.0\n", (1, 26, 0)),
        ("nonsense", (0, 0, 0)),
    ],
)
def test_go_versions(text: str, version: tuple[int, int, int]) -> None:
    assert gobuild.parse_go_version(text) == version


def test_the_packaged_go_is_new_enough_for_every_module() -> None:
    packaged = tuple(int(part) for part in gobuild.GO_PACKAGE.partition("==")[2].split("."))
    for name in MODULES:
        assert gobuild.parse_go_version((SOURCES / name / "go.mod").read_text()) <= packaged
