"""Reads weights and tokenizer by way of transformers, and sees that every weight came from the files."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel, PreTrainedTokenizerBase

from outrider_serving.models.errors import ModelError
from outrider_serving.models.selection import CONFIG

logger = logging.getLogger(__name__)

Loaded = tuple[PreTrainedModel, PreTrainedTokenizerBase]

_NAMED = 3
"""How many weights a message names."""


def load_checkpoint(
    directory: Path, gguf: str | None, dtype: torch.dtype | str, attention: str, source: object
) -> Loaded:
    """The model, complete, and its tokenizer.

    transformers makes up weights that it does not find or that have another shape than it expects; here that
    is an error. Weights tied to others (an output layer that is the embedding) need not be in the files, and
    weights that the model does not have are left aside.

    Args:
        directory: holds the files.
        gguf: name of the weights' file where they are a GGUF, None where they are safetensors.
        dtype: of the weights in memory.
        attention: value of `attn_implementation`.
        source: what the user called the model, for messages.

    Raises:
        ModelError: weights are missing or of another shape than the configuration asks for, or there is no
            tokenizer.
        OSError, ValueError, KeyError, RuntimeError, SafetensorError: transformers cannot read the weights.
    """
    try:
        tokenizer = AutoTokenizer.from_pretrained(directory, gguf_file=gguf)
    except Exception as error:  # of many kinds: of the parsers of each kind of tokenizer too
        raise ModelError(f"model {source} cannot be loaded: its files give no tokenizer: {error}") from error
    from_pretrained: Any = AutoModelForCausalLM.from_pretrained  # typed as if it returned the model alone
    model, info = from_pretrained(
        directory,
        gguf_file=gguf,
        dtype=dtype,
        attn_implementation=attention,
        ignore_mismatched_sizes=True,
        output_loading_info=True,
    )
    described = gguf or CONFIG
    if missing := info["missing_keys"]:
        raise ModelError(
            f"model {source} lacks {len(missing)} of the weights that {described} asks for: {_some(missing)}"
        )
    if mismatched := info["mismatched_keys"]:
        shapes = [f"{name} is {tuple(has)}, not {tuple(wanted)}" for name, has, wanted in mismatched]
        raise ModelError(
            f"model {source} has {len(shapes)} weights of another shape than {described} asks for: "
            + _some(shapes)
        )
    if surplus := info["unexpected_keys"]:
        logger.warning("%d weights of model %s are not used: %s", len(surplus), source, _some(surplus))
    return model, tokenizer


def _some(names: Iterable[str]) -> str:
    ordered = sorted(names)
    return ", ".join(ordered[:_NAMED]) + (", ..." if len(ordered) > _NAMED else "")
