"""Loads a model: everything that the engine and the API know about it is a field of `LoadedModel`."""

from __future__ import annotations

import json
import logging
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import torch
from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    PreTrainedConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)

from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.target.native.decoder import Compiled
from outrider_serving.engine.target.native.structure import NotRecognisedError, structure_of
from outrider_serving.models.capability import check_attention, check_config
from outrider_serving.models.checkpoint import load_checkpoint
from outrider_serving.models.comparison import check_against_transformers
from outrider_serving.models.errors import ModelError
from outrider_serving.models.files import ModelFiles, model_files
from outrider_serving.models.gguf import gguf_config, load_gguf
from outrider_serving.models.placement import use_huge_pages
from outrider_serving.models.selection import CONFIG
from outrider_serving.models.source import Source, parse_source
from outrider_serving.native.library import library

logger = logging.getLogger(__name__)

DType = Literal["auto", "float32", "bfloat16", "float16"]


@dataclass(frozen=True, slots=True)
class LoadedModel:
    """A model ready for the engine.

    Attributes:
        model: in evaluation mode, on its device, attending over our store of keys and values.
        tokenizer: the model's own.
        source: what the user called it.
        revision: commit of the hub, or digest of config, tokenizer and weights.
        dtype: of the weights in memory, as "bfloat16".
        context_length: most tokens of prompt and output together.
        eos_token_ids: tokens that end a sequence: those of the generation config, else the tokenizer's.
        vocab_size: number of token ids that the model knows.
        kv_shapes: what each layer keeps of a token.
        compiled: what runs it; transformers' own modules do where it is None.
    """

    model: PreTrainedModel
    tokenizer: PreTrainedTokenizerBase
    source: str
    revision: str
    dtype: str
    context_length: int
    eos_token_ids: frozenset[int]
    vocab_size: int
    kv_shapes: Mapping[int, KVShape]
    compiled: Compiled | None = None


def load_model(
    source: str,
    *,
    revision: str | None = None,
    dtype: DType = "auto",
    context_length: int | None = None,
    device: str = "auto",
    hub_token: Path | None = None,
) -> LoadedModel:
    """Find and load a model, in a thread of its own that ends.

    A thread that has run torch's parallel operations keeps workers as long as it lives. With more workers
    than cores, all of them sleep between operations, which makes the engine's thread slower by a third on a
    small machine; so the caller must not be left with any.

    Args:
        source: `package:NAME`, a directory, or ORGANISATION/NAME on the hub; see `source.parse_source`.
        revision: branch, tag or commit of the hub; for others the digest that the files must have.
        dtype: of the weights; auto is the one that the model's config names, and bfloat16 for a GGUF.
        context_length: at most the model's own, which is the default.
        device: as torch names it; auto is cuda where there is a GPU, else cpu.
        hub_token: file that holds the hub's token.

    Raises:
        ModelError: it cannot be served as asked; the message says why and what is allowed.
    """
    parsed, token = parse_source(source), _read_token(hub_token)

    def load() -> LoadedModel:
        with model_files(parsed, revision, token) as files:
            return _load(parsed, files, dtype, context_length, device)

    try:
        with ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-load") as thread:
            return thread.submit(load).result()
    except ModelError:
        raise
    except Exception as error:
        # transformers reports broken files by many kinds of exceptions, of its parsers too.
        raise ModelError(f"model {source} cannot be loaded: {type(error).__name__}: {error}") from error


def _load(
    source: Source, files: ModelFiles, dtype: DType, context_length: int | None, device: str
) -> LoadedModel:
    config = gguf_config(files, source) if files.gguf else _config(files, source)
    check_config(config, source)
    context = _context_length(config, context_length, source)
    if files.gguf:
        wanted = torch.bfloat16 if dtype == "auto" else getattr(torch, dtype)
        model, tokenizer = load_gguf(files, wanted, IMPLEMENTATION, source)
    else:
        wanted = config.dtype or torch.float32 if dtype == "auto" else getattr(torch, dtype)
        model, tokenizer = load_checkpoint(files.directory, None, wanted, IMPLEMENTATION, source)
    model.train(False)
    torch.nn.Module.to(model, _device(device))
    use_huge_pages(model)
    kv_shapes = check_attention(model, source)
    compiled = _compiled(model, kv_shapes, source)
    if compiled is None:
        check_against_transformers(model, kv_shapes, source)
    return LoadedModel(
        model=model,
        tokenizer=tokenizer,
        source=str(source),
        revision=files.revision,
        dtype=str(model.dtype).removeprefix("torch."),
        context_length=context,
        eos_token_ids=_eos_token_ids(model, tokenizer),
        vocab_size=int(model.config.get_text_config().vocab_size),
        kv_shapes=kv_shapes,
        compiled=compiled,
    )


def _compiled(model: PreTrainedModel, kv_shapes: Mapping[int, KVShape], source: Source) -> Compiled | None:
    """What runs the model, if compiled code can, and as transformers does; else None, which is logged."""
    try:
        structure = structure_of(model)
        if (found := library()) is None:
            return None
        compiled = Compiled(structure, found)
        check_against_transformers(model, kv_shapes, source, compiled)
    except NotRecognisedError as error:
        logger.info("model %s runs on transformers' own code: %s", source, error)
        return None
    except ModelError as error:
        logger.warning("model %s runs on transformers' own code, not on compiled code: %s", source, error)
        return None
    return compiled


def _config(files: ModelFiles, source: Source) -> PreTrainedConfig:
    """The configuration, if transformers itself knows the architecture."""
    try:
        raw = json.loads((files.directory / CONFIG).read_bytes())
    except ValueError as error:
        raise ModelError(f"model {source}: {CONFIG} must hold a JSON object: {error}") from error
    if not isinstance(raw, dict):
        raise ModelError(f"model {source}: {CONFIG} must hold a JSON object, but holds {str(raw)[:40]!r}")
    model_type = raw.get("model_type")
    if not isinstance(model_type, str):
        raise ModelError(f"model {source}: {CONFIG} must name the architecture as model_type, like 'llama'")
    if model_type not in CONFIG_MAPPING:
        code = "auto_map" in raw
        raise ModelError(
            f"model {source}: transformers does not know model_type {model_type!r}"
            + ("; it brings code of its own (trust_remote_code), which is never run" if code else "")
        )
    config = AutoConfig.from_pretrained(files.directory)
    assert isinstance(config, PreTrainedConfig)
    return config


def _device(name: str) -> torch.device:
    if name != "auto":
        return torch.device(name)
    return torch.device("cuda" if torch.cuda.is_available() else "cpu")


def _context_length(config: PreTrainedConfig, wanted: int | None, source: Source) -> int:
    limit: Any = getattr(config.get_text_config(), "max_position_embeddings", None)
    if wanted is None and limit is None:
        raise ModelError(f"model {source} names no max_position_embeddings: give a context length")
    if wanted is not None and wanted < 2:
        raise ModelError(f"context length {wanted} is too short: at least 2")
    if wanted is not None and limit is not None and wanted > limit:
        raise ModelError(f"context length {wanted} exceeds that of model {source}, which is {limit}")
    return int(limit if wanted is None else wanted)


def _eos_token_ids(model: PreTrainedModel, tokenizer: PreTrainedTokenizerBase) -> frozenset[int]:
    configured = model.generation_config.eos_token_id if model.generation_config is not None else None
    ids = configured if configured is not None else tokenizer.eos_token_id
    return frozenset(() if ids is None else [ids] if isinstance(ids, int) else ids)


def _read_token(path: Path | None) -> str | None:
    if path is None:
        return None
    try:
        token = path.read_text().strip()
    except (OSError, UnicodeDecodeError) as error:
        raise ModelError(f"the hub token's file {path} cannot be read: {error}") from error
    if not token:
        raise ModelError(f"the hub token's file {path} is empty")
    return token
