"""Opens the two sides of a comparison in process: loads the model, builds the engines."""

from __future__ import annotations

import logging
from dataclasses import dataclass, replace
from typing import Any

import torch
from transformers.utils import logging as transformers_logging

from outrider_serving.bench.engine_side import EngineSide
from outrider_serving.bench.sides import Side
from outrider_serving.bench.transformers_side import TransformersSide
from outrider_serving.engine.build import build_core
from outrider_serving.engine.core import EngineCore
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.settings import PodSettings


@dataclass(frozen=True, slots=True)
class Wanted:
    """A side in process.

    Attributes:
        name: what tables call it.
        settings: of the engine; None for transformers instead of an engine.
    """

    name: str
    settings: PodSettings | None


def open_sides(options: EngineOptions, wanted: tuple[Wanted, Wanted]) -> tuple[Side, Side]:
    """Load and warm up; takes seconds to minutes.

    Each side may take half of the memory. Two engines share the weights; transformers gets weights of its
    own, since an engine may keep them in a form of its own.

    Raises:
        ModelError: the model cannot be served as asked.
        EngineError: the engine could not generate.
    """
    transformers_logging.set_verbosity_error()  # type: ignore[no-untyped-call]
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]
    logging.getLogger("ContinuousBatchingLogger").setLevel(logging.ERROR)
    opener = _Opener(replace(options, memory_share=options.memory_share_on(_device()) / len(wanted)))
    return opener.open(wanted[0]), opener.open(wanted[1])


def describe(options: EngineOptions, wanted: Wanted) -> dict[str, Any]:
    """What a side is, for the report."""
    settings = wanted.settings
    return {
        "name": wanted.name,
        "kind": "engine" if settings is not None else "transformers",
        "model": options.model,
        "settings": settings.model_dump(mode="json", by_alias=True) if settings is not None else None,
    }


def surroundings() -> dict[str, Any]:
    """The device, and torch's threads."""
    name = torch.cuda.get_device_name() if torch.cuda.is_available() else None
    return {"device": name or "cpu", "threads": torch.get_num_threads()}


class _Opener:
    """Opens sides one after the other; engines share what the first one has loaded."""

    def __init__(self, options: EngineOptions) -> None:
        self._options = options
        self._first: tuple[LoadedModel, EngineLimits] | None = None

    def open(self, wanted: Wanted) -> Side:
        """One side."""
        if wanted.settings is None:
            return TransformersSide(wanted.name, self._load(), self._options.step_tokens_on(_device()))
        if self._first is None:
            loaded, core, limits = build_core(self._options, wanted.settings)
            self._first = loaded, limits
        else:
            loaded, limits = self._first
            reserve = self._options.proposer_memory
            core = EngineCore(loaded, wanted.settings, limits, proposer_bytes=reserve)
            core.warm_up()
        return EngineSide(wanted.name, loaded, core)

    def _load(self) -> LoadedModel:
        options = self._options
        return load_model(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            context_length=options.context_length,
        )


def _device() -> str:
    return "cuda" if torch.cuda.is_available() else "cpu"
