"""tools/gpu_check without a GPU: its limits, ratios and report, which parts run, and how it ends."""

from __future__ import annotations

import importlib.util
import json
import re
import sys
from collections.abc import Iterator
from dataclasses import asdict
from importlib import import_module
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tools.gpu_check import __main__ as check
from tools.gpu_check import cost, engine, generate, parity, part, replay
from tools.gpu_check.finding import Finding, skipped, table
from tools.gpu_check.target import model_of
from torch import Tensor

from outrider_serving.engine.target.paged import TorchPass
from outrider_serving.engine.target.runner import Pass
from outrider_serving.engine.target.triton.attention import ERROR

CPU = torch.device("cpu")
HEADS = parity.Heads("2 x 2 of 16", 2, 2, 16, dtype=torch.float32)
SHAPE: dict[str, Any] = {
    "vocab_size": 50,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
}


# The parts.


def parity_of(monkeypatch: pytest.MonkeyPatch, error: float, *, written: bool = True) -> Finding:
    """What is found where kernels are off by so much, and write the new tokens or do not."""

    def run(layer: parity.Layer) -> Tensor:
        before = [tensor.clone() for tensor in layer.store.layer(0)]
        pages = TorchPass(layer.store, layer.batch)
        out = pages.attend(0, layer.query, layer.key, layer.value, layer.scoring)
        if not written:
            for tensor, old in zip(layer.store.layer(0), before, strict=True):
                tensor.copy_(old)
        out.view(-1)[out.abs().argmax()] *= 1 + error
        return out

    monkeypatch.setattr(parity, "run", run)
    layer = parity.layer_of(HEADS, [(37, 1, 4), (0, 9, 0)], CPU)
    return parity._against_torch(HEADS, "trees", layer)


@pytest.mark.parametrize(("share", "right"), [(0.0, True), (0.8, True), (1.2, False), (100.0, False)])
def test_attention_is_right_up_to_its_limit(
    monkeypatch: pytest.MonkeyPatch, share: float, right: bool
) -> None:
    found = parity_of(monkeypatch, share * ERROR[torch.float32])
    assert found.right is right
    assert found.numbers["limit"] == ERROR[torch.float32]
    assert found.numbers["error"] == pytest.approx(share * ERROR[torch.float32], abs=1e-6)


def test_attention_that_is_nan_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    assert parity_of(monkeypatch, float("nan")).right is False


def test_attention_that_keeps_no_new_token_is_not_right(monkeypatch: pytest.MonkeyPatch) -> None:
    found = parity_of(monkeypatch, 0.0, written=False)
    assert found.right is False
    assert found.figure.endswith("; the store differs")


def test_a_difference_is_in_standard_deviations() -> None:
    logits, states = torch.randn(4, 9), torch.randn(7, 8)
    wanted = Pass(logits, {2: states})
    assert replay._difference(wanted.copy(), wanted) == 0
    further = Pass(logits + 0.5 * logits.std(), {2: states})
    assert replay._difference(further, wanted) == pytest.approx(0.5, rel=1e-5)
    further = Pass(logits, {2: states - 2 * states.std()})
    assert replay._difference(further, wanted) == pytest.approx(2, rel=1e-5)


def test_graphs_may_take_what_is_left_free_for_them() -> None:
    assert replay._memory("float32", 3 << 20, 3 << 20).right
    found = replay._memory("float32", (3 << 20) + 1, 3 << 20)
    assert (found.right, found.figure) == (False, "3 MiB of 3 MiB that are left free for them")


@given(sizes=st.lists(st.integers(1, 512), min_size=1, max_size=20))
def test_batches_have_the_size_that_is_asked_for(sizes: list[int]) -> None:
    texts, target = replay._Texts(), SimpleNamespace(pages=lambda request: [request])
    for size in sizes:
        pieces = texts.pieces(size, target)
        assert sum(piece.tokens for piece in pieces) == size
        assert all(piece.context + piece.tokens <= replay._TOKENS for piece in pieces)
        assert len({piece.pages[0] for piece in pieces}) == len(pieces)


def test_ratios_of_steps() -> None:
    found = cost._decoding("it", 8, taken=0.004, read=6_000_000_000, speed=3e12)
    assert found.figure == "4.00 ms, 2.00 times what 6.0 GB take at that speed"
    assert found.numbers == {"seconds": 0.004, "bytes": 6_000_000_000, "least_seconds": 0.002}
    found = cost._verifying("it", 8, taken=0.0055, decoding=0.005)
    assert found.figure == "5.50 ms, 1.10 of a decoding step"
    assert found.right is None  # speeds are told, and nothing is required of them


@pytest.mark.parametrize("tied", [True, False])
def test_what_a_step_reads(tied: bool) -> None:
    model = model_of({**SHAPE, "tie_word_embeddings": tied}, CPU, torch.bfloat16)
    layer = 32 * 32 * 2 + 32 * 16 * 2 + 3 * 32 * 48 + 2 * 32
    weights = 2 * layer + 32 + 50 * 32  # one table of the vocabulary: the head
    context = 2 * 2 * 2 * 8 * cost._CONTEXT
    assert cost._bytes(model, 1) == 2 * (weights + context)
    assert cost._bytes(model, 8) == 2 * (weights + 8 * context)


def test_ratios_of_pairs_are_theirs_by_ours() -> None:
    found = generate._against("it", 100, [(1.0, 3.0), (2.0, 2.0), (1.0, 2.0)])
    assert found.figure == "100 tokens/s against 50, prompts included: 2.00 (1.00 to 3.00, 3 pairs)"
    assert found.numbers == {"tokens": 100, "pairs_seconds": [(1.0, 3.0), (2.0, 2.0), (1.0, 2.0)]}


def test_the_engine_is_not_right_without_graphs() -> None:
    found = {one.what: one for one in engine.find(CPU)}
    assert [(one.right, one.figure[:4]) for what, one in found.items() if what.startswith("graphs")] == [
        (False, "none"),
        (False, "none"),
    ]
    assert found["greedy tokens with n-gram on and off"].right
    assert found["proposed tokens were accepted"].right


# The whole.


def test_every_part_is_a_module_that_has_its_time() -> None:
    assert tuple(check.SECONDS) == part.PARTS
    assert sum(check.SECONDS.values()) <= 480  # the 8 minutes of `make help`
    for name in part.PARTS:
        assert callable(import_module(f"tools.gpu_check.{name}").find)


def test_a_part_that_fails_keeps_what_it_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def find(device: torch.device) -> Iterator[Finding]:
        assert device == torch.device("cuda", 0)
        yield Finding("first", "1 ms", None, {"seconds": 0.001})
        raise RuntimeError("the device is gone")

    modules = {"tools.gpu_check.cost": SimpleNamespace(find=find)}
    monkeypatch.setattr(part, "import_module", modules.__getitem__)
    path = tmp_path / "cost.jsonl"
    monkeypatch.setattr(sys, "argv", ["part", "cost", str(path)])
    with pytest.raises(RuntimeError, match="gone"):
        part.main()
    (line,) = path.read_text().splitlines()
    assert Finding(**json.loads(line)) == Finding("first", "1 ms", None, {"seconds": 0.001})


def program(tmp_path: Path, text: str) -> str:
    """In the place of the Python that runs a part: it is called with -m, module, part and file."""
    path = tmp_path / "python"
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return str(path)


LINE = json.dumps(asdict(Finding("it", "fine", right=True)))


@pytest.mark.parametrize(
    ("text", "limit", "right", "figure"),
    [
        ("exit 0", 60, True, r"\d+ s"),
        ("echo no memory >&2; exit 3", 60, False, r"\d+ s, exit status 3: no memory"),
        ("kill -9 $$", 60, False, r"\d+ s, exit status -9: "),
        ("exec sleep 60", 2, False, "did not end within 2 s"),
    ],
    ids=["ends", "fails", "killed", "hangs"],
)
def test_how_a_part_ended_is_found(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: int, right: bool, figure: str
) -> None:
    monkeypatch.setattr(check.sys, "executable", program(tmp_path, f"echo '{LINE}' > $4; {text}"))
    monkeypatch.setitem(check.SECONDS, "cost", limit)
    path = tmp_path / "cost.jsonl"
    path.write_text("of an earlier run")
    found, end = check._run("cost", path)
    assert found == Finding("it", "fine", right=True)
    assert (end.what, end.right) == ("the part itself", right)
    assert re.fullmatch(figure, end.figure)


def test_a_part_that_finds_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check.sys, "executable", program(tmp_path, "exit 1"))
    (end,) = check._run("cost", tmp_path / "cost.jsonl")
    assert (end.what, end.right) == ("the part itself", False)


@pytest.fixture
def on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(check, "_lacking", lambda: None)


@pytest.mark.usefixtures("on_a_gpu")
@pytest.mark.parametrize(
    ("words", "parts"), [([], part.PARTS), (["--parts", "engine", "cost"], ("engine", "cost"))]
)
@pytest.mark.parametrize(("right", "status"), [(True, 0), (None, 0), (False, 1)])
def test_parts_run_as_asked(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    words: list[str],
    parts: tuple[str, ...],
    right: bool | None,
    status: int,
) -> None:
    def run(name: str, path: Path) -> list[Finding]:
        ran.append((name, path))
        return [Finding("it", "x", right if name == "cost" else True)]

    ran: list[tuple[str, Path]] = []
    monkeypatch.setattr(check, "_run", run)
    out = tmp_path / "new" / "folder"
    assert check.main(["--out", str(out), *words]) == status
    assert ran == [(name, out / f"{name}.jsonl") for name in parts]
    report = (out / "report.md").read_text()
    assert report == table({name: run(name, out) for name in parts})
    assert report in capsys.readouterr().out
    raw = json.loads((out / "findings.json").read_text())
    assert list(raw) == list(parts)
    assert raw["cost"] == [{"what": "it", "figure": "x", "right": right, "numbers": {}}]


def test_the_report() -> None:
    found = {
        "parity": [Finding("heads", "a | b", right=True), Finding("trees", "off", right=False)],
        "cost": [Finding("copying", "3 TB/s"), skipped("no torch")],
    }
    assert table(found).splitlines() == [
        "| part | what | found | right |",
        "| --- | --- | --- | --- |",
        "| parity | heads | a / b | yes |",
        "| parity | trees | off | **NO** |",
        "| cost | copying | 3 TB/s |  |",
        "| cost | all of it | skipped: no torch |  |",
    ]


@pytest.mark.parametrize("words", [[], ["--out", "x", "--parts", "speed"]])
def test_words_that_are_not_understood(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        check.main(words)
    assert ended.value.code == 2
    assert "usage: python -m tools.gpu_check" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("cuda", "told"),
    [("13.2", "is built for CUDA 13.2. Run this on a machine"), (None, "is built without CUDA")],
)
def test_without_a_gpu_it_says_so(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
    cuda: str | None,
    told: str,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", cuda)
    assert check.main(["--out", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert said.startswith("gpu-check: torch sees no GPU here. ")
    assert told in said
    assert "nvidia-smi" in said
    assert not (tmp_path / "out").exists()


def test_without_a_package_it_says_which(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    real = importlib.util.find_spec
    monkeypatch.setattr(
        check.importlib.util, "find_spec", lambda name: None if name == "triton" else real(name)
    )
    assert check.main(["--out", str(tmp_path)]) == 2
    assert f"{sys.executable} has no triton: name a Python that has torch" in capsys.readouterr().err
