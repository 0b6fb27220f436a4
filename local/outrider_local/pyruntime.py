"""The files that this machine's Python needs to run in an image of its own.

Works from what the interpreter says about itself, since installations differ: Debian's lies in /usr among
everything else, pyenv's and uv's in a prefix of their own.
"""

from __future__ import annotations

import json
import os
import re
import stat
import subprocess
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from outrider_local.ociimage import Entry
from outrider_local.shell import find, output

#: Small programs that a person expects in `kubectl exec`.
TOOLS = ("sh", "ls", "cat", "env", "sleep", "head", "tail", "grep", "id", "ps", "df", "du")
#: Libraries that compiled wheels ask for, and those that the C library loads by itself.
_LIBRARIES = (
    *("libstdc++.so.6", "libgomp.so.1", "libgcc_s.so.1", "libm.so.6", "librt.so.1", "libdl.so.2"),
    *("libpthread.so.0", "libutil.so.1", "libresolv.so.2", "libnss_files.so.2", "libnss_dns.so.2"),
)
_EXTRAS = ("/etc/ssl/certs/ca-certificates.crt", "/etc/pki/tls/certs/ca-bundle.crt", "/usr/lib/locale/C.utf8")
#: Parts of a standard library that no service uses.
_SKIP = re.compile(
    r"/(test|tests|idlelib|tkinter|turtledemo|ensurepip|lib2to3|__pycache__|site-packages|dist-packages)(/|$)|/_tkinter"
    r"|\.a$|/config-\d"
)
#: Folders that are links into /usr on every current distribution.
_MERGED = {"bin": "usr/bin", "sbin": "usr/sbin", "lib": "usr/lib", "lib64": "usr/lib64"}

_ASK = """
import json, sys, sysconfig
print(json.dumps({
    "executable": sys._base_executable,
    "version": sys.version,
    "minor": "%d.%d" % sys.version_info[:2],
    "folders": [sysconfig.get_path("stdlib"), sysconfig.get_path("platstdlib")],
    "base": sys.base_prefix,
    "prefix": sys.prefix,
}))
"""


@dataclass(frozen=True)
class Interpreter:
    """Where a Python lies."""

    executable: Path
    version: str
    minor: str
    folders: tuple[Path, ...]


def ask(python: Path) -> Interpreter:
    """The interpreter below an environment (or itself, when it is none)."""
    said = json.loads(output(python, "-c", _ASK))
    base, prefix = said["base"], said["prefix"]
    # Inside an environment the standard library's paths already point to the base; an older layout may not.
    folders = dict.fromkeys(_real(folder.replace(prefix, base, 1)) for folder in said["folders"])
    return Interpreter(_real(said["executable"]), said["version"], said["minor"], tuple(folders))


def _real(path: str | Path) -> Path:
    return Path(os.path.realpath(path))


def entries(python: Interpreter) -> Iterator[Entry]:
    """The layer: interpreter, standard library, tools, and every shared library that these load."""
    files = list(_standard_library(python))
    tools = {f"usr/bin/{tool}": _real(path) for tool in TOOLS if (path := find(tool))}
    compiled = [path for path in files if ".so" in path.name and not path.is_symlink()]
    yield from merged_folders()
    for file in (*files, python.executable):
        yield _entry(file, str(file))
    for name, program in tools.items():
        yield Entry(name, source=program, mode=0o755)
    yield from libraries([python.executable, *tools.values(), *compiled])
    for extra in _EXTRAS:
        yield from _tree(Path(extra))
    yield Entry("usr/bin/python3", link=str(python.executable))
    yield Entry("usr/sbin")
    yield Entry("usr/lib64")
    yield Entry("tmp", mode=0o1777)


def _standard_library(python: Interpreter) -> Iterator[Path]:
    for folder in python.folders:
        for path in sorted(folder.rglob("*")):
            if not _SKIP.search(str(path)[len(str(folder)) :]) and (path.is_symlink() or path.is_file()):
                yield path


def _tree(path: Path) -> Iterator[Entry]:
    if path.is_file():
        yield Entry(str(path), source=_real(path))
    elif path.is_dir():
        for file in sorted(path.rglob("*")):
            if file.is_file():
                yield Entry(str(file), source=_real(file))


def _entry(path: Path, target: str) -> Entry:
    if path.is_symlink():
        return Entry(target, link=str(path.readlink()))
    executable = bool(path.stat().st_mode & stat.S_IXUSR)
    return Entry(target, source=path, mode=0o755 if executable else 0o644)


def merged_folders() -> Iterator[Entry]:
    """The links into /usr, which come before anything that lies behind them."""
    for link, target in _MERGED.items():
        yield Entry(link, link=target)


def libraries(programs: list[Path]) -> Iterator[Entry]:
    """The libraries of programs, and the loader itself.

    Every library also appears beside the C library, the one folder that any loader
    searches without its cache.
    """
    loaded = set(loaded_libraries(_ldd(programs)))
    home = next(
        (Path(path).parent for path in sorted(loaded) if Path(path).name == "libc.so.6"), Path("/usr/lib")
    )
    loaded |= {str(home / name) for name in _LIBRARIES if (home / name).exists()}
    for path in sorted(loaded):
        yield Entry(_merged(path), source=_real(path), mode=0o755)
    for path in sorted(loaded):
        yield Entry(_merged(f"{home}/{Path(path).name}"), link=path)


def _merged(path: str) -> str:
    """The path of a file below /lib or /lib64 in an image where those are links."""
    first, _, rest = path.strip("/").partition("/")
    return f"{_MERGED[first]}/{rest}" if first in _MERGED else f"{first}/{rest}"


def _ldd(programs: list[Path]) -> str:
    texts = []
    for start in range(0, len(programs), 200):
        command = ["ldd", *map(str, programs[start : start + 200])]
        texts.append(subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    return "\n".join(texts)


def loaded_libraries(ldd: str) -> Iterable[str]:
    """The files in the output of ldd: libraries (``name => path``) and the loader (a path alone)."""
    return re.findall(r"^\s+(?:\S+ => )?(/\S+) \(0x", ldd, re.MULTILINE)
