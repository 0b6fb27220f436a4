"""OCI images written from files of this machine: no registry, no container engine.

The same content gives the same bytes, so that an image's digest tells whether anything changed.
"""

from __future__ import annotations

import hashlib
import io
import json
import os
import platform
import tarfile
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

_MEDIA = "application/vnd.oci.image"
ARCHITECTURES = {"x86_64": "amd64", "aarch64": "arm64"}


@dataclass(frozen=True)
class Entry:
    """One file, link or folder of a layer. Owner is root, times are zero, modes are 755, 644 or as given."""

    path: str
    source: Path | None = None
    content: bytes | None = None
    link: str | None = None
    mode: int | None = None


@dataclass(frozen=True)
class Layer:
    """An uncompressed layer on disk."""

    file: Path
    digest: str
    size: int


@dataclass(frozen=True)
class Configuration:
    """What a container of the image runs, by default."""

    entrypoint: tuple[str, ...]
    environment: dict[str, str] = field(default_factory=dict)
    user: str = ""
    labels: dict[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Image:
    """Layers and configuration; the digest is that of its manifest."""

    layers: tuple[Layer, ...]
    configuration: Configuration

    def documents(self) -> tuple[bytes, bytes]:
        """The configuration and the manifest, as stored."""
        runs: dict[str, object] = {
            "Entrypoint": list(self.configuration.entrypoint),
            "Env": [f"{name}={value}" for name, value in self.configuration.environment.items()],
            "WorkingDir": "/",
        }
        if self.configuration.user:
            runs["User"] = self.configuration.user
        if self.configuration.labels:
            runs["Labels"] = self.configuration.labels
        config = _json(
            {
                "architecture": architecture(),
                "os": "linux",
                "config": runs,
                "rootfs": {"type": "layers", "diff_ids": [layer.digest for layer in self.layers]},
            }
        )
        manifest = _json(
            {
                "schemaVersion": 2,
                "mediaType": f"{_MEDIA}.manifest.v1+json",
                "config": _descriptor(f"{_MEDIA}.config.v1+json", config),
                "layers": [
                    {"mediaType": f"{_MEDIA}.layer.v1.tar", "digest": layer.digest, "size": layer.size}
                    for layer in self.layers
                ],
            }
        )
        return config, manifest

    @property
    def digest(self) -> str:
        """The digest by which a registry would know the image."""
        return _digest(self.documents()[1])


def architecture() -> str:
    """The machine's architecture as images call it."""
    machine = platform.machine()
    return ARCHITECTURES.get(machine, machine)


def write_layer(entries: Iterable[Entry], file: Path) -> Layer:
    """Write a layer; folders above an entry are made, a path given twice keeps its first entry."""
    partial = file.with_name(f".{file.name}.{os.getpid()}")
    present: set[str] = set()
    with tarfile.open(partial, "w", format=tarfile.PAX_FORMAT) as tar:
        for entry in entries:
            _add(tar, entry, present)
    with partial.open("rb") as written:
        digest = f"sha256:{hashlib.file_digest(written, 'sha256').hexdigest()}"
    partial.replace(file)
    return Layer(file, digest, file.stat().st_size)


def write_archive(image: Image, reference: str, file: Path) -> None:
    """Write an archive that ``ctr images import`` takes, naming the image ``reference``."""
    config, manifest = image.documents()
    index = {
        "schemaVersion": 2,
        "mediaType": f"{_MEDIA}.index.v1+json",
        "manifests": [
            {
                **_descriptor(f"{_MEDIA}.manifest.v1+json", manifest),
                "platform": {"architecture": architecture(), "os": "linux"},
                "annotations": {
                    "io.containerd.image.name": reference,
                    "org.opencontainers.image.ref.name": reference.rpartition(":")[2],
                },
            }
        ],
    }
    with tarfile.open(file, "w", format=tarfile.PAX_FORMAT) as tar:
        _add(tar, Entry("oci-layout", content=b'{"imageLayoutVersion":"1.0.0"}'), set())
        _add(tar, Entry("index.json", content=_json(index)), set())
        blobs: set[str] = set()
        for blob in (config, manifest):
            _add(tar, Entry(_blob_path(_digest(blob)), content=blob), blobs)
        for layer in image.layers:
            _add(tar, Entry(_blob_path(layer.digest), source=layer.file), blobs)


def _add(tar: tarfile.TarFile, entry: Entry, present: set[str]) -> None:
    name = entry.path.strip("/")
    if name in present:
        return
    _add_parents(tar, name, present)
    present.add(name)
    info = tarfile.TarInfo(name)
    if entry.link is not None:
        info.type, info.linkname, info.mode = tarfile.SYMTYPE, entry.link, 0o777
        tar.addfile(info)
    elif entry.content is not None:
        info.size, info.mode = len(entry.content), entry.mode or 0o644
        tar.addfile(info, io.BytesIO(entry.content))
    elif entry.source is not None:
        with entry.source.open("rb") as content:
            status = os.fstat(content.fileno())
            info.size = status.st_size
            info.mode = entry.mode or (0o755 if status.st_mode & 0o100 else 0o644)
            tar.addfile(info, content)
    else:
        info.type, info.mode = tarfile.DIRTYPE, entry.mode or 0o755
        tar.addfile(info)


def _add_parents(tar: tarfile.TarFile, name: str, present: set[str]) -> None:
    parts = name.split("/")[:-1]
    for count in range(1, len(parts) + 1):
        folder = "/".join(parts[:count])
        if folder not in present:
            present.add(folder)
            info = tarfile.TarInfo(folder)
            info.type, info.mode = tarfile.DIRTYPE, 0o755
            tar.addfile(info)


def _json(value: object) -> bytes:
    return json.dumps(value, sort_keys=True, separators=(",", ":")).encode()


def _digest(blob: bytes) -> str:
    return f"sha256:{hashlib.sha256(blob).hexdigest()}"


def _descriptor(media_type: str, blob: bytes) -> dict[str, object]:
    return {"mediaType": media_type, "digest": _digest(blob), "size": len(blob)}


def _blob_path(digest: str) -> str:
    return "blobs/" + digest.replace(":", "/", 1)
