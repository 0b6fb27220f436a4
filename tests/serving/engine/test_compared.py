"""What attends on a GPU is compared with transformers when an engine starts, and not used where it differs.

As in test_graphs.py, Triton's interpreter runs the kernels, and work that is run again stands for graphs.
"""

from __future__ import annotations

import logging
import logging.handlers
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider_serving.engine import build, core
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.records import GraphCounts
from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.cuda import runner
from outrider_serving.engine.target.cuda.graphs import Capture, Work
from outrider_serving.engine.target.cuda.runner import CudaRunner, compared_runner
from outrider_serving.engine.target.cuda.shapes import LayoutError, Room
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.models.comparison import TOKENS
from outrider_serving.models.errors import ModelError
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.settings import default_settings
from serving.engine.support import LONG, bench, request
from serving.engine.test_graphs import Captures
from serving.engine.test_triton import FAULTS, faulty
from serving.tiny import Arch, make_tiny_model

CAPTURED = 5
"""Sizes up to the 16 tokens of a step."""


# What the other process runs.


class Stale:
    """Captures whose replays do nothing, so that results are those of the capture."""

    def __call__(self) -> Capture:
        return self._capture

    def _capture(self, work: Work) -> Work:
        work()
        return lambda: None


def of_an_engine(
    path: str, page_size: int, fault: tuple[str, str] | None, captures: Callable[[], Capture]
) -> tuple[list[tuple[int, ...]], list[tuple[int, ...]], GraphCounts, list[str]]:
    """Tokens by torch's kernels, then on whatever the comparison lets through; its graphs; what is logged."""

    def made(
        model: Any, store: KVStore, shapes: Mapping[int, KVShape], limits: EngineLimits, context: int
    ) -> CudaRunner | None:
        def room() -> Room:
            return runner._room(model, shapes, limits, context, multiprocessors=1)

        with faulty(fault):
            return compared_runner(model, store, room, captures)

    loaded = load_model(path)
    how: dict[str, Any] = {"step_tokens": 16, "max_running": 2, "page_size": page_size}
    prompts = [[5, 6, 7], list(range(60, 90))]
    logged = logging.handlers.BufferingHandler(100)
    logging.getLogger("outrider_serving").addHandler(logged)
    tokens = []
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(runner, "_DTYPES", (torch.float64,))  # in which the interpreter rounds nothing away
        for one in (lambda *_: None, made):
            patch.setattr(core, "cuda_runner", one)
            engine = bench(loaded, **how)
            results = engine.run(*(request(p, max_tokens=8, ignore_eos=True) for p in prompts))
            tokens.append([result.tokens for result in results])
    logging.getLogger("outrider_serving").removeHandler(logged)
    return *tokens, engine.core.graphs, [record.getMessage() for record in logged.buffer]


# The tests.


@pytest.fixture(scope="module", params=["llama", "gemma2"])
def path(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> str:
    arch: Arch = request.param
    return str(make_tiny_model(tmp_path_factory.mktemp("models") / arch, arch, dtype=torch.float64))


@pytest.mark.parametrize("page_size", [1, 4, 16] if LONG else [1, 16])
def test_what_agrees_is_used(interpreted: Callable[..., Any], path: str, page_size: int) -> None:
    plain, tokens, graphs, logged = interpreted(of_an_engine, path, page_size, None, Captures())
    assert tokens == plain
    assert graphs == GraphCounts(CAPTURED, 0)
    assert logged == []


def test_a_size_that_cannot_be_captured_is_counted(interpreted: Callable[..., Any], path: str) -> None:
    plain, tokens, graphs, logged = interpreted(of_an_engine, path, 4, None, Captures({2}))
    assert tokens == plain
    assert graphs == GraphCounts(CAPTURED - 1, 1)
    assert logged == ["passes of 8 tokens run without a graph: something waits for the device"]


@pytest.mark.parametrize(
    ("fault", "captures"),
    [
        (FAULTS["masks are read one bit on"], Captures()),
        (FAULTS["tokens see the next one"], Captures()),
        (FAULTS["a group shares one head"], Captures()),
        (None, Stale()),
    ],
    ids=["masks", "next", "group", "stale"],
)
def test_what_differs_is_not_used(
    interpreted: Callable[..., Any],
    path: str,
    fault: tuple[str, str] | None,
    captures: Callable[[], Capture],
) -> None:
    plain, tokens, graphs, logged = interpreted(of_an_engine, path, 4, fault, captures)
    assert tokens == plain
    assert graphs == GraphCounts()
    (message,) = logged
    assert message.startswith("attention runs on torch's own kernels, and without graphs: over pages its")


def limits(**changes: int) -> EngineLimits:
    usual = {"pages": 256, "page_size": 4, "max_running": 16, "max_waiting": 9, "step_tokens": 256}
    return EngineLimits(**{**usual, **changes})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_there_is_room_for_the_comparison_in_every_engine(tmp_path: Path, dtype: torch.dtype) -> None:
    loaded = load_model(str(make_tiny_model(tmp_path, dtype=dtype)))
    of = loaded.model, loaded.kv_shapes
    room = runner._room(*of, limits(max_running=1, step_tokens=1, pages=5), 2, multiprocessors=1)
    assert (room.tokens, room.requests, room.pages) == (TOKENS, 2, 5)
    with pytest.raises(LayoutError, match="4 pages are too few"):
        runner._room(*of, limits(pages=4), 2, multiprocessors=1)


def test_there_are_no_kernels_for_float64(tiny_llama: LoadedModel) -> None:
    with pytest.raises(LayoutError, match="float64"):
        runner._room(tiny_llama.model, tiny_llama.kv_shapes, limits(), 64, multiprocessors=1)


def test_pages_get_what_graphs_leave(tiny_directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(build, "graph_bytes_of", lambda *_: 1 << 60)
    with pytest.raises(ModelError, match=r"and one of 1\.07e\+09 GiB for CUDA graphs: give more memory"):
        build.build_core(EngineOptions(model=str(tiny_directory)), default_settings())
