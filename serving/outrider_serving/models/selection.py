"""Which files make up a model, by their names alone. Nothing here imports anything heavy."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path

from outrider_serving.models.errors import ModelError

CONFIG = "config.json"
"""The file that says which architecture the safetensors are for; a GGUF says so itself."""

_SUFFIXES = (".safetensors", ".gguf", ".json", ".jinja", ".model", ".txt")


def select_files(names: Iterable[str], source: object) -> list[str]:
    """The files at the top of a repository or directory that make up the model: config, tokenizer, weights.

    Raises:
        ModelError: there are no weights as safetensors or as one GGUF, or safetensors have no config.
    """
    files = sorted(name for name in names if "/" not in name and name.endswith(_SUFFIXES))
    tensors = [
        name for name in files if name.endswith(".safetensors") and not name.startswith("consolidated")
    ]
    ggufs = [name for name in files if name.endswith(".gguf")]
    if not tensors and not ggufs:
        raise ModelError(f"model {source} has no weights: neither *.safetensors nor *.gguf is in it")
    if not tensors and len(ggufs) > 1:
        raise ModelError(f"model {source} has several GGUF files, not one: {', '.join(ggufs)}")
    if tensors and CONFIG not in files:
        raise ModelError(f"model {source} has no {CONFIG}, which says how to read its safetensors")
    weights = tensors or ggufs
    return [name for name in files if name in weights or not name.endswith((".safetensors", ".gguf"))]


def directory_files(directory: Path, source: object) -> list[str]:
    """The files of a directory that make up the model; see `select_files`.

    Raises:
        ModelError: they do not, or the directory cannot be read.
    """
    try:
        names = [entry.name for entry in directory.iterdir() if entry.is_file()]
    except OSError as error:
        raise ModelError(f"model {source} cannot be read: {error}") from error
    return select_files(names, source)
