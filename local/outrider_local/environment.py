"""`.venv`: the locked Python packages and the project itself, made again only when the lock changes."""

from __future__ import annotations

import hashlib
import importlib.util
import sys
import venv
from pathlib import Path

from outrider_local import kernels
from outrider_local.report import EXIT_USAGE, ProblemError, Stopwatch, detail, step
from outrider_local.settings import Settings
from outrider_local.shell import find, output, succeeds

#: Installs the lock; pinned, and kept in the cache apart from the environment that it makes.
UV = "uv==0.13.9"
LOCK = Path("locks/dev.txt")
_STAMP = ".outrider-stamp"


def stamp(checkout: Path, python: str = sys.version) -> str:
    """A digest of all that decides what the environment holds."""
    digest = hashlib.sha256()
    files = (checkout / LOCK, checkout / "pyproject.toml", *kernels.sources(checkout))
    parts = (UV.encode(), python.encode(), repr(find(kernels.COMPILER)).encode())
    for part in (*parts, *(file.read_bytes() for file in files)):
        digest.update(hashlib.sha256(part).digest())
    return digest.hexdigest()


def current(settings: Settings) -> bool:
    """Whether the environment is there and belongs to this lock."""
    path = settings.venv / _STAMP
    return (
        path.exists()
        and path.read_text() == stamp(settings.checkout)
        and succeeds(settings.venv / "bin" / "python", "-c", "")
    )


def make(settings: Settings) -> bool:
    """Make or renew the environment; whether there was anything to do."""
    if current(settings):
        return False
    watch = Stopwatch()
    step(f"making {settings.venv} from {LOCK} (about 2 minutes, 6 GB with PyTorch; compiles the CPU kernels)")
    tool = uv(settings.cache)
    python = settings.venv / "bin" / "python"
    (settings.venv / _STAMP).unlink(missing_ok=True)
    if not _same_python(python):
        output(tool, "venv", "--quiet", "--clear", "--python", sys.executable, settings.venv)
    output(tool, "pip", "sync", "--quiet", "--python", python, "--require-hashes", settings.checkout / LOCK)
    there = kernels.put_back(settings.checkout, settings.cache)
    output(
        tool, "pip", "install", "--quiet", "--python", python, "--no-deps", "--editable", settings.checkout
    )
    if not there:
        kernels.keep(settings.checkout, settings.cache)
    (settings.venv / _STAMP).write_text(stamp(settings.checkout))
    detail(f"made in {watch}")
    if find(kernels.COMPILER) is None:
        detail(
            f"there is no {kernels.COMPILER}, so models will run slower on this CPU: "
            "install it, and make env again"
        )
    return True


def has_ensurepip() -> bool:
    """Whether this Python can give a new environment its pip (Debian and Ubuntu ship that part apart)."""
    return importlib.util.find_spec("ensurepip") is not None


def tool_environment(folder: Path, requirement: str, program: str) -> Path:
    """A small environment of its own for a packaged tool; the path of the tool."""
    path = folder / "bin" / program
    if path.exists() and succeeds(folder / "bin" / "python", "-c", ""):
        return path
    if not has_ensurepip():
        raise ProblemError(
            f"{sys.executable} has no ensurepip, so it cannot make environments",
            "install the package python3-venv (Debian, Ubuntu), or run make with PYTHON=another python3",
            EXIT_USAGE,
        )
    detail(f"installing {requirement} into {folder}")
    venv.create(folder, with_pip=True, clear=True, symlinks=True)
    output(folder / "bin" / "python", "-m", "pip", "install", "--quiet", requirement)
    return path


def _same_python(python: Path) -> bool:
    """Whether an environment of this very Python is there: then it is brought up to date in place."""
    return python.exists() and succeeds(python, "-c", f"import sys; sys.exit(sys.version != {sys.version!r})")


def uv(cache: Path) -> Path:
    """The path of the pinned uv, which is installed if it is not there."""
    return tool_environment(cache / UV.replace("==", "-"), UV, "uv")
