"""Runs the target: a batch of new tokens in, logits and hidden states out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.native.decoder import Compiled, NativeDecoder
from outrider_serving.engine.target.paged import TorchPass


@dataclass(frozen=True, slots=True)
class Pass:
    """What a target pass over T tokens gave.

    Attributes:
        logits: [N, vocabulary] in the model's dtype, one row for each of `Batch.logits`.
        hidden: [T, hidden size] for each layer that was asked for.
    """

    logits: Tensor
    hidden: Mapping[int, Tensor]


def joined(passes: Sequence[Pass]) -> Pass:
    """One pass in the place of several, at least one, that wanted the same layers."""
    hidden = {layer: torch.cat([one.hidden[layer] for one in passes]) for layer in passes[0].hidden}
    return Pass(torch.cat([one.logits for one in passes]), hidden)


class ModelRunner:
    """The target model, over pages of keys and values."""

    def __init__(self, model: PreTrainedModel, store: KVStore, compiled: Compiled | None = None) -> None:
        """Take the model and its store.

        Args:
            model: loaded with `attn_implementation` "outrider".
            store: has its keys and values.
            compiled: what runs it; transformers' own modules do where it is None.

        Raises:
            NotRecognisedError: compiled code cannot run this model.
        """
        self._model = model
        self._store = store
        self._native = (
            None if compiled is None else NativeDecoder(compiled.structure, store, compiled.library)
        )

    @property
    def device(self) -> torch.device:
        """Where it runs."""
        return self._model.device

    @torch.inference_mode()
    def run(self, batch: Batch, hidden_layers: Sequence[int] = ()) -> Pass:
        """One target pass; the tokens' keys and values are written to their slots.

        Args:
            batch: what to run.
            hidden_layers: which of what transformers calls `hidden_states` are wanted, distinct.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: what the model raised.
        """
        if self._native is not None:
            return Pass(*self._native.run(batch, hidden_layers))
        layers = sorted(hidden_layers)
        out = self._model(
            input_ids=batch.ids[None],
            position_ids=batch.positions[None],
            use_cache=False,
            logits_to_keep=batch.logits,
            output_hidden_states=layers or None,
            target_pass=TorchPass(self._store, batch),
        )
        if batch.ids.is_cuda:
            torch.cuda.synchronize(batch.ids.device)  # else what follows would be blamed for the pass's time
        hidden = {layer: out.hidden_states[layer][0] for layer in layers}
        return Pass(out.logits[0], hidden)

    @torch.inference_mode()
    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the keys and values of tokens between slots; see `KVStore.move`."""
        self._store.move(sources, targets)
