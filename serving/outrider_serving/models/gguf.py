"""Loads a GGUF by way of transformers, and keeps the result: converting takes long, loading again seconds."""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import tempfile
from pathlib import Path

import torch
import transformers
from safetensors import SafetensorError
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from outrider_serving.models.checkpoint import Loaded, load_checkpoint
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
