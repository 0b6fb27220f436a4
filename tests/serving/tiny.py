"""Makes tiny random models with a tokenizer of their own, for tests that need an engine but no knowledge."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Literal

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import (
    AutoModelForCausalLM,
    Gemma2Config,
    Gemma3TextConfig,
    LlamaConfig,
    MistralConfig,
    PreTrainedConfig,
    PreTrainedTokenizerFast,
    Qwen3Config,
)

CORPUS = (
    "the cat sat on the mat and the dog sat on the log",
    "def add(left, right):\n    return left + right\n",
    "one two three four five six seven eight nine ten",
)

CHAT_TEMPLATE = (
    "{% for message in messages %}<{{ message.role }}>{{ message.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)


def make_tokenizer(vocab_size: int = 320) -> PreTrainedTokenizerFast:
    """A byte-level BPE tokenizer: it encodes any text, and spreads rare characters over several tokens."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<bos>", "<eos>"],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(CORPUS, trainer)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, bos_token="<bos>", eos_token="<eos>")


Arch = Literal["llama", "qwen3", "mistral", "gemma2", "gemma3"]


def make_tiny_model(
    path: Path,
    arch: Arch = "llama",
    *,
    dtype: torch.dtype = torch.float32,
    context_length: int = 512,
    seed: int = 0,
    spread: float = 0.2,
    padding: int = 0,
    chat_template: str | None = CHAT_TEMPLATE,
) -> Path:
    """Write a random model (config, safetensors, tokenizer) into the directory `path`, which is returned.

    All have grouped heads. mistral has a sliding window of 8 in every layer, the gemmas in some, gemma2 caps
    its scores and logits, llama and mistral do not tie their embeddings. The same arguments give the same
    weights. `spread` is the standard deviation of the weights: more of it makes the distributions sharper.
    The model knows `padding` more token ids than its tokenizer.
    """
    tokenizer = make_tokenizer()
    shape = {
        "vocab_size": len(tokenizer) + padding,
        "hidden_size": 32,
        "intermediate_size": 64,
        "num_hidden_layers": 3,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": context_length,
        "bos_token_id": tokenizer.bos_token_id,
        "eos_token_id": tokenizer.eos_token_id,
        "pad_token_id": None,
        "initializer_range": spread,
    }
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(_config(arch, shape))
    torch.nn.Module.to(model, dtype)
    model.save_pretrained(path)
    tokenizer.chat_template = chat_template
    tokenizer.save_pretrained(path)
    return path


def _config(arch: Arch, shape: dict[str, Any]) -> PreTrainedConfig:
    some_windows = ["sliding_attention", "full_attention", "sliding_attention"]
    match arch:
        case "llama":
            return LlamaConfig(**shape)
        case "qwen3":
            return Qwen3Config(**shape, tie_word_embeddings=True)
        case "mistral":
            return MistralConfig(**shape, sliding_window=8)
        case "gemma2":
            return Gemma2Config(
                **shape,
                query_pre_attn_scalar=8,
                sliding_window=8,
                layer_types=some_windows,
                attn_logit_softcapping=5.0,
                final_logit_softcapping=10.0,
            )
        case "gemma3":
            return Gemma3TextConfig(
                **shape, query_pre_attn_scalar=8, sliding_window=8, layer_types=some_windows
            )
