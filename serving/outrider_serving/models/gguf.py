"""Loads a GGUF by way of transformers, and keeps the result: converting takes long, loading again seconds.

What its metadata says is known before that, by `gguf_config`.
"""

from __future__ import annotations

import contextlib
import logging
import mmap
import os
import shutil
import struct
import tempfile
from pathlib import Path
from typing import Final

import torch
import transformers
from gguf import GGUFValueType
from safetensors import SafetensorError
from transformers import AutoConfig, PreTrainedConfig, PreTrainedModel, PreTrainedTokenizerBase

from outrider_serving.models.checkpoint import Loaded, load_checkpoint
from outrider_serving.models.errors import ModelError
from outrider_serving.models.files import ModelFiles

logger = logging.getLogger(__name__)


def load_gguf(files: ModelFiles, dtype: torch.dtype, attention: str, source: object) -> Loaded:
    """The dequantized model and its tokenizer.

    They are kept under `$XDG_CACHE_HOME/outrider` (else `~/.cache/outrider`) by revision, file, dtype and
    version of transformers; a cache that cannot be written or read is done without. Processes that convert
    the same file at once each do so, and the first to finish provides the copy.

    Raises:
        ModelError: weights are missing or of another shape than the GGUF's own description asks for.
        OSError, ValueError, KeyError, RuntimeError: transformers cannot read the file.
    """
    assert files.gguf is not None
    cache = _cache()
    if cache is None:
        return _convert(files, dtype, attention, source)
    key = "-".join([files.revision.removeprefix("sha256:"), files.gguf, str(dtype).removeprefix("torch.")])
    kept = cache / f"transformers-{transformers.__version__}" / key
    if kept.is_dir():
        try:
            return load_checkpoint(kept, None, dtype, attention, source)
        except Exception:
            logger.warning(
                "the converted model in %s cannot be loaded; converting again", kept, exc_info=True
            )
            shutil.rmtree(kept, ignore_errors=True)
    model, tokenizer = _convert(files, dtype, attention, source)
    try:
        _keep(model, tokenizer, kept)
    except (OSError, SafetensorError) as error:
        logger.info("the converted model is not kept: %s", error)
    return model, tokenizer


def _convert(files: ModelFiles, dtype: torch.dtype, attention: str, source: object) -> Loaded:
    """Load the GGUF itself; tell transformers that the weights are plain now, so that it can save them."""
    logger.info("converting %s; this takes a while the first time", files.gguf)
    model, tokenizer = load_checkpoint(files.directory, files.gguf, dtype, attention, source)
    model.hf_quantizer = None  # type: ignore[assignment]
    with contextlib.suppress(AttributeError):
        del model.config.quantization_config
    return model, tokenizer


def _keep(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase, kept: Path) -> None:
    """Write model and tokenizer beside the wanted place, then rename: a reader sees all of it or nothing."""
    kept.parent.mkdir(parents=True, exist_ok=True)
    scratch = Path(tempfile.mkdtemp(prefix=".converting-", dir=kept.parent))
    try:
        model.save_pretrained(scratch)
        tokenizer.save_pretrained(scratch)
        scratch.chmod(0o755)
        scratch.rename(kept)
    except OSError:
        if not kept.is_dir():
            raise
    finally:
        shutil.rmtree(scratch, ignore_errors=True)


def _cache() -> Path | None:
    """Where conversions are kept; None for a user without a home."""
    base = os.environ.get("XDG_CACHE_HOME")
    try:
        return (Path(base) if base else Path("~/.cache").expanduser()) / "outrider" / "converted"
    except RuntimeError:
        return None


_HEAD: Final = struct.Struct("<4sIQQ")
"""Magic, version, number of tensors, number of keys: how a GGUF begins, then the keys with their values."""

_KIND, _LENGTH, _LIST = struct.Struct("<I"), struct.Struct("<Q"), struct.Struct("<IQ")

_VERSIONS: Final = (2, 3)

_SIZES: Final = {
    **dict.fromkeys((GGUFValueType.UINT8, GGUFValueType.INT8, GGUFValueType.BOOL), 1),
    **dict.fromkeys((GGUFValueType.UINT16, GGUFValueType.INT16), 2),
    **dict.fromkeys((GGUFValueType.UINT32, GGUFValueType.INT32, GGUFValueType.FLOAT32), 4),
    **dict.fromkeys((GGUFValueType.UINT64, GGUFValueType.INT64, GGUFValueType.FLOAT64), 8),
}
"""Bytes of a value, by its kind."""

_ARCHITECTURE: Final = b"general.architecture"
_TOKENS: Final = b"tokenizer.ggml.tokens"


def gguf_config(files: ModelFiles, source: object) -> PreTrainedConfig:
    """The configuration that transformers makes of the GGUF's metadata; no weight is read.

    transformers is given a copy of the metadata without the tokenizer's lists: it makes several objects of
    each token, which for 262,144 of them takes 10 s and 700 MB. Kind of model, layers and context length are
    those of the loaded model. The size of the vocabulary may not be, where transformers takes it from no key
    of its own, nor what it derives from names of tensors, such as tied embeddings.

    Raises:
        ModelError: the file is not a GGUF, is cut off within its metadata, or names no architecture.
        OSError, ValueError, KeyError: transformers does not know the architecture, or lacks a key.
    """
    assert files.gguf is not None
    try:
        with (
            (files.directory / files.gguf).open("rb") as file,
            mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as mapped,
        ):
            metadata = _metadata(mapped)
    except (struct.error, ValueError, OverflowError) as error:  # of an empty file too
        raise ModelError(
            f"model {source} cannot be loaded: {files.gguf} is no whole GGUF: {error}"
        ) from error
    with tempfile.TemporaryDirectory(prefix="outrider-") as scratch:
        (Path(scratch) / files.gguf).write_bytes(metadata)
        config = AutoConfig.from_pretrained(scratch, gguf_file=files.gguf)
    assert isinstance(config, PreTrainedConfig)
    return config


def _metadata(blob: mmap.mmap) -> bytes:
    """A GGUF of the same keys and values, with the tokenizer's lists empty, and without tensors."""
    magic, version, _, count = _HEAD.unpack_from(blob)
    if magic != b"GGUF" or version not in _VERSIONS:
        raise ValueError(f"it begins with {magic!r} and is not of version 2 or 3")
    entries: dict[bytes, bytes] = {}
    tokens = 0
    at = _HEAD.size
    for _ in range(count):
        key, value = _string(blob, at)
        (kind,) = _KIND.unpack_from(blob, value)
        end = _end(blob, value + _KIND.size, kind)
        entry = blob[at:end]
        if kind == GGUFValueType.ARRAY and key.startswith(b"tokenizer."):
            items, length = _LIST.unpack_from(blob, value + _KIND.size)
            tokens = length if key == _TOKENS else tokens
            entry = blob[at : value + _KIND.size] + _LIST.pack(items, 0)
        entries[key] = entry
        at = end
    if _ARCHITECTURE not in entries:
        raise ValueError(f"it has no {_ARCHITECTURE.decode()}")
    if tokens:
        _keep_vocabulary_size(entries, tokens)
    return b"".join([_HEAD.pack(magic, version, 0, len(entries)), *entries.values()])


def _keep_vocabulary_size(entries: dict[bytes, bytes], tokens: int) -> None:
    """Say of how many tokens the vocabulary was, unless a key of its own does."""
    named = entries[_ARCHITECTURE]
    _, value = _string(named, 0)
    architecture, _ = _string(named, value + _KIND.size)
    key = architecture + b".vocab_size"
    size = _KIND.pack(GGUFValueType.UINT32) + _KIND.pack(tokens)
    entries.setdefault(key, _LENGTH.pack(len(key)) + key + size)


def _string(blob: mmap.mmap | bytes, at: int) -> tuple[bytes, int]:
    """A string, and where it ends."""
    (length,) = _LENGTH.unpack_from(blob, at)
    begin = at + _LENGTH.size
    return blob[begin : begin + length], begin + length


def _end(blob: mmap.mmap, at: int, kind: int) -> int:
    """Where a value of this kind ends."""
    if kind == GGUFValueType.ARRAY:
        kind, length = _LIST.unpack_from(blob, at)
        at += _LIST.size
    else:
        length = 1
    if kind == GGUFValueType.STRING:
        for _ in range(length):
            at += _LENGTH.size + _LENGTH.unpack_from(blob, at)[0]
    elif kind in _SIZES:
        at += length * _SIZES[GGUFValueType(kind)]
    else:
        raise ValueError(f"it has a value of the unknown kind {kind}")
    if at > len(blob):
        raise ValueError("it ends within its metadata")
    return at
