"""From options to an engine that has generated its first tokens."""

from __future__ import annotations

from dataclasses import replace

from outrider_serving.engine.core import EngineCore
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.cuda.runner import graph_bytes_of
from outrider_serving.engine.target.memory import CapacityError, divide, most_pages, total_bytes
from outrider_serving.models.errors import ModelError
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.settings import PodSettings


def build_core(options: EngineOptions, settings: PodSettings) -> tuple[LoadedModel, EngineCore, EngineLimits]:
    """Load the model, divide the memory, and warm up; takes seconds to minutes.

    Raises:
        ModelError: the model cannot be served as asked; the message says why and what is allowed.
        EngineError: the engine could not generate.
    """
    loaded = load_model(
        options.model,
        revision=options.revision,
        dtype=options.dtype,
        context_length=options.context_length,
    )
    device = loaded.model.device
    limits = EngineLimits(
        pages=most_pages(loaded.context_length, options.page_size, options.max_running),
        page_size=options.page_size,
        max_running=options.max_running,
        max_waiting=options.max_waiting,
        step_tokens=options.step_tokens_on(device.type),
    )
    try:
        pages = divide(
            total_bytes(device),
            options.memory_share_on(device.type),
            weight_bytes(loaded),
            options.proposer_memory,
            graph_bytes_of(loaded.model, loaded.kv_shapes, limits, loaded.context_length),
            shapes=loaded.kv_shapes.values(),
            dtype=loaded.model.dtype,
            page_size=options.page_size,
            context_length=loaded.context_length,
            max_running=options.max_running,
        )
    except CapacityError as error:
        raise ModelError(f"model {options.model}: {error}") from error
    limits = replace(limits, pages=pages)
    core = EngineCore(loaded, settings, limits, proposer_bytes=options.proposer_memory)
    core.warm_up()
    return loaded, core, limits


def weight_bytes(loaded: LoadedModel) -> int:
    """Memory of the model's parameters and buffers; shared ones count once."""
    tensors = [*loaded.model.parameters(), *loaded.model.buffers()]
    return sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())
