"""Reads a decoder's structure from transformers' modules, for compiled code to run it.

What a layer computes follows from the model's type, which must be one of those known here; weights, sizes
and scales are those of the modules. How layers score and rotate is not read from the configuration but
observed, in a pass of one token. That all of it was understood is shown by `models.comparison`, for each
model that is loaded.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from outrider_serving.engine.target.attention import Scoring, each_alone
from outrider_serving.native.library import TYPES

Rotation = Callable[[Tensor], tuple[Tensor, Tensor]]
"""From positions int64 [P] to cosines and sines [P, rotary size], in the model's dtype."""


class NotRecognisedError(Exception):
    """It is not one of the structures that compiled code can run; says why."""


@dataclass(frozen=True, slots=True)
class NormRule:
    """How the norms of a family of models compute.

    Attributes:
        one_added: the weight is stored less 1.
        rounded_first: rounded to the model's dtype before it is multiplied with the weight.
    """

    one_added: bool
    rounded_first: bool


@dataclass(frozen=True, slots=True)
class _Family:
    """Where the norms of a layer are, by the names of its modules; "" for none."""

    norms: NormRule
    before_attention: str
    after_attention: str
    before_mlp: str
    after_mlp: str


_LLAMA = _Family(NormRule(False, True), "input_layernorm", "", "post_attention_layernorm", "")
_GEMMA = _Family(
    NormRule(True, False),
    "input_layernorm",
    "post_attention_layernorm",
    "pre_feedforward_layernorm",
    "post_feedforward_layernorm",
)
_FAMILIES = {
    "llama": _LLAMA,
    "mistral": _LLAMA,
    "qwen2": _LLAMA,
    "qwen3": _LLAMA,
    "gemma2": _GEMMA,
    "gemma3_text": _GEMMA,
}
_ACTIVATIONS = ("silu", "gelu_pytorch_tanh", "gelu", "relu")


@dataclass(frozen=True, slots=True)
class LinearPart:
    """Weight [rows, columns] and bias [rows] of a linear layer."""

    weight: Tensor
    bias: Tensor | None


@dataclass(frozen=True, slots=True)
class NormPart:
    """Weight [size] of a norm, and what is added to the mean of squares."""

    weight: Tensor
    epsilon: float


@dataclass(frozen=True, slots=True)
class LayerPart:
    """One layer; norms that it lacks are None. `rope` is an index of `Structure.rotations`."""

    before_attention: NormPart
    query: NormPart | None
    key: NormPart | None
    after_attention: NormPart | None
    before_mlp: NormPart
    after_mlp: NormPart | None
    q: LinearPart
    k: LinearPart
    v: LinearPart
    o: LinearPart
    gate: LinearPart
    up: LinearPart
    down: LinearPart
    scoring: Scoring
    rope: int


@dataclass(frozen=True, slots=True)
class Structure:
    """A decoder, as far as its computation goes.

    Attributes:
        norms: how all its norms compute.
        activation: name of the function between gate and down.
        heads, key_heads, head_size: of every layer.
        embedding: [vocabulary, hidden size].
        embedding_scale: what embeddings are multiplied by, in the model's dtype.
        layers: in order.
        last: norm after them.
        head: from hidden states to logits.
        logit_softcap: logits x become cap * tanh(x / cap), unless None.
        rotations: the kinds of rotary embedding, one or two.
    """

    norms: NormRule
    activation: str
    heads: int
    key_heads: int
    head_size: int
    embedding: Tensor
    embedding_scale: float
    layers: tuple[LayerPart, ...]
    last: NormPart
    head: LinearPart
    logit_softcap: float | None
    rotations: tuple[Rotation, ...]


def structure_of(model: PreTrainedModel) -> Structure:
    """What a model on a CPU computes.

    Raises:
        NotRecognisedError: it has another structure, dtype or place; the message says which.
    """
    config: Any = model.config
    family = _FAMILIES.get(config.model_type)
    if family is None:
        raise NotRecognisedError(f"models of type {config.model_type} have no compiled form")
    if model.device.type != "cpu" or model.dtype not in TYPES:
        raise NotRecognisedError(f"{model.dtype} on {model.device.type} has no compiled form")
    activation = getattr(config, "hidden_activation", None) or config.hidden_act
    if activation not in _ACTIVATIONS:
        raise NotRecognisedError(f"the activation {activation} has no compiled form")
    decoder: Any = model.model
    seen = _observed(model)
    embed = decoder.embed_tokens
    scale = getattr(embed, "embed_scale", None)
    head_size = int(decoder.layers[0].self_attn.head_dim)
    layers = tuple(_layer(layer, family, seen, index) for index, layer in enumerate(decoder.layers))
    structure = Structure(
        norms=family.norms,
        activation=activation,
        heads=layers[0].q.weight.shape[0] // head_size,
        key_heads=layers[0].k.weight.shape[0] // head_size,
        head_size=head_size,
        embedding=embed.weight,
        embedding_scale=1.0 if scale is None else float(torch.as_tensor(scale).to(model.dtype)),
        layers=layers,
        last=_norm(decoder.norm),
        head=_linear(model.lm_head),
        logit_softcap=getattr(config, "final_logit_softcapping", None),
        rotations=tuple(seen.rotations),
    )
    _check(structure, model.dtype)
    return structure


def activation_number(structure: Structure) -> int:
    """Of `structs`."""
    return _ACTIVATIONS.index(structure.activation)


@dataclass(slots=True)
class _Observed:
    """What one pass showed."""

    scoring: dict[int, Scoring] = field(default_factory=dict)
    rope: dict[int, int] = field(default_factory=dict)
    rotations: list[Rotation] = field(default_factory=list)

    def attend(self, layer: int, query: Tensor, _: Tensor, value: Tensor, scoring: Scoring) -> Tensor:
        """See `attention.TargetPass.attend`: every token sees itself alone."""
        self.scoring[layer] = scoring
        return each_alone(query, value)


@torch.inference_mode()
def _observed(model: PreTrainedModel) -> _Observed:
    """Run one token, and see how layers score, and which rotation each of them uses."""
    decoder: Any = model.model
    seen, outputs = _Observed(), list[object]()

    def rotated(module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], output: object) -> None:
        like, others = args[0], [value for value in args[2:] if value is not None]
        named = {name: value for name, value in kwargs.items() if name != "position_ids"}
        outputs.append(output)
        seen.rotations.append(lambda positions: _rotation(module, like, positions, others, named))

    def attending(index: int) -> Callable[..., None]:
        def note(_: nn.Module, __: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
            given = kwargs["position_embeddings"]
            seen.rope[index] = next(kind for kind, output in enumerate(outputs) if output is given)

        return note

    hooks = [decoder.rotary_emb.register_forward_hook(rotated, with_kwargs=True)]
    for index, layer in enumerate(decoder.layers):
        hooks.append(layer.self_attn.register_forward_pre_hook(attending(index), with_kwargs=True))
    zero = torch.zeros((1, 1), dtype=torch.int64)
    try:
        model(input_ids=zero, position_ids=zero, use_cache=False, target_pass=seen)
    except (StopIteration, KeyError) as error:
        raise NotRecognisedError("its layers are not rotated as expected") from error
    finally:
        for hook in hooks:
            hook.remove()
    return seen


@torch.inference_mode()
def _rotation(
    module: nn.Module, like: Tensor, positions: Tensor, others: list[Any], named: Mapping[str, Any]
) -> tuple[Tensor, Tensor]:
    cosines, sines = module(like, positions[None], *others, **named)
    return cosines[0], sines[0]


def _layer(layer: Any, family: _Family, seen: _Observed, index: int) -> LayerPart:
    attention, mlp = layer.self_attn, layer.mlp

    def norm(name: str) -> NormPart | None:
        return _norm(getattr(layer, name)) if name else None

    before_attention, before_mlp = norm(family.before_attention), norm(family.before_mlp)
    assert before_attention is not None
    assert before_mlp is not None
    return LayerPart(
        before_attention=before_attention,
        query=_norm(attention.q_norm) if hasattr(attention, "q_norm") else None,
        key=_norm(attention.k_norm) if hasattr(attention, "k_norm") else None,
        after_attention=norm(family.after_attention),
        before_mlp=before_mlp,
        after_mlp=norm(family.after_mlp),
        q=_linear(attention.q_proj),
        k=_linear(attention.k_proj),
        v=_linear(attention.v_proj),
        o=_linear(attention.o_proj),
        gate=_linear(mlp.gate_proj),
        up=_linear(mlp.up_proj),
        down=_linear(mlp.down_proj),
        scoring=seen.scoring[index],
        rope=seen.rope[index],
    )


def _linear(module: nn.Module) -> LinearPart:
    if type(module) is not nn.Linear:
        raise NotRecognisedError(f"it has a {type(module).__name__} where a linear layer is expected")
    return LinearPart(module.weight, cast("Tensor | None", module.bias))


def _norm(module: Any) -> NormPart:
    epsilon = getattr(module, "variance_epsilon", None)
    return NormPart(module.weight, float(module.eps if epsilon is None else epsilon))


def _check(structure: Structure, dtype: torch.dtype) -> None:
    """See that compiled code finds what it expects where it will look.

    Raises:
        NotRecognisedError: it would not.
    """
    if len(structure.rotations) not in (1, 2):
        raise NotRecognisedError(f"it has {len(structure.rotations)} kinds of rotary embedding")
    linears = [part for layer in structure.layers for part in _linears(layer)] + [structure.head]
    norms = [part for layer in structure.layers for part in _norms(layer)] + [structure.last]
    tensors = [structure.embedding, *(norm.weight for norm in norms)]
    tensors += [tensor for part in linears for tensor in (part.weight, part.bias) if tensor is not None]
    if not all(tensor.is_contiguous() and tensor.dtype == dtype for tensor in tensors):
        raise NotRecognisedError("its weights are of several types, or not in rows")


def _linears(layer: LayerPart) -> tuple[LinearPart, ...]:
    return (layer.q, layer.k, layer.v, layer.o, layer.gate, layer.up, layer.down)


def _norms(layer: LayerPart) -> list[NormPart]:
    every = (
        layer.before_attention,
        layer.query,
        layer.key,
        layer.after_attention,
        layer.before_mlp,
        layer.after_mlp,
    )
    return [norm for norm in every if norm is not None]
