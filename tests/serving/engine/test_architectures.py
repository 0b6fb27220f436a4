"""Architectures of transformers: each is served right, or refused by name. None is served wrong."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
from transformers import CONFIG_MAPPING, AutoModelForCausalLM, PreTrainedModel

from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.runner import ModelRunner
from outrider_serving.models.capability import check_attention, check_config
from outrider_serving.models.comparison import check_against_transformers
from outrider_serving.models.errors import ModelError
from outrider_serving.sampling.proposal import ROOT, Proposal
from serving.engine.support import LONG

CPU = torch.device("cpu")

SERVED = [
    "llama",
    "mistral",
    "mixtral",
    "qwen2",
    "qwen3",
    "qwen3_moe",
    "gemma2",
    "gemma3_text",
    "phi3",
    "olmo2",
    "granite",
    "cohere2",
    "glm4",
    "starcoder2",
    "smollm3",
    "gpt2",
    "gpt_neox",
    "opt",
]
REFUSED = ["bert", "roberta", "gpt_oss", "mamba", "bloom", "t5gemma", "qwen3_next"]

SIZES: dict[str, Any] = {
    "vocab_size": 97,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 256,
    "sliding_window": 8,
    "initializer_range": 0.3,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "num_experts": 4,
    "num_local_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 16,
    "n_routed_experts": 4,
    "shared_expert_intermediate_size": 16,
    "n_group": 1,
    "topk_group": 1,
    "n_embd": 32,
    "n_layer": 3,
    "n_head": 4,
    "n_positions": 256,
    "ffn_dim": 48,
    "word_embed_proj_dim": 32,
    "rotary_dim": 4,
}


def small(model_type: str) -> PreTrainedModel:
    """A random model of this type, of a few thousand parameters."""
    kind = CONFIG_MAPPING[model_type]
    default: Any = kind()
    sizes = {name: value for name, value in SIZES.items() if hasattr(default, name)}
    computed = isinstance(getattr(kind, "layer_types", None), property)
    if getattr(default, "layer_types", None) and not computed:
        sizes["layer_types"] = (list(dict.fromkeys(default.layer_types)) * 3)[:3]
    config = kind(**sizes)
    check_config(config, model_type)
    with torch.device("meta"):
        parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(config).parameters())
    if parameters > 8_000_000:
        pytest.skip(f"{model_type} cannot be made small: {parameters} parameters")
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train(False)
    assert isinstance(model, PreTrainedModel)
    model.set_attn_implementation(IMPLEMENTATION)
    return model


def is_served_right(model_type: str) -> bool:
    """Whether it is served; AssertionError if it is, and wrong."""
    try:
        model = small(model_type)
        shapes = check_attention(model, model_type)
        check_against_transformers(model, shapes, model_type)
    except ModelError as error:
        refusal = str(error)
    else:
        refusal = None
    if refusal is not None:
        assert model_type in refusal
        return False
    rng = random.Random(1)
    text = [rng.randrange(3, 97) for _ in range(20)]  # longer than the windows
    parents = (ROOT, 0, 0, 1, ROOT, 4)
    proposal = Proposal(tuple(rng.randrange(3, 97) for _ in parents), parents)
    runner = ModelRunner(model, KVStore(shapes, 400, model.dtype, CPU))
    pages = list(range(20, 60))
    runner.run(pack([Piece(text[:11], Proposal(), 0, pages, 0)], 4, CPU))
    ours = runner.run(pack([Piece(text[11:], proposal, 11, pages, 1)], 4, CPU)).logits
    model.set_attn_implementation("eager")
    paths = [[], *([proposal.tokens[on] for on in proposal.path(node)] for node in range(len(parents)))]
    with torch.inference_mode():
        theirs = torch.stack(
            [model(torch.tensor([[*text, *path]]), use_cache=False).logits[0, -1] for path in paths]
        )
    assert float((ours - theirs).abs().max()) < 1e-3 * max(1.0, float(theirs.std()))
    return True


@pytest.mark.parametrize("model_type", SERVED)
def test_it_is_served(model_type: str) -> None:
    assert is_served_right(model_type)


@pytest.mark.parametrize("model_type", REFUSED)
def test_it_is_refused_by_name(model_type: str) -> None:
    assert not is_served_right(model_type)


def test_positions_that_a_model_counts_its_own_way_are_noticed() -> None:
    """RoBERTa as a decoder begins to count at the padding's id: only a comparison can tell."""
    config = CONFIG_MAPPING["roberta"](
        **{name: SIZES[name] for name in ("vocab_size", "hidden_size", "num_hidden_layers", "pad_token_id")},
        num_attention_heads=4,
        intermediate_size=48,
        max_position_embeddings=64,
        initializer_range=0.3,
        is_decoder=True,
    )
    model = AutoModelForCausalLM.from_config(config, attn_implementation="eager")
    model.train(False)
    model.set_attn_implementation(IMPLEMENTATION)
    with pytest.raises(ModelError, match="differ from those that transformers computes"):
        check_against_transformers(model, check_attention(model, "roberta"), "roberta")
    assert model.config._attn_implementation == IMPLEMENTATION


@pytest.mark.parametrize("model_type", sorted(CONFIG_MAPPING.keys())[:: 1 if LONG else 40])
def test_none_is_served_wrong(model_type: str) -> None:
    try:
        known = CONFIG_MAPPING[model_type] in AutoModelForCausalLM._model_mapping
    except (KeyError, ImportError, AttributeError):
        known = False
    if not known:
        return
    try:
        is_served_right(model_type)
    except AssertionError:
        raise
    except Exception as error:
        pytest.skip(f"a small one cannot be made: {type(error).__name__}")
