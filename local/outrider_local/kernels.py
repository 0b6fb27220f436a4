"""Compiled CPU kernels, kept outside the checkout: half a minute that a new one need not repeat."""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import tempfile
from pathlib import Path

from outrider_local.shell import find, output

#: Sources that installing the project compiles, and where it leaves the libraries.
FOLDER = Path("serving/outrider_serving/native")
COMPILER = "g++"


def sources(checkout: Path) -> list[Path]:
    """All files that decide what is compiled."""
    return sorted(file for file in (checkout / FOLDER).iterdir() if file.suffix in {".cpp", ".h", ".py"})


def put_back(checkout: Path, cache: Path) -> bool:
    """Copy what the cache has for these sources into the checkout; whether it has something.

    Each library comes with the stamp that the package's own build looks at, which compiles what lacks one.
    """
    kept = _folder(checkout, cache)
    if kept is None or not kept.exists():
        return False
    for file in kept.iterdir():
        shutil.copy2(file, checkout / FOLDER)
    return True


def keep(checkout: Path, cache: Path) -> None:
    """Copy what was compiled into the cache, where it is not there yet."""
    kept = _folder(checkout, cache)
    files = [*(checkout / FOLDER).glob("*.so*")]  # libraries and their stamps
    if kept is None or kept.exists() or not files:
        return
    kept.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=kept.parent, prefix=".new-") as partial:
        made = Path(partial) / kept.name
        made.mkdir()
        for file in files:
            shutil.copy2(file, made)
        if not kept.exists():  # another checkout may have kept its own meanwhile
            made.rename(kept)


def _folder(checkout: Path, cache: Path) -> Path | None:
    """Where the cache has these sources compiled by this machine's compiler; None where it has none."""
    words = shlex.split(os.environ.get("CXX", COMPILER))
    if not words or (program := find(words[0])) is None:
        return None
    compiler = (platform.machine(), *words, output(program, "--version"), os.environ.get("CXXFLAGS", ""))
    digest = hashlib.sha256(repr(compiler).encode())
    for source in sources(checkout):
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return cache / "kernels" / digest.hexdigest()[:16]
