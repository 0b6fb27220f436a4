"""Runs the target: a batch of new tokens in, logits and hidden states out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol, Self

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.target.attention import TargetPass
from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.native.decoder import Compiled, NativeDecoder
from outrider_serving.engine.target.paged import TorchPass


@dataclass(frozen=True, slots=True)
class Pass:
    """What a target pass over T tokens gives. The device may still be at it, in the order of its stream.

    Attributes:
        logits: [N, vocabulary] in the model's dtype, one row for each of `Batch.logits`.
        hidden: [T, hidden size] for each layer that was asked for.
    """

    logits: Tensor
    hidden: Mapping[int, Tensor]

    def wait(self) -> Self:
        """Itself, when the results are there; on a CPU they are as soon as there is a `Pass`.

        To be called by the thread that launched it. Other streams than its current one are not waited for.

        Raises:
            torch.AcceleratorError: the pass has failed on the device.
        """
        if self.logits.is_cuda:
            torch.cuda.current_stream(self.logits.device).synchronize()
        return self

    def copy(self) -> Pass:
        """What later passes leave as it is."""
        return Pass(self.logits.clone(), {layer: states.clone() for layer, states in self.hidden.items()})


def joined(passes: Sequence[Pass]) -> Pass:
    """One pass in the place of several, at least one, that wanted the same layers."""
    hidden = {layer: torch.cat([one.hidden[layer] for one in passes]) for layer in passes[0].hidden}
    return Pass(torch.cat([one.logits for one in passes]), hidden)


def forward(
    model: PreTrainedModel,
    ids: Tensor,
    positions: Tensor,
    rows: Tensor,
    layers: Sequence[int],
    target_pass: TargetPass,
) -> Pass:
    """One pass through transformers' modules.

    Args:
        model: loaded with `attn_implementation` "outrider".
        ids: int64 [T], on the model's device as all are.
        positions: int64 [T].
        rows: int64 [N], which tokens' logits are wanted.
        layers: whose hidden states are wanted, ascending.
        target_pass: attends.
    """
    out = model(
        input_ids=ids[None],
        position_ids=positions[None],
        use_cache=False,
        logits_to_keep=rows,
        output_hidden_states=layers or None,
        target_pass=target_pass,
    )
    return Pass(out.logits[0], {layer: out.hidden_states[layer][0] for layer in layers})


class Runner(Protocol):
    """The target model, over pages of keys and values. Belongs to the thread of the steps."""

    @property
    def batches_on(self) -> torch.device:
        """Where it takes a batch's tensors."""
        ...

    def run(self, batch: Batch, hidden_layers: Sequence[int] = ()) -> Pass:
        """Launch one target pass; the tokens' keys and values are written to their slots.

        Args:
            batch: what to run.
            hidden_layers: which of what transformers calls `hidden_states` are wanted, distinct.

        Returns:
            What may be read until the next pass, which may overwrite it. The caller waits for it, if only so
            that what follows is not blamed for the pass's time.

        Raises:
            torch.OutOfMemoryError, RuntimeError, MemoryError: what the model raised. What fails once it is
                launched is raised by whatever waits for it first, as a torch.AcceleratorError.
        """
        ...

    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the keys and values of tokens between slots; see `KVStore.move`."""
        ...


class ModelRunner:
    """A `Runner` for any device. Results of a pass are its own."""

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
        self._device = model.device
        self._store = store
        self._native = (
            None if compiled is None else NativeDecoder(compiled.structure, store, compiled.library)
        )

    @property
    def batches_on(self) -> torch.device:
        """Where it takes a batch's tensors."""
        return self._device

    @torch.inference_mode()
    def run(self, batch: Batch, hidden_layers: Sequence[int] = ()) -> Pass:
        """Launch one target pass; see `Runner.run`."""
        if self._native is not None:
            return Pass(*self._native.run(batch, hidden_layers))
        attention = TorchPass(self._store, batch)
        layers = sorted(hidden_layers)
        return forward(self._model, batch.ids, batch.positions, batch.logits, layers, attention)

    @torch.inference_mode()
    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the keys and values of tokens between slots; see `KVStore.move`."""
        self._store.move(sources, targets)
