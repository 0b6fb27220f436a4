"""What the engine's process runs: the real core, with the libraries' words in our log."""

from __future__ import annotations

from outrider_serving import logs
from outrider_serving.engine.build import build_core
from outrider_serving.engine.core import EngineCore
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.protocol import ModelInfo, describe
from outrider_serving.settings import PodSettings


def launch(options: EngineOptions, settings: PodSettings) -> tuple[EngineCore, ModelInfo]:
    """Load and warm up; takes seconds to minutes.

    Raises:
        ModelError: the model cannot be served as asked.
        EngineError: the engine could not generate.
    """
    logs.adopt_libraries()
    loaded, core, limits = build_core(options, settings)
    return core, describe(
        loaded,
        pages=limits.pages,
        page_size=limits.page_size,
        graphs=core.graphs,
        suffix_compiled=core.suffix_compiled,
    )
