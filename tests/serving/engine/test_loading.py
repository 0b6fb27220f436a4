"""Which models are found, under which revision, and what is said about those that are not."""

from __future__ import annotations

import json
import shutil
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from outrider_serving.models import gguf
from outrider_serving.models.errors import ModelError
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.models.source import DirectorySource, HubSource, PackageSource, parse_source


@pytest.fixture
def model(tiny_directory: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_directory, tmp_path / "model"))


def edit(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def test_kinds_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    assert parse_source("package:some_model") == PackageSource("some_model")
    assert parse_source(str(tmp_path)) == DirectorySource(tmp_path)
    assert parse_source("org/name-1.5") == HubSource("org/name-1.5")
    assert parse_source("org/local") == DirectorySource(Path("org/local"))


@pytest.mark.parametrize(
    "text", ["", "nonsense", "a/b/c", "package:", "package:no-name", "/no/where", "./no", "a b/c"]
)
def test_sources_that_are_not_understood(text: str) -> None:
    with pytest.raises(ModelError, match="allowed: package:NAME"):
        parse_source(text)


def test_a_directory_with_safetensors(tiny_directory: Path) -> None:
    loaded = load_model(str(tiny_directory))
    assert (loaded.dtype, loaded.context_length, loaded.vocab_size) == ("float32", 512, 320)
    assert loaded.eos_token_ids == {1}
    assert loaded.revision.startswith("sha256:")
    assert len(loaded.revision) == 71


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_dtype(tiny_directory: Path, dtype: str) -> None:
    loaded = load_model(str(tiny_directory), dtype=dtype)  # type: ignore[arg-type]
    assert loaded.dtype == dtype
    assert next(loaded.model.parameters()).dtype == getattr(torch, dtype)


def test_end_of_sequence_tokens_of_the_generation_config(model: Path) -> None:
    path = model / "generation_config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "eos_token_id": [1, 7]}))
    assert load_model(str(model)).eos_token_ids == {1, 7}


def test_revision_is_a_digest_of_config_tokenizer_and_weights(model: Path, tmp_path: Path) -> None:
    first = load_model(str(model)).revision
    (model / "README.md").write_text("of no importance")
    (model / "more").mkdir()
    elsewhere = shutil.copytree(model, tmp_path / "elsewhere")
    assert load_model(str(elsewhere)).revision == first
    for name in ("config.json", "tokenizer.json", "model.safetensors"):
        changed = Path(shutil.copytree(model, tmp_path / name))
        with (changed / name).open("ab") as file:
            file.write(b" " if name.endswith("json") else b"")
        if name == "model.safetensors":
            weights = bytearray((changed / name).read_bytes())
            weights[-1] ^= 1
            (changed / name).write_bytes(weights)
        assert load_model(str(changed)).revision != first


def test_a_wanted_revision_must_be_the_digest(model: Path) -> None:
    revision = load_model(str(model)).revision
    assert load_model(str(model), revision=revision).revision == revision
    with pytest.raises(ModelError, match=f"not of revision main: its files have {revision}"):
        load_model(str(model), revision="main")


def test_context_length(model: Path) -> None:
    assert load_model(str(model), context_length=100).context_length == 100
    with pytest.raises(ModelError, match=r"context length 513 exceeds that of model .*, which is 512"):
        load_model(str(model), context_length=513)
    with pytest.raises(ModelError, match="context length 1 is too short: at least 2"):
        load_model(str(model), context_length=1)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"model_type": "novel", "auto_map": {"AutoConfig": "novel.Config"}},
            "'novel'; .*trust_remote_code.* never run",
        ),
        ({"model_type": "novel"}, "does not know model_type 'novel'"),
        (
            {"model_type": "mamba2", "num_heads": 8, "head_dim": 8},
            r"\(mamba2\) cannot be served: it has recurrent state",
        ),
        ({"model_type": "t5"}, r"\(t5\) cannot be served: transformers has no causal language model"),
        (
            {"model_type": "bloom"},
            r"\(bloom\) cannot be served: it does not use transformers' attention interface",
        ),
        (
            {"model_type": "gemma3_text", "layer_types": ["chunked_attention"] * 3},
            "cannot be served: it has layers of type chunked_attention",
        ),
        (
            {"model_type": "gemma3_text", "use_bidirectional_attention": True},
            "its attention is bidirectional",
        ),
        (
            {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0, "rope_theta": 10000.0}},
            r"\(llama\) cannot be served: its rotary embedding \(dynamic\) depends on the length",
        ),
        ({"model_type": "gemma3", "text_config": {}, "vision_config": {}}, "it is multimodal"),
    ],
)
def test_models_that_cannot_be_served_are_refused_by_name(
    model: Path, changes: dict[str, object], message: str
) -> None:
    edit(model, **changes)
    with pytest.raises(ModelError, match=message):
        load_model(str(model))


def test_a_model_with_attention_of_its_own_kind(tmp_path: Path, model: Path) -> None:
    """gpt-oss has attention sinks: an argument that changes the result, and that is noticed."""
    edit(
        model,
        model_type="gpt_oss",
        architectures=["GptOssForCausalLM"],
        num_local_experts=2,
        num_experts_per_tok=1,
        layer_types=["full_attention"] * 3,
    )
    with pytest.raises(ModelError, match="GptOssAttention needs s_aux"):
        load_model(str(model))


def test_files_that_are_missing_or_broken(model: Path) -> None:
    weights = model / "model.safetensors"
    content = weights.read_bytes()
    weights.write_bytes(content[:1000])
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(model))
    weights.unlink()
    with pytest.raises(ModelError, match=r"no weights: neither \*.safetensors nor \*.gguf"):
        load_model(str(model))
    (model / "a.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(model))
    (model / "b.gguf").write_bytes(b"")
    with pytest.raises(ModelError, match=r"several GGUF files, not one: a.gguf, b.gguf"):
        load_model(str(model))
    weights.write_bytes(content)
    (model / "config.json").write_text("{")
    with pytest.raises(ModelError, match="cannot be loaded"):
        load_model(str(model))


def test_packages(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(tmp_path), *sys.path])
    (tmp_path / "empty_model.py").write_text("")
    (tmp_path / "failing_model.py").write_text("def assemble(path): raise FileNotFoundError('part 3')")
    with pytest.raises(ModelError, match=r"package:no_such_model cannot be imported .* is it installed"):
        load_model("package:no_such_model")
    with pytest.raises(ModelError, match=r"package:empty_model carries no model"):
        load_model("package:empty_model")
    with pytest.raises(ModelError, match=r"package:failing_model cannot write its GGUF: part 3"):
        load_model("package:failing_model")


def test_the_real_model_is_the_one_that_transformers_loads(gemma: LoadedModel) -> None:
    assert (gemma.dtype, gemma.context_length, gemma.vocab_size) == ("float32", 32768, 262144)
    assert gemma.revision.startswith("sha256:")
    assert gemma.eos_token_ids == {1}


def test_a_converted_gguf_is_kept_and_used(
    tiny_directory: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The conversion is stood in for (it is transformers' own, and slow): what counts is when it runs."""
    conversions = []

    def convert(directory: Path, name: str | None, dtype: torch.dtype, attention: str) -> object:
        if name is not None:
            conversions.append(name)
        source = directory if name is None else tiny_directory
        return (
            AutoModelForCausalLM.from_pretrained(source, dtype=dtype, attn_implementation=attention),
            AutoTokenizer.from_pretrained(source),
        )

    monkeypatch.setattr(gguf, "_load", convert)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    (directory / "tiny.gguf").write_bytes(b"weights")
    first = load_model(str(directory))
    assert first.dtype == "bfloat16"
    again = load_model(str(directory))
    assert conversions == ["tiny.gguf"]
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)

    load_model(str(directory), dtype="float32")
    (directory / "tiny.gguf").write_bytes(b"other weights")
    load_model(str(directory))
    assert len(conversions) == 3

    for kept in (tmp_path / "cache").rglob("*.safetensors"):
        kept.unlink()
    load_model(str(directory))
    assert len(conversions) == 4
    assert not list((tmp_path / "cache").rglob(".converting*"))

    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load_model(str(directory))
    load_model(str(directory))
    assert len(conversions) == 6
