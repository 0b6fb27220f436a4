"""The structures of the compiled functions, for ctypes."""

from __future__ import annotations

from ctypes import POINTER, Structure, c_double, c_int32, c_int64, c_uint64, c_void_p

BFLOAT16, FLOAT32, FLOAT64 = range(3)
SILU, GELU_TANH, GELU, RELU = range(4)


class Norm(Structure):
    """A root-mean-square norm; none where `weight` is null."""

    _fields_ = (
        ("weight", c_void_p),
        ("epsilon", c_double),
        ("one_added", c_int32),
        ("rounded_first", c_int32),
    )


class Linear(Structure):
    """A linear layer: weight [rows, columns], bias [rows] or null."""

    _fields_ = (("weight", c_void_p), ("bias", c_void_p), ("rows", c_int64), ("columns", c_int64))


class Scoring(Structure):
    """How a layer scores keys; 0 stands for no cap, and for no window."""

    _fields_ = (("scale", c_double), ("softcap", c_double), ("window", c_int64))


class HeadShape(Structure):
    """Of all layers."""

    _fields_ = (
        ("heads", c_int64),
        ("key_heads", c_int64),
        ("key_size", c_int64),
        ("value_size", c_int64),
    )


class Layer(Structure):
    """A layer, and its keys and values [slots, key heads, size]."""

    _fields_ = (
        ("before_attention", Norm),
        ("query", Norm),
        ("key", Norm),
        ("after_attention", Norm),
        ("before_mlp", Norm),
        ("after_mlp", Norm),
        ("q", Linear),
        ("k", Linear),
        ("v", Linear),
        ("o", Linear),
        ("gate", Linear),
        ("up", Linear),
        ("down", Linear),
        ("scoring", Scoring),
        ("rope", c_int32),
        ("activation", c_int32),
        ("keys", c_void_p),
        ("values", c_void_p),
    )


class Model(Structure):
    """A decoder."""

    _fields_ = (
        ("type", c_int32),
        ("layers", c_int32),
        ("hidden", c_int64),
        ("shape", HeadShape),
        ("rotary", c_int64),
        ("layer", POINTER(Layer)),
        ("slots", c_int64),
        ("vocabulary", c_int64),
        ("embedding", c_void_p),
        ("embedding_scale", c_double),
        ("last", Norm),
        ("head", Linear),
        ("logit_softcap", c_double),
    )


class Batch(Structure):
    """One pass; its segments are rows of six int64 each."""

    _fields_ = (
        ("tokens", c_int64),
        ("segments", c_int64),
        ("rows", c_int64),
        ("ids", c_void_p),
        ("positions", c_void_p),
        ("slots", c_void_p),
        ("segment", c_void_p),
        ("logit_rows", c_void_p),
        ("cosines", c_void_p * 2),
        ("sines", c_void_p * 2),
        ("logits", c_void_p),
        ("states", c_void_p),
    )


class Cut(Structure):
    """Which tokens are kept."""

    _fields_ = (("top_k", c_int64), ("top_p", c_double), ("min_p", c_double))


class LawRow(Structure):
    """A row of logits, and its law: `probs` of a whole vocabulary, or what is kept, of which `ids` points to
    the ids and then as many probabilities.
    """

    _fields_ = (
        ("logits", c_void_p),
        ("temperature", c_double),
        ("probs", c_void_p),
        ("cut", Cut),
        ("ids", c_void_p),
        ("kept", c_int64),
        ("type", c_int32),
        ("outcome", c_int32),
    )


class ClockRow(Structure):
    """A row of probabilities, a stream of noise, and the token that it chooses."""

    _fields_ = (("probs", c_void_p), ("start", c_uint64), ("gamma", c_uint64), ("token", c_int64))


class SuffixLook(Structure):
    """How to look up, and where what is found goes: `tokens` and `parents` [nodes]."""

    _fields_ = (
        ("max_match", c_int64),
        ("places", c_int64),
        ("least", c_double),
        ("depth", c_int64),
        ("nodes", c_int64),
        ("tokens", c_void_p),
        ("parents", c_void_p),
        ("score", c_double),
        ("scope", c_int64),
    )
