"""Which models are found, under which revision, and what is said about those that are not."""

from __future__ import annotations

import json
import logging
import re
import shutil
import struct
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import gguf as gguf_format
import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, GptOssConfig, GptOssForCausalLM, PreTrainedConfig

from outrider_operator.spec import SpeculativeModelSpec
from outrider_operator.trouble import Trouble, advice
from outrider_serving.models import gguf
from outrider_serving.models.capability import check_config
from outrider_serving.models.checkpoint import Loaded, load_checkpoint
from outrider_serving.models.errors import ModelError
from outrider_serving.models.files import ModelFiles
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.models.source import (
    DirectorySource,
    HubSource,
    PackageSource,
    check_source,
    parse_source,
)
from serving.tiny import make_tokenizer


@pytest.fixture
def model(tiny_directory: Path, tmp_path: Path) -> Path:
    """A copy that a test may damage."""
    return Path(shutil.copytree(tiny_directory, tmp_path / "model"))


def edit(model: Path, **changes: object) -> None:
    path = model / "config.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), **changes}))


def rewrite(model: Path, change: Callable[[dict[str, torch.Tensor]], None]) -> None:
    """Change the weights of every file of safetensors under a directory."""
    for path in model.rglob("*.safetensors"):
        weights = load_file(path)
        change(weights)
        save_file(weights, path, metadata={"format": "pt"})


def without(part: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def change(weights: dict[str, torch.Tensor]) -> None:
        for name in [name for name in weights if part in name]:
            del weights[name]

    return change


def write_gguf(
    path: Path, leave_out: str | None = None, *, architecture: str = "llama", more_tokens: int = 0
) -> None:
    """A random llama of two layers, as llama.cpp names things; without the tensors of some name."""
    tokenizer = make_tokenizer()
    tokens = tokenizer.convert_ids_to_tokens(list(range(len(tokenizer))))
    tokens += [f"more {number}" for number in range(more_tokens)]
    writer = gguf_format.GGUFWriter(path, architecture)
    writer.add_context_length(64)
    writer.add_embedding_length(32)
    writer.add_block_count(2)
    writer.add_feed_forward_length(64)
    writer.add_head_count(4)
    writer.add_head_count_kv(2)
    writer.add_layer_norm_rms_eps(1e-5)
    writer.add_rope_freq_base(10_000.0)
    if not more_tokens:
        writer.add_vocab_size(len(tokenizer))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3, 3] + [1] * (len(tokens) - 2))
    merges = json.loads(tokenizer.backend_tokenizer.to_str())["model"]["merges"]
    writer.add_token_merges([" ".join(pair) for pair in merges])
    writer.add_bos_token_id(0)
    writer.add_eos_token_id(1)
    layer = {"attn_q": (32, 32), "attn_k": (16, 32), "attn_v": (16, 32), "attn_output": (32, 32)}
    layer |= {"ffn_gate": (64, 32), "ffn_up": (64, 32), "ffn_down": (32, 64)}
    shapes: dict[str, tuple[int, ...]] = {"token_embd": (len(tokenizer), 32), "output_norm": (32,)}
    for block in range(2):
        shapes |= {f"blk.{block}.{name}": shape for name, shape in layer.items()}
        shapes |= {f"blk.{block}.{name}": (32,) for name in ("attn_norm", "ffn_norm")}
    generator = np.random.default_rng(0)
    for name, shape in shapes.items():
        if leave_out is None or leave_out not in name:
            writer.add_tensor(f"{name}.weight", generator.normal(0, 0.2, shape).astype(np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def test_kinds_of_sources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "org" / "local").mkdir(parents=True)
    assert parse_source("package:some_model") == PackageSource("some_model")
    assert parse_source(str(tmp_path)) == DirectorySource(tmp_path)
    assert parse_source("org/name-1.5") == HubSource("org/name-1.5")
    assert parse_source("org/local") == DirectorySource(Path("org/local"))
    assert parse_source("hub:org/local") == HubSource("org/local")


@pytest.mark.parametrize(
    "text", ["", "nonsense", "a/b/c", "package:", "package:no-name", "/no/where", "./no", "a b/c"]
)
def test_sources_that_are_not_understood(text: str) -> None:
    with pytest.raises(ModelError, match="allowed: package:NAME"):
        parse_source(text)


def test_what_is_plainly_not_there(model: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [str(model), *sys.path])
    (model / "unfinished.py").write_text("raise AssertionError('it was imported')")
    for there in (PackageSource("unfinished"), DirectorySource(model), HubSource("no-such/model")):
        check_source(there)
    for missing in ("no_such_package", "no_such_package.part", "__main__.part"):
        monkeypatch.setattr(sys.modules["__main__"], "__spec__", None)
        with pytest.raises(
            ModelError, match=r"package:\w+.*there is no Python package '\w+': is it installed"
        ):
            check_source(PackageSource(missing))
    with pytest.raises(ModelError, match="cannot be read"):
        check_source(DirectorySource(model / "nowhere"))
    with pytest.raises(ModelError, match="cannot be read"):
        check_source(DirectorySource(model / "config.json"))
    (model / "config.json").unlink()
    with pytest.raises(ModelError, match=r"has no config.json, which says how to read its safetensors"):
        check_source(DirectorySource(model))
    (model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match=r"no weights: neither \*.safetensors nor \*.gguf"):
        check_source(DirectorySource(model))


def test_looking_for_a_model_imports_nothing_heavy() -> None:
    code = (
        "import sys, outrider_serving.models.errors, outrider_serving.models.source as s\n"
        "s.check_source(s.parse_source('package:torch'))\n"
        "print(sorted({'torch', 'transformers', 'huggingface_hub', 'numpy'} & set(sys.modules)))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "[]"


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
    with pytest.raises(
        ModelError, match=r"context length 513 exceeds that of model .*, which is 512"
    ) as told:
        load_model(str(model), context_length=513)
    spec = SpeculativeModelSpec.model_validate(
        {"model": {"source": {"package": "weights"}, "contextLength": 513}}
    )
    field = "the context length is spec.model.contextLength"
    assert advice(Trouble("CrashLoopBackOff", str(told.value)), spec) == (field,)
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


def test_a_model_with_attention_of_its_own_kind(model: Path) -> None:
    """gpt-oss has attention sinks: an argument that changes the result, and that is noticed."""
    config = json.loads((model / "config.json").read_text())
    shape = {name: config[name] for name in ("vocab_size", "hidden_size", "intermediate_size", "head_dim")}
    (model / "model.safetensors").unlink()
    GptOssForCausalLM(
        GptOssConfig(
            **shape,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            num_local_experts=2,
            num_experts_per_tok=1,
            layer_types=["full_attention"],
            pad_token_id=None,
            rope_parameters={"rope_type": "default", "rope_theta": 10_000.0},
        )
    ).save_pretrained(model)
    with pytest.raises(ModelError, match="GptOssAttention needs s_aux"):
        load_model(str(model))


def test_weights_that_are_missing(model: Path) -> None:
    rewrite(model, without("layers.1.mlp"))
    with pytest.raises(ModelError) as refused:
        load_model(str(model))
    names = ", ".join(f"model.layers.1.mlp.{name}_proj.weight" for name in ("down", "gate", "up"))
    assert str(refused.value) == f"model {model} lacks 3 of the weights that config.json asks for: {names}"
    rewrite(model, without("layers"))
    with pytest.raises(ModelError, match=r"lacks 27 of the weights .*, \.\.\.$"):
        load_model(str(model))


def test_an_output_layer_that_is_the_embedding_need_not_be_in_the_files(model: Path) -> None:
    rewrite(model, without("lm_head"))
    with pytest.raises(ModelError, match=r"lacks 1 of the weights .*: lm_head.weight"):
        load_model(str(model))
    edit(model, tie_word_embeddings=True)
    assert load_model(str(model)).vocab_size == 320
    rewrite(model, without("embed_tokens"))
    with pytest.raises(ModelError, match=r"lacks 2 of the weights .*: lm_head.weight, model.embed_tokens"):
        load_model(str(model))


def test_weights_of_another_shape(model: Path) -> None:
    edit(model, intermediate_size=48)
    with pytest.raises(
        ModelError,
        match=r"9 weights of another shape than config.json asks for: "
        r"model.layers.0.mlp.down_proj.weight is \(32, 64\), not \(32, 48\), .*, \.\.\.$",
    ):
        load_model(str(model))


def test_weights_that_the_model_does_not_have_are_left_aside(
    model: Path, caplog: pytest.LogCaptureFixture
) -> None:
    rewrite(model, lambda weights: weights.update(extra=torch.ones(2)))
    with caplog.at_level(logging.WARNING, "outrider_serving"):
        load_model(str(model))
    assert f"1 weights of model {model} are not used: extra" in caplog.text


@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(model: Path, value: float) -> None:
    def damage(weights: dict[str, torch.Tensor]) -> None:
        weights["model.layers.1.mlp.up_proj.weight"][3, 5] = value

    rewrite(model, damage)
    with pytest.raises(ModelError, match=r"computes NaN or infinity, .* damaged or too large for float32"):
        load_model(str(model))


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"[]", r"config.json must hold a JSON object, but holds '\[\]'"),
        (b"{", "config.json must hold a JSON object: Expecting"),
        (b"\xff", "config.json must hold a JSON object: 'utf-8'"),
        (b"{}", "config.json must name the architecture as model_type, like 'llama'"),
        (b'{"model_type": ["llama"]}', "config.json must name the architecture as model_type"),
        (None, "has no config.json, which says how to read its safetensors"),
    ],
)
def test_a_config_that_is_none(model: Path, content: bytes | None, message: str) -> None:
    path = model / "config.json"
    path.unlink()
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(ModelError, match=message):
        load_model(str(model))


def test_a_directory_without_a_tokenizer(model: Path) -> None:
    for path in model.glob("tokenizer*"):
        path.unlink()
    with pytest.raises(ModelError, match="cannot be loaded: its files give no tokenizer"):
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

    def load(directory: Path, name: str | None, *how: Any) -> Loaded:
        if name is not None:
            conversions.append(name)
        return load_checkpoint(directory if name is None else tiny_directory, None, *how)

    monkeypatch.setattr(gguf, "load_checkpoint", load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    directory = tmp_path / "model"
    directory.mkdir()
    write_gguf(directory / "tiny.gguf")
    first = load_model(str(directory))
    assert first.dtype == "bfloat16"
    again = load_model(str(directory))
    assert conversions == ["tiny.gguf"]
    for a, b in zip(first.model.parameters(), again.model.parameters(), strict=True):
        assert torch.equal(a, b)

    load_model(str(directory), dtype="float32")
    write_gguf(directory / "tiny.gguf", "blk.1.ffn")
    load_model(str(directory))
    assert len(conversions) == 3

    for kept in (tmp_path / "cache").rglob("*.safetensors"):
        kept.unlink()
    load_model(str(directory))
    assert len(conversions) == 4
    rewrite(tmp_path / "cache", without("layers.1.mlp"))
    again = load_model(str(directory))
    assert len(conversions) == 5
    assert not list((tmp_path / "cache").rglob(".converting*"))

    (tmp_path / "file").write_text("not a directory")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    load_model(str(directory))
    load_model(str(directory))
    assert len(conversions) == 7


def test_a_gguf_must_hold_every_weight(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for name, left_out in (("whole", None), ("part", "blk.1.ffn")):
        (tmp_path / name).mkdir()
        write_gguf(tmp_path / name / "tiny.gguf", left_out)
    assert load_model(str(tmp_path / "whole"), dtype="float32").context_length == 64
    with pytest.raises(ModelError, match=r"lacks 4 of the weights that tiny.gguf asks for: model.layers.1."):
        load_model(str(tmp_path / "part"))
    assert len(list((tmp_path / "cache").rglob("*.safetensors"))) == 1


def test_what_a_gguf_says_is_looked_at_before_its_weights_are_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def load(*_: object) -> Loaded:
        raise AssertionError("the weights were read")

    monkeypatch.setattr(gguf, "load_checkpoint", load)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    for architecture, message in (
        ("llama", rf"^context length 65 exceeds that of model {tmp_path}/llama, which is 64$"),
        ("mamba", rf"^model {tmp_path}/mamba \(mamba\) cannot be served: it has recurrent state"),
        ("novel", rf"^model {tmp_path}/novel cannot be loaded: .* architecture novel is not supported"),
    ):
        (tmp_path / architecture).mkdir()
        write_gguf(tmp_path / architecture / "tiny.gguf", architecture=architecture)
        with pytest.raises(ModelError, match=message):
            load_model(str(tmp_path / architecture), context_length=65)


def described(directory: Path) -> PreTrainedConfig:
    return gguf.gguf_config(ModelFiles(directory, "tiny.gguf", "sha256:0"), "tiny")


class TestMetadataOfAGguf:
    @pytest.mark.parametrize("more_tokens", [0, 5000])
    def test_it_is_what_transformers_reads_of_the_whole_file(self, tmp_path: Path, more_tokens: int) -> None:
        write_gguf(tmp_path / "tiny.gguf", "output.weight", more_tokens=more_tokens)
        whole = AutoConfig.from_pretrained(tmp_path, gguf_file="tiny.gguf")
        config = described(tmp_path)
        assert type(config) is type(whole)
        assert {**config.to_dict(), "_name_or_path": whole.name_or_path} == whole.to_dict()
        assert (config.max_position_embeddings, config.vocab_size) == (64, 320 + more_tokens)

    def test_neither_weights_nor_tokens_are_read(
        self, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path, more_tokens=5000)
        first_tensor = gguf_format.GGUFReader(path).tensors[0].field.offset
        with path.open("r+b") as file:
            file.truncate(first_tensor)
        sizes = []

        def read(directory: str, gguf_file: str) -> PreTrainedConfig:
            sizes.append((Path(directory) / gguf_file).stat().st_size)
            return AutoConfig.from_pretrained(directory, gguf_file=gguf_file)

        monkeypatch.setattr(gguf, "AutoConfig", SimpleNamespace(from_pretrained=read))
        config = described(tmp_path)
        assert (config.max_position_embeddings, config.vocab_size) == (64, 5320)
        assert sizes[0] < 2000 < 50_000 < path.stat().st_size

    @pytest.mark.parametrize(
        ("architecture", "message"),
        [
            ("mamba", r"tiny \(mamba\) cannot be served: it has recurrent state"),
            ("bloom", r"tiny \(bloom\) cannot be served: it does not use transformers' attention interface"),
        ],
    )
    def test_it_tells_what_cannot_be_served(self, tmp_path: Path, architecture: str, message: str) -> None:
        write_gguf(tmp_path / "tiny.gguf", architecture=architecture)
        with pytest.raises(ModelError, match=message):
            check_config(described(tmp_path), "tiny")

    def test_an_architecture_that_transformers_does_not_know(self, tmp_path: Path) -> None:
        write_gguf(tmp_path / "tiny.gguf", architecture="novel")
        with pytest.raises(ValueError, match="novel is not supported"):
            described(tmp_path)

    def test_a_file_that_is_cut_off_anywhere_in_its_metadata(self, tmp_path: Path) -> None:
        path = tmp_path / "tiny.gguf"
        write_gguf(path)
        content = path.read_bytes()
        end = gguf_format.GGUFReader(path).tensors[0].field.offset
        for length in (*range(0, end, 97), end - 1):
            path.write_bytes(content[:length])
            with pytest.raises(
                ModelError, match=r"model tiny cannot be loaded: tiny.gguf is no whole GGUF: "
            ):
                described(tmp_path)

    @pytest.mark.parametrize(
        ("content", "message"),
        [
            (b"GGML" + bytes(20), "it begins with b'GGML' and is not of version 2 or 3"),
            (b"GGUF" + struct.pack("<IQQ", 1, 0, 0), "it begins with b'GGUF' and is not of version 2 or 3"),
            (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 1, b"k", 99), "a value of the unknown kind 99"),
            (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 9, 1), "of the unknown kind 9"),
            (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 8, 2**64 - 1), "unpack_from"),
            (struct.pack("<4sIQQQ1sIIQ", b"GGUF", 3, 0, 1, 1, b"k", 9, 0, 2**64 - 1), "ends within its"),
            (struct.pack("<4sIQQQ1sI", b"GGUF", 3, 0, 1, 2**64 - 1, b"k", 8), "is no whole GGUF"),
            (struct.pack("<4sIQQ", b"GGUF", 3, 0, 0), "it has no general.architecture"),
        ],
        ids=["magic", "version", "kind", "list of lists", "long list", "long array", "long key", "nameless"],
    )
    def test_a_file_that_is_no_gguf(self, tmp_path: Path, content: bytes, message: str) -> None:
        (tmp_path / "tiny.gguf").write_bytes(content)
        with pytest.raises(ModelError, match=re.escape(message)):
            described(tmp_path)
