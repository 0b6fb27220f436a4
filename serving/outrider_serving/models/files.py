"""Brings a model's files together, with the revision that names them exactly."""

from __future__ import annotations

import hashlib
import importlib
import logging
import os
import tempfile
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from outrider_serving.models.errors import ModelError
from outrider_serving.models.hub import snapshot
from outrider_serving.models.selection import directory_files, select_files
from outrider_serving.models.source import DirectorySource, HubSource, PackageSource, Source

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Where a model's files are.

    Attributes:
        directory: holds config, tokenizer and weights.
        gguf: name of the weights' file where they are a GGUF; None where they are safetensors.
        revision: commit of the hub, or "sha256:" and the digest of the files.
    """

    directory: Path
    gguf: str | None
    revision: str


@contextmanager
def model_files(source: Source, revision: str | None, token: str | None) -> Iterator[ModelFiles]:
    """The files of a model while the context lasts.

    Args:
        source: which model.
        revision: a branch, tag or commit of the hub; elsewhere the digest that the files must have.
        token: for the hub; None leaves it to huggingface_hub (HF_TOKEN, a stored login).

    Raises:
        ModelError: the model, the revision or usable weights do not exist, or access is refused.
    """
    match source:
        case HubSource(repository):
            directory, commit = snapshot(repository, revision, token, select_files)
            yield ModelFiles(directory, _gguf(directory_files(directory, source)), commit)
        case DirectorySource(path):
            yield _digested(path, source, revision)
        case PackageSource(name):
            with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
                _assemble(name, Path(scratch))
                yield _digested(Path(scratch), source, revision)


def digest(directory: Path, names: list[str]) -> str:
    """The hash over names and hashes of the files in the order of their names, as "sha256:..."."""

    def hash_of(name: str) -> str:
        with (directory / name).open("rb") as file:
            return hashlib.file_digest(file, "sha256").hexdigest()

    names = sorted(names)
    with ThreadPoolExecutor(max_workers=min(8, os.cpu_count() or 1)) as pool:
        lines = [f"{content} {name}\n" for name, content in zip(names, pool.map(hash_of, names), strict=True)]
    return "sha256:" + hashlib.sha256("".join(lines).encode()).hexdigest()


def _digested(directory: Path, source: Source, wanted: str | None) -> ModelFiles:
    names = directory_files(directory, source)
    try:
        found = digest(directory, names)
    except OSError as error:
        raise ModelError(f"model {source} cannot be read: {error}") from error
    if wanted is not None and wanted != found:
        raise ModelError(f"model {source} is not of revision {wanted}: its files have {found}")
    return ModelFiles(directory, _gguf(names), found)


def _gguf(names: list[str]) -> str | None:
    return next((name for name in names if name.endswith(".gguf")), None)


def _assemble(name: str, into: Path) -> None:
    """Let an installed package write its GGUF."""
    try:
        assemble = importlib.import_module(name).assemble
    except ImportError as error:
        raise ModelError(f"model package:{name} cannot be imported ({error}): is it installed?") from error
    except AttributeError as error:
        raise ModelError(f"model package:{name} carries no model: it has no assemble(path)") from error
    try:
        assemble(into / f"{name}.gguf")
    except (OSError, ValueError) as error:
        raise ModelError(f"model package:{name} cannot write its GGUF: {error}") from error
