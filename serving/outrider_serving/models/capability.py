"""Which models can be served: decoders whose layers all attend through transformers' attention interface."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel

from outrider_serving.engine.target.attention import Scoring, UnsupportedAttentionError, each_alone
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.models.errors import ModelError

_LENGTH_DEPENDENT_ROPE = {"dynamic", "longrope"}
"""Here a token's keys depend on how long the text is when they are made, so also on proposals."""

_LAYERS = {"full_attention", "sliding_attention"}


def check_config(config: PreTrainedConfig, source: object) -> None:
    """Refuse what the configuration alone shows to be impossible, before weights are read.

    Raises:
        ModelError: names the model type and what is not supported about it.
    """

    def refuse(why: str) -> ModelError:
        return ModelError(f"model {source} ({config.model_type}) cannot be served: {why}")

    mapping = AutoModelForCausalLM._model_mapping
    if type(config) not in mapping:
        raise refuse("transformers has no causal language model of this type")
    if config.is_encoder_decoder:
        raise refuse("it is an encoder-decoder; only decoders are supported")
    if getattr(config, "vision_config", None) or getattr(config, "audio_config", None):
        raise refuse("it is multimodal; only text models are supported")
    cls: Any = mapping[type(config)]
    if cls._is_stateful:
        raise refuse("it has recurrent state, which a rejected proposal cannot be taken back from")
    if not cls._supports_attention_backend:
        raise refuse("it does not use transformers' attention interface")
    if getattr(config, "use_bidirectional_attention", False) or getattr(config, "is_causal", True) is False:
        raise refuse("its attention is bidirectional")
    if getattr(config, "num_kv_shared_layers", 0):
        raise refuse("its layers share keys and values through transformers' own cache")
    if lengths := _rope_types(config) & _LENGTH_DEPENDENT_ROPE:
        raise refuse(f"its rotary embedding ({', '.join(lengths)}) depends on the length of the whole text")
    if others := set(getattr(config, "layer_types", None) or ()) - _LAYERS:
        names, allowed = ", ".join(sorted(others)), ", ".join(sorted(_LAYERS))
        raise refuse(f"it has layers of type {names}; supported: {allowed}")


def _rope_types(config: PreTrainedConfig) -> set[str]:
    """The kinds of rotary embedding in a configuration: it has one set of parameters, or one a layer type."""
    parameters = getattr(config, "rope_parameters", None) or {}
    each = [parameters, *(value for value in parameters.values() if isinstance(value, dict))]
    return {one["rope_type"] for one in each if "rope_type" in one}


class _Probe:
    """A `TargetPass` that notes what each layer keeps, and lets every token see itself alone."""

    def __init__(self) -> None:
        self.layers: dict[int, KVShape] = {}

    def attend(self, layer: int, query: Tensor, key: Tensor, value: Tensor, _: Scoring) -> Tensor:
        if layer in self.layers:
            raise UnsupportedAttentionError(f"layer {layer} attends twice, or shares its index with another")
        self.layers[layer] = KVShape(key.shape[0], key.shape[-1], value.shape[-1])
        return each_alone(query, value)


def check_attention(model: PreTrainedModel, source: object) -> Mapping[int, KVShape]:
    """Run one token, and see that every layer came by `attend` and that numbers came out.

    Returns:
        What each layer keeps of a token.

    Raises:
        ModelError: a layer did not, or asked for a kind of attention that is not supported, or a logit is NaN
            or infinite.
    """
    probe = _Probe()
    try:
        with torch.inference_mode():
            out = model(
                input_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device),
                position_ids=torch.zeros((1, 1), dtype=torch.int64, device=model.device),
                use_cache=False,
                logits_to_keep=torch.zeros(1, dtype=torch.int64, device=model.device),
                target_pass=probe,
            )
    except (UnsupportedAttentionError, TypeError) as error:
        raise ModelError(f"model {source} cannot be served: {error}") from error
    layers = model.config.get_text_config().num_hidden_layers
    if sorted(probe.layers) != list(range(layers)):
        raise ModelError(
            f"model {source} cannot be served: {len(probe.layers)} of its {layers} layers "
            "use transformers' attention interface"
        )
    if not bool(out.logits.isfinite().all()):
        dtype = str(model.dtype).removeprefix("torch.")
        raise ModelError(
            f"model {source} cannot be served: it computes NaN or infinity, "
            f"so its weights are damaged or too large for {dtype}"
        )
    return probe.layers
