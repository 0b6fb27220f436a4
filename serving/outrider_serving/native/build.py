"""Compiles the sources beside it, once for each kind of CPU. Uses the standard library only.

    python -m outrider_serving.native.build

The package's build runs it, and so does an installation for development. OpenMP is torch's own: the libraries
are not linked with one, and find what torch has loaded, so that there is one set of threads.
"""

from __future__ import annotations

import hashlib
import os
import platform
import shlex
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

HERE = Path(__file__).parent
_UNITS = sorted(HERE.glob("*.cpp"))
_SOURCES = sorted([*_UNITS, *HERE.glob("*.h"), Path(__file__)])
_FLAGS = ("-O3", "-std=c++20", "-fPIC", "-fopenmp", "-fno-math-errno", "-fvisibility=hidden", "-Wno-psabi")


class NoCompilerError(Exception):
    """There is no C++ compiler."""


@dataclass(frozen=True, slots=True)
class Variant:
    """One kind of CPU.

    Attributes:
        name: part of the library's file name.
        flags: what the compiler is told.
        features: what /proc/cpuinfo must name.
    """

    name: str
    flags: tuple[str, ...]
    features: frozenset[str]

    @property
    def path(self) -> Path:
        """The library."""
        return HERE / f"kernels-{self.name}.so"


_V2 = frozenset({"sse4_2", "ssse3", "popcnt", "cx16"})
_V3 = _V2 | {"avx", "avx2", "bmi1", "bmi2", "f16c", "fma", "movbe"}
_V4 = _V3 | {"avx512f", "avx512bw", "avx512cd", "avx512dq", "avx512vl"}
VARIANTS: Mapping[str, tuple[Variant, ...]] = {
    "x86_64": (
        Variant(
            "x86-64-v4-bf16",
            ("-march=x86-64-v4", "-mavx512bf16", "-mprefer-vector-width=512"),
            _V4 | {"avx512_bf16"},
        ),
        Variant("x86-64-v3", ("-march=x86-64-v3",), _V3),
        Variant("x86-64-v2", ("-march=x86-64-v2",), _V2),
    ),
    "aarch64": (Variant("armv8", (), frozenset()),),
}
"""By machine, the best first."""


def variants() -> tuple[Variant, ...]:
    """Those for this machine's architecture, the best first; none where it is another one."""
    return VARIANTS.get(platform.machine(), ()) if sys.platform == "linux" else ()


def build() -> list[Path]:
    """Compile what is not there yet for these sources; CXX and CXXFLAGS are heeded.

    Returns:
        All libraries.

    Raises:
        NoCompilerError: CXX, or g++, is not there.
        subprocess.CalledProcessError: it refused.
    """
    wanted = variants()
    compiler = shlex.split(os.environ.get("CXX", "g++"))
    flags = (*_FLAGS, *shlex.split(os.environ.get("CXXFLAGS", "")))
    missing = [one for one in wanted if not _current(one, flags)]
    if missing and shutil.which(compiler[0]) is None:
        raise NoCompilerError(f"there is no {compiler[0]}")
    with ThreadPoolExecutor(max_workers=os.cpu_count()) as threads:
        list(threads.map(lambda one: _compile(one, compiler, flags), missing))
    return [one.path for one in wanted]


def _digest(variant: Variant, flags: Iterable[str]) -> str:
    digest = hashlib.sha256(repr((variant.flags, tuple(flags))).encode())
    for source in _SOURCES:
        digest.update(hashlib.sha256(source.read_bytes()).digest())
    return digest.hexdigest()


def _stamp(variant: Variant) -> Path:
    return variant.path.with_suffix(".so.stamp")


def _current(variant: Variant, flags: Iterable[str]) -> bool:
    stamp = _stamp(variant)
    return variant.path.exists() and stamp.exists() and stamp.read_text() == _digest(variant, flags)


def _compile(variant: Variant, compiler: list[str], flags: Iterable[str]) -> None:
    with tempfile.TemporaryDirectory(dir=HERE, prefix=".build-") as folder:
        objects = [f"{folder}/{unit.stem}.o" for unit in _UNITS]
        for unit, made in zip(_UNITS, objects, strict=True):
            subprocess.run([*compiler, *flags, *variant.flags, "-c", str(unit), "-o", made], check=True)
        # Without -fopenmp, which would link a second OpenMP.
        subprocess.run([*compiler, "-shared", *objects, "-o", f"{folder}/kernels.so"], check=True)
        Path(f"{folder}/kernels.so").replace(variant.path)
    _stamp(variant).write_text(_digest(variant, flags))


def main() -> int:
    """Build, and say what was built."""
    try:
        paths = build()
    except (NoCompilerError, subprocess.CalledProcessError) as error:
        print(f"the CPU kernels are not built, so models run slower on CPUs: {error}", file=sys.stderr)
        return 1
    for path in paths:
        print(path)
    return 0


if __name__ == "__main__":
    sys.exit(main())
