"""Runs the target by compiled code, over the same pages as transformers' own modules."""

from __future__ import annotations

import ctypes
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from outrider_serving.engine.target.batch import Batch, Segment
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.native.structure import (
    LayerPart,
    LinearPart,
    NormPart,
    NormRule,
    NotRecognisedError,
    Rotation,
    Structure,
    activation_number,
)
from outrider_serving.native import structs
from outrider_serving.native.library import TYPES, Library

_FIRST_POSITIONS = 1024


@dataclass(frozen=True, slots=True)
class Compiled:
    """A model's structure, and the compiled code that can run it."""

    structure: Structure
    library: Library


class NativeDecoder:
    """A structure, and the store of its keys and values."""

    def __init__(self, structure: Structure, store: KVStore, library: Library) -> None:
        """Tell compiled code where everything is; weights stay where they are.

        Raises:
            NotRecognisedError: it rotates in another way.
        """
        self._structure = structure
        self._store = store
        self._library = library
        self._dtype = structure.embedding.dtype
        self._hidden = structure.embedding.shape[1]
        self._vocabulary = structure.head.weight.shape[0]
        self._layers = _layers(structure, store)
        self._tables = tuple(_Table(rotation) for rotation in structure.rotations)
        self._model = _model(structure, self._layers, store, 2 * self._tables[0].upto(0)[0].shape[1])
        self._handle = library.decoder(self._model)

    def __del__(self) -> None:
        if hasattr(self, "_handle"):
            self._library.close(self._handle)

    def run(self, batch: Batch, hidden_layers: Sequence[int]) -> tuple[Tensor, dict[int, Tensor]]:
        """One pass: logits [N, vocabulary] and the wanted hidden states [T, hidden size].

        Raises:
            MemoryError, RuntimeError: there is not enough memory.
            IndexError: a token or a slot is none; nothing was written.
        """
        tokens = len(batch.ids)
        logits = torch.empty((len(batch.logits), self._vocabulary), dtype=self._dtype)
        hidden = {layer: torch.empty((tokens, self._hidden), dtype=self._dtype) for layer in hidden_layers}
        states = (ctypes.c_void_p * (len(self._layers) + 1))()
        for layer, state in hidden.items():
            states[layer] = state.data_ptr()
        paths = [_paths(segment) for segment in batch.segments]
        rows = zip(batch.segments, paths, strict=True)
        segments = np.array([_segment_row(segment, path) for segment, path in rows], dtype=np.int64)
        last = max(int(segment.positions.max()) for segment in batch.segments)  # of a tree: anywhere
        tables = [table.upto(last) for table in self._tables]
        native = structs.Batch(
            tokens=tokens,
            segments=len(batch.segments),
            rows=len(batch.logits),
            ids=batch.ids.data_ptr(),
            positions=batch.positions.data_ptr(),
            slots=batch.slots.data_ptr(),
            segment=_address(segments),
            logit_rows=batch.logits.data_ptr(),
            cosines=(ctypes.c_void_p * 2)(*(cosines.data_ptr() for cosines, _ in tables)),
            sines=(ctypes.c_void_p * 2)(*(sines.data_ptr() for _, sines in tables)),
            logits=logits.data_ptr(),
            states=ctypes.addressof(states),
        )
        self._library.run(self._handle, native, torch.get_num_threads())
        return logits, hidden


class _Table:
    """Cosines and sines of the positions so far, [P, rotary size / 2]; it grows by doubling."""

    def __init__(self, rotation: Rotation) -> None:
        self._rotation = rotation
        self._parts: tuple[Tensor, Tensor] | None = None

    def upto(self, position: int) -> tuple[Tensor, Tensor]:
        """With at least this position."""
        if self._parts is None or position >= len(self._parts[0]):
            count = max(_FIRST_POSITIONS, 1 << (position + 1).bit_length())
            cosines, sines = (_half(part) for part in self._rotation(torch.arange(count)))
            self._parts = (cosines, sines)
        return self._parts


def _half(whole: Tensor) -> Tensor:
    """The first half of [P, size], whose second half is the same."""
    first, second = whole.chunk(2, -1)
    if not torch.equal(first, second):
        raise NotRecognisedError("its rotary embedding does not pair the halves of a head")
    return first.contiguous()


def _paths(segment: Segment) -> np.ndarray[tuple[int, int], np.dtype[np.int64]] | None:
    """Of each new token the slots of those that it follows, itself last; None for a chain."""
    if segment.ancestors is None:
        return None
    paths = np.zeros((segment.count, segment.count), dtype=np.int64)
    own = segment.slots[segment.context :]
    for row, ancestors in enumerate(segment.ancestors):
        slots = own[ancestors]
        paths[row, : len(slots)] = slots
    return paths


def _segment_row(
    segment: Segment, paths: np.ndarray[tuple[int, int], np.dtype[np.int64]] | None
) -> list[int]:
    return [
        segment.first,
        segment.count,
        segment.context,
        _address(segment.slots),
        _address(segment.positions),
        0 if paths is None else _address(paths),
    ]


def _address(array: np.ndarray[tuple[int, ...], np.dtype[np.int64]]) -> int:
    return int(array.__array_interface__["data"][0])


def _model(
    structure: Structure, layers: ctypes.Array[structs.Layer], store: KVStore, rotary: int
) -> structs.Model:
    heads = structs.HeadShape(structure.heads, structure.key_heads, structure.head_size, structure.head_size)
    return structs.Model(
        type=TYPES[structure.embedding.dtype],
        layers=len(layers),
        hidden=structure.embedding.shape[1],
        shape=heads,
        rotary=rotary,
        layer=layers,
        slots=len(store.layer(0)[0]),
        vocabulary=len(structure.embedding),
        embedding=structure.embedding.data_ptr(),
        embedding_scale=structure.embedding_scale,
        last=_norm(structure.last, structure.norms),
        head=_linear(structure.head),
        logit_softcap=structure.logit_softcap or 0.0,
    )


def _layers(structure: Structure, store: KVStore) -> ctypes.Array[structs.Layer]:
    layers = (structs.Layer * len(structure.layers))()
    for index, part in enumerate(structure.layers):
        layers[index] = _layer(part, structure, *store.layer(index))
    return layers


def _layer(part: LayerPart, structure: Structure, keys: Tensor, values: Tensor) -> structs.Layer:
    def norm(one: NormPart | None) -> structs.Norm:
        return structs.Norm() if one is None else _norm(one, structure.norms)

    return structs.Layer(
        before_attention=norm(part.before_attention),
        query=norm(part.query),
        key=norm(part.key),
        after_attention=norm(part.after_attention),
        before_mlp=norm(part.before_mlp),
        after_mlp=norm(part.after_mlp),
        q=_linear(part.q),
        k=_linear(part.k),
        v=_linear(part.v),
        o=_linear(part.o),
        gate=_linear(part.gate),
        up=_linear(part.up),
        down=_linear(part.down),
        scoring=structs.Scoring(part.scoring.scale, part.scoring.softcap or 0.0, part.scoring.window or 0),
        rope=part.rope,
        activation=activation_number(structure),
        keys=keys.data_ptr(),
        values=values.data_ptr(),
    )


def _norm(part: NormPart, rule: NormRule) -> structs.Norm:
    return structs.Norm(part.weight.data_ptr(), part.epsilon, rule.one_added, rule.rounded_first)


def _linear(part: LinearPart) -> structs.Linear:
    bias = None if part.bias is None else part.bias.data_ptr()
    rows, columns = part.weight.shape
    return structs.Linear(part.weight.data_ptr(), bias, rows, columns)
