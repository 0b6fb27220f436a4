"""Compiled kernels are kept for the very sources and the very compiler that made them."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from outrider_local import kernels
from outrider_local.settings import from_environment

CHECKOUT = from_environment({"HOME": "/home/me"}).checkout


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """One whose kernels are compiled."""
    folder = tmp_path / "checkout" / kernels.FOLDER
    folder.mkdir(parents=True)
    for source in kernels.sources(CHECKOUT):
        shutil.copy2(source, folder)
    (folder / "kernels-a.so").write_bytes(b"compiled")
    (folder / "kernels-a.so.stamp").write_text("stamp")
    return tmp_path / "checkout"


def _remove(checkout: Path) -> None:
    for file in (checkout / kernels.FOLDER).glob("*.so*"):
        file.unlink()


def _there(checkout: Path) -> dict[str, bytes]:
    return {file.name: file.read_bytes() for file in (checkout / kernels.FOLDER).glob("*.so*")}


def test_a_new_checkout_gets_what_another_has_compiled(checkout: Path, tmp_path: Path) -> None:
    compiled = _there(checkout)
    kernels.keep(checkout, tmp_path / "cache")
    _remove(checkout)
    assert kernels.put_back(checkout, tmp_path / "cache")
    assert _there(checkout) == compiled
    kernels.keep(checkout, tmp_path / "cache")
    assert len(list((tmp_path / "cache" / "kernels").iterdir())) == 1


def test_an_empty_cache_has_nothing(checkout: Path, tmp_path: Path) -> None:
    _remove(checkout)
    kernels.keep(checkout, tmp_path / "cache")
    assert not kernels.put_back(checkout, tmp_path / "cache")
    assert not _there(checkout)


@pytest.mark.parametrize("name", ["suffix.cpp", "vectors.h", "build.py"])
def test_another_source_is_compiled(checkout: Path, tmp_path: Path, name: str) -> None:
    kernels.keep(checkout, tmp_path / "cache")
    with (checkout / kernels.FOLDER / name).open("a") as source:
        source.write("\n")
    assert not kernels.put_back(checkout, tmp_path / "cache")


@pytest.mark.parametrize(
    ("variable", "value"),
    [("CXX", "bash"), ("CXX", "no-such-compiler"), ("CXX", ""), ("CXXFLAGS", "-g")],
)
def test_another_compiler_compiles(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, variable: str, value: str
) -> None:
    kernels.keep(checkout, tmp_path / "cache")
    monkeypatch.setenv(variable, value)
    assert not kernels.put_back(checkout, tmp_path / "cache")
