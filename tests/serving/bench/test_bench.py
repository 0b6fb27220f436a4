"""`outrider bench` on tiny models: what it reports and what both sides generate, never how fast."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from outrider_serving import cli
from outrider_serving.bench.breakdown import Breakdown
from outrider_serving.bench.engine_side import EngineSide
from outrider_serving.bench.opening import Wanted, open_sides
from outrider_serving.bench.results import BenchError, first_difference
from outrider_serving.bench.sides import Side
from outrider_serving.bench.workloads import Job, Sampling, Workload, parse_workload
from outrider_serving.engine.options import EngineOptions
from outrider_serving.settings import Method, NgramSettings, Proposer, default_settings
from serving.tiny import make_tiny_model

TOKENS = 12
GREEDY = Sampling()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("models") / "gemma3"
    return str(make_tiny_model(directory, "gemma3", dtype=torch.float64))


def job(workload: str, sampling: Sampling = GREEDY) -> Job:
    return Job(parse_workload(workload), TOKENS, sampling)


def sides(model: str, *methods: Method | None) -> tuple[Side, Side]:
    a, b = (
        Wanted(str(method), None if method is None else default_settings(Proposer(method=method)))
        for method in methods
    )
    return open_sides(EngineOptions(model, context_length=256, page_size=4), (a, b))


@pytest.fixture(scope="module")
def engines(model: str) -> tuple[Side, Side]:
    return sides(model, Method.NGRAM, Method.NONE)


def test_a_run_of_an_engine(engines: tuple[Side, Side]) -> None:
    ngram, off = (side.run(job("batch3")) for side in engines)
    for run in (ngram, off):
        assert [stream.tokens for stream in run.streams] == [TOKENS] * 3
        for stream in run.streams:
            assert list(stream.arrivals) == sorted(stream.arrivals)
            assert stream.arrivals[0] > 0
            assert stream.arrivals[-1] <= run.seconds
    for stream in off.streams:
        assert (stream.proposed, stream.accepted, len(stream.arrivals)) == (0, 0, TOKENS)
    for stream in ngram.streams:
        assert stream.accepted is not None
        assert stream.tokens == len(stream.arrivals) + stream.accepted
    assert sum(stream.accepted or 0 for stream in ngram.streams) > 0


def test_a_run_tells_where_its_decoding_steps_went(engines: tuple[Side, Side]) -> None:
    _, off = engines
    parts = off.run(job("open")).breakdown
    assert parts is not None
    # The first token comes with the reading of the prompt.
    assert (parts.steps, parts.rows, parts.tokens) == (TOKENS - 1, TOKENS - 1, TOKENS - 1)
    assert parts.proposal >= 0
    assert 0 < parts.target < parts.busy
    assert parts != Breakdown()


def test_each_run_reads_its_prompts_anew(engines: tuple[Side, Side]) -> None:
    """All pages of a prompt would otherwise be there when it comes again."""
    _, off = engines
    assert isinstance(off, EngineSide)
    reused = []
    step = off._core.step

    def watched() -> Any:
        output = step()
        reused.extend(row.reused for row in output.record.rows if output.record is not None)
        return output

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(off._core, "step", watched)
        off.run(job("repeat:2"))
        off.run(job("repeat:2"))
    assert len(reused) > 0
    assert set(reused) == {0}


def test_speculation_changes_no_token(engines: tuple[Side, Side]) -> None:
    ngram, off = engines
    for workload in ("open", "repeat", "batch4"):
        for sampling in (GREEDY, Sampling(0.8, top_p=0.95, seed=3)):
            wanted = job(workload, sampling)
            assert first_difference(ngram.run(wanted), off.run(wanted)) is None


def test_transformers_generates_the_same_alone_and_in_batches(model: str, engines: tuple[Side, Side]) -> None:
    _, off = engines
    _, hf = sides(model, Method.NONE, None)
    for workload in ("repeat", "batch3", "open:2"):
        theirs = hf.run(job(workload))
        assert first_difference(off.run(job(workload)), theirs) is None
        assert theirs.breakdown is None
        for stream in theirs.streams:
            assert (stream.proposed, len(stream.arrivals)) == (None, TOKENS)
            assert 0 < stream.arrivals[0] <= stream.arrivals[-1]
    hf.close()


def test_transformers_draws_by_seed(model: str) -> None:
    _, hf = sides(model, Method.NONE, None)
    one, again, other = (hf.run(job("open", Sampling(1.0, seed=seed))) for seed in (1, 1, 2))
    assert first_difference(one, again) is None
    assert first_difference(one, other) is not None


def test_a_workload_that_does_not_fit_is_named(engines: tuple[Side, Side]) -> None:
    _, off = engines
    with pytest.raises(BenchError, match=r"none, workload code: prompt \(\d+ tokens\) and max_tokens"):
        off.run(job("code"))


def bench(model: str, file: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """The exit status and the JSON of the command, with few tokens and pairs."""
    common = ["--tokens", "8", "--pairs", "2..2", "--context-length", "256", "--json", str(file)]
    status = cli.main(["bench", model, *common, *flags])
    return status, json.loads(file.read_text())


def test_the_command(model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    status, found = bench(model, tmp_path / "pairs.json", "--workloads", "open,batch2")
    assert status == 0
    out, _ = capsys.readouterr()
    assert out.count("identical") == 2
    assert "outside the target" in out
    assert [side["name"] for side in found["sides"]] == ["ngram", "off"]
    assert found["sides"][1]["settings"]["arms"]["stable"]["proposer"]["method"] == "none"
    assert found["engine"]["model"] == model
    assert found["rule"]["half_width"] == 0.03
    for comparison in found["comparisons"]:
        assert len(comparison["pairs"]) == 2
        assert comparison["equality"] == {"pairs": 2, "different": 0, "first": None}
        assert comparison["outputs"]["a"] == comparison["outputs"]["b"]


def test_a_settings_file_is_a_side(model: str, tmp_path: Path) -> None:
    file = tmp_path / "shallow.json"
    shallow = Proposer(method=Method.NGRAM, max_depth=1, ngram=NgramSettings())
    file.write_text(default_settings(shallow).model_dump_json(by_alias=True))
    flags = ["--workloads", "repeat", "--compare", f"{file},ngram"]
    _, found = bench(model, tmp_path / "pairs.json", *flags)
    assert [side["name"] for side in found["sides"]] == ["shallow", "ngram"]
    assert found["sides"][0]["settings"]["arms"]["stable"]["proposer"]["maxDepth"] == 1
    for pair in found["comparisons"][0]["pairs"]:
        (stream,) = pair["a"]["streams"]
        # How deep within the limit, 0 included, measured times say.
        assert stream["proposed"] <= len(stream["arrivals"])


def test_a_side_against_itself(model: str, tmp_path: Path) -> None:
    _, found = bench(model, tmp_path / "pairs.json", "--workloads", "open", "--compare", "off,off")
    assert [side["name"] for side in found["sides"]] == ["off", "off again"]
    assert found["comparisons"][0]["equality"]["different"] == 0


def test_too_long_a_context_is_bad_input(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["bench", model, "--context-length", "100000"]) == 2
    said = capsys.readouterr().err.splitlines()[-1]
    assert said.startswith("outrider bench: error: context length 100000 exceeds")


def test_what_a_side_has_stored_is_remembered_and_nothing_else(model: str) -> None:
    """What is measured leaves nothing, so that each run finds what the first one found."""
    suffix, off = sides(model, Method.SUFFIX, Method.NONE)
    assert isinstance(suffix, EngineSide)
    stored = ("a b c d e f", "g h i j k")
    again = Job(Workload("again", stored, at_once=1, stored=stored), TOKENS, GREEDY)
    cold = Job(Workload("cold", stored), TOKENS, GREEDY)
    outputs = suffix.prepare(again)
    assert [len(written.output) for written in outputs] == [TOKENS, TOKENS]
    remembered = suffix.history
    assert remembered.tokens == 2 * (TOKENS + 1)
    known = suffix.run(again)
    assert known.written == outputs
    assert first_difference(known, off.run(again)) is None
    assert suffix.history == remembered
    assert suffix.prepare(cold) == ()
    assert suffix.history.tokens == 0
    for side in (suffix, off):
        side.close()
