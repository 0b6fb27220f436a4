"""The layer of Python that several checkouts may share."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from outrider_local import images, pyruntime
from outrider_local.ociimage import Entry, Layer
from outrider_local.settings import Settings


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The Pythons of which a layer was made; a checkout's Python is told by its path."""
    made: list[str] = []

    def ask(python: Path) -> pyruntime.Interpreter:
        return pyruntime.Interpreter(python, "3.12.1", "3.12", ())

    def entries(python: pyruntime.Interpreter) -> list[Entry]:
        made.append(str(python.executable))
        return [Entry("python", content=str(python.executable).encode())]

    monkeypatch.setattr(pyruntime, "ask", ask)
    monkeypatch.setattr(pyruntime, "entries", entries)
    return made


def layer(settings: Settings) -> Layer:
    found, _ = images._base_layer(settings)
    assert found.file.exists()
    return found


def test_two_checkouts_leave_each_others_layers_alone(tmp_path: Path, made: list[str]) -> None:
    one = Settings(tmp_path / "one", tmp_path, tmp_path)
    two = replace(one, checkout=tmp_path / "two")
    first, second = layer(one), layer(two)
    assert first.file.exists()
    assert (layer(one), layer(two)) == (first, second)
    assert len(made) == 2


def test_layers_that_nobody_uses_go(tmp_path: Path, made: list[str]) -> None:
    one, two, three = (Settings(tmp_path / name, tmp_path, tmp_path) for name in ("one", "two", "three"))
    unused, used = layer(one), layer(two)
    long_ago = time.time() - 30 * 86400
    for file in used.file.parent.iterdir():
        os.utime(file, (long_ago, long_ago))
    layer(two)
    layer(three)
    assert used.file.exists()
    assert not unused.file.exists()


@pytest.mark.parametrize("text", ["", "{", "[]", "{}"])
def test_a_spoilt_description_is_made_again(text: str, tmp_path: Path, made: list[str]) -> None:
    settings = Settings(tmp_path / "one", tmp_path, tmp_path)
    first = layer(settings)
    first.file.with_suffix(".json").write_text(text)
    assert layer(settings) == first
    assert len(made) == 2
