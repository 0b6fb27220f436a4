"""The engine on a GPU: passes come from graphs, and speculation changes no token."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any, get_args

import pytest
import torch

from outrider_serving.engine.records import GraphCounts
from outrider_serving.engine.target.cuda.runner import CudaRunner
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.settings import Proposer
from serving.engine import proposers
from serving.engine.support import NONE, Bench, bench, building, request
from serving.tiny import Arch, make_tiny_model

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")

PROMPTS = [[5, 6, 7] * 5, [90, 91], list(range(60, 130)), [4]]
NEW = 24


@pytest.fixture(scope="module", params=get_args(Arch))
def tiny_on_a_gpu(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> LoadedModel:
    path = make_tiny_model(tmp_path_factory.mktemp("models") / request.param, request.param)
    return load_model(str(path), device="cuda")


def engine(loaded: LoadedModel, **how: Any) -> tuple[Bench, CudaRunner]:
    made = bench(loaded, **how)
    runner = made.core._stepper._runner
    assert isinstance(runner, CudaRunner)
    return made, runner


def greedy(made: Bench, **how: Any) -> list[tuple[int, ...]]:
    wanted = [request(prompt, max_tokens=NEW, ignore_eos=True, **how) for prompt in PROMPTS]
    return [result.tokens for result in made.run(*wanted)]


def test_speculation_changes_no_token(tiny_on_a_gpu: LoadedModel) -> None:
    made, runner = engine(tiny_on_a_gpu)
    plain = greedy(made, speculation=NONE)
    assert greedy(made) == plain
    assert sum(row.proposed for record in made.records for row in record.rows) > 0
    assert (runner.captured, runner.fallbacks) == (13, 0)  # up to the 256 tokens of a step
    assert made.core.graphs == GraphCounts(13, 0)


def test_trees_that_want_hidden_states_change_no_token(tiny_on_a_gpu: LoadedModel) -> None:
    """Right tokens among wrong ones; graphs are captured anew for the hidden states."""
    made, _ = engine(tiny_on_a_gpu)
    plain = greedy(made, speculation=NONE)
    texts = [[*prompt, *tokens] for prompt, tokens in zip(PROMPTS, plain, strict=True)]
    reader = proposers.HiddenReader(texts, (1, 3))
    made, runner = engine(tiny_on_a_gpu, proposer=Proposer(max_depth=4), build=building(reader))
    assert greedy(made) == plain
    assert sum(row.accepted for record in made.records for row in record.rows) > 0
    assert runner.captured > 13
    assert runner.fallbacks == 0
    assert all(rows[0].is_cuda for layers in reader.rows.values() for rows in layers.values())


def test_without_triton_torch_attends(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    loaded = load_model(str(make_tiny_model(tmp_path)), device="cuda")
    plain = greedy(engine(loaded)[0])
    monkeypatch.setitem(sys.modules, "outrider_serving.engine.target.triton.attention", None)
    made = bench(loaded)
    assert not isinstance(made.core._stepper._runner, CudaRunner)
    assert made.core.graphs == GraphCounts()
    assert greedy(made) == plain
