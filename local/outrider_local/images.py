"""The two images of the local cluster: this machine's Python, the project's own packages, and nothing else.

Third-party packages (6 GB with PyTorch) are no layer: every container of the node finds the checkout's
`.venv`, read-only, at ``/opt/outrider/environment`` (see ``configs.base_spec``). An image's tag is a digest
of its content, so that changed code is a new image, and unchanged code is none.
"""

from __future__ import annotations

import hashlib
import json
import os
import tempfile
import time
from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from outrider_local import addresses, node, ociimage, privileges, pyruntime
from outrider_local.environment import LOCK
from outrider_local.ociimage import Configuration, Entry, Image, Layer
from outrider_local.processes import write_json
from outrider_local.report import Stopwatch, detail
from outrider_local.settings import Settings

APPLICATION = "/opt/outrider/app"
USER = "65532:65532"
#: Both packages go into both images: the operator reads the serving settings' schema.
PACKAGES = (Path("operator/outrider_operator"), Path("serving/outrider_serving"))
_PROGRAMS = {"operator": "outrider_operator", "serving": "outrider_serving"}
#: For people in `kubectl exec`: the names that the project's own environment has too.
_COMMANDS = {"outrider": "outrider_serving", "outrider-operator": "outrider_operator"}

#: A layer of Python that nobody has used for so many seconds is removed.
_KEEP = 14 * 86400.0

_PASSWD = "root:x:0:0:root:/root:/bin/sh\nnonroot:x:65532:65532:nonroot:/tmp:/bin/sh\n"
_GROUP = "root:x:0:\nnonroot:x:65532:\n"


@dataclass(frozen=True)
class References:
    """The names of the two images, as the chart wants them."""

    operator: str
    serving: str


def provide(settings: Settings) -> References:
    """Make sure that the node has the images of this checkout."""
    base, minor = _base_layer(settings)
    with tempfile.TemporaryDirectory(prefix="images-", dir=settings.cache) as folder:
        # The node's root reads the archives too.
        application = ociimage.write_layer(_application(settings.checkout), Path(folder) / "application")
        images = {role: _image(settings, role, minor, (base, application)) for role in _PROGRAMS}
        references = {role: reference(role, image) for role, image in images.items()}
        present = _present(settings)
        for role, image in images.items():
            if references[role] not in present:
                give(settings, image, references[role], Path(folder) / f"{role}.tar")
    return References(references["operator"], references["serving"])


def reference(role: str, image: Image) -> str:
    """The name of an image: local, and tagged with a digest of its content."""
    return f"localhost/outrider-{role}:{image.digest.partition(':')[2][:12]}"


def give(settings: Settings, image: Image, name: str, archive: Path) -> None:
    """Give the node an image under that name; the archive is a file that is written for it, and removed."""
    watch = Stopwatch()
    ociimage.write_archive(image, name, archive)
    if privileges.is_root():
        node.import_image(settings, archive)
    else:
        privileges.rerun(settings, ["node", "import", str(archive)])
    archive.unlink()
    detail(f"{name} given to the node in {watch}")


def _image(settings: Settings, role: str, minor: str, layers: tuple[Layer, ...]) -> Image:
    packages = f"{addresses.ENVIRONMENT_MOUNT}/lib/python{minor}/site-packages"
    lock = hashlib.sha256((settings.checkout / LOCK).read_bytes()).hexdigest()
    return Image(
        layers,
        Configuration(
            entrypoint=("/usr/bin/python3", "-m", _PROGRAMS[role]),
            environment={
                "PATH": "/usr/local/bin:/usr/bin:/bin",
                "PYTHONPATH": f"{APPLICATION}:{packages}",
                "PYTHONUNBUFFERED": "1",
                "PYTHONDONTWRITEBYTECODE": "1",
                "HOME": "/tmp",
                "LANG": "C.UTF-8",
            },
            user=USER,
            # Not part of the files, yet part of what runs: a new lock has to be a new image.
            labels={"dev.outrider.lock": lock},
        ),
    )


def _application(checkout: Path) -> Iterator[Entry]:
    yield Entry("etc/passwd", content=_PASSWD.encode())
    yield Entry("etc/group", content=_GROUP.encode())
    yield Entry("etc/nsswitch.conf", content=b"hosts: files dns\n")
    yield Entry(addresses.ENVIRONMENT_MOUNT)
    for command, module in _COMMANDS.items():
        script = f'#!/bin/sh\nexec python3 -m {module} "$@"\n'
        yield Entry(f"usr/local/bin/{command}", content=script.encode(), mode=0o755)
    for package in PACKAGES:
        for path in sorted((checkout / package).rglob("*")):
            if path.is_file() and "__pycache__" not in path.parts:
                yield Entry(
                    f"{APPLICATION}/{package.name}/{path.relative_to(checkout / package)}", source=path
                )


def _base_layer(settings: Settings) -> tuple[Layer, str]:
    """The Python runtime, kept in the cache until interpreter, system libraries or this code change."""
    python = pyruntime.ask(settings.venv / "bin" / "python")
    folder = settings.cache / "images"
    folder.mkdir(parents=True, exist_ok=True)
    name = f"python-{_base_key(python)}"
    file, description = folder / f"{name}.tar", folder / f"{name}.json"
    kept = _kept_layer(file, description)
    if kept is not None:
        return kept, python.minor
    watch = Stopwatch()
    _remove_unused(folder)
    layer = ociimage.write_layer(pyruntime.entries(python), file)
    write_json(description, {"digest": layer.digest, "size": layer.size})
    detail(f"image layer of Python {python.minor} made in {watch} ({layer.size >> 20} MiB)")
    return layer, python.minor


def _kept_layer(file: Path, description: Path) -> Layer | None:
    """The layer that an earlier run has made, marked as used."""
    try:
        for path in (description, file):
            os.utime(path)
        known = json.loads(description.read_text())
        return Layer(file, str(known["digest"]), int(known["size"]))
    except (OSError, ValueError, TypeError, KeyError):
        return None


def _remove_unused(folder: Path) -> None:
    """Remove layers that no checkout has used for long: others of this user may have another Python."""
    for old in folder.glob("python-*"):
        with suppress(FileNotFoundError):  # another run does the same
            if time.time() - old.stat().st_mtime > _KEEP:
                old.unlink()


def _base_key(python: pyruntime.Interpreter) -> str:
    digest = hashlib.sha256(repr(python).encode())
    for module in (pyruntime, ociimage):
        digest.update(Path(str(module.__file__)).read_bytes())
    for path in (python.executable, *python.folders, Path("/etc/ld.so.cache")):
        if path.exists():
            digest.update(f"{path} {path.stat().st_mtime_ns}".encode())
    return digest.hexdigest()[:16]


def _present(settings: Settings) -> set[str]:
    if privileges.is_root():
        return node.images(settings)
    return set(privileges.rerun(settings, ["node", "images"], capture=True).split())
