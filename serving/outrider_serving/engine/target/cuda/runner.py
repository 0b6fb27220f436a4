"""Runs the target on a GPU: small batches from graphs, larger ones as they come, attention by Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.attention import TargetPass
from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.cuda.graphs import Capture, CudaCapture, Graphs, Inputs
from outrider_serving.engine.target.cuda.shapes import LayoutError, Room, room_of
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.runner import Pass, forward
from outrider_serving.engine.target.triton.tables import Tables

logger = logging.getLogger(__name__)

_CPU = torch.device("cpu")
_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


class CudaRunner:
    """A `Runner` for GPUs.

    It takes batches whose tensors are on the CPU, and sends what a pass needs in two pieces. Results lie
    where the next pass leaves its own: what is to be kept longer is to be copied.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        store: KVStore,
        room: Room,
        kernels: Callable[[KVStore, Tables], TargetPass],
        captures: Callable[[], Capture],
    ) -> None:
        """Compile the kernels and capture the graphs, which takes some seconds.

        Args:
            model: loaded with `attn_implementation` "outrider".
            store: has its keys and values.
            room: what batches need at most.
            kernels: makes what attends in a pass.
            captures: see `Graphs`.

        Raises:
            Exception: a pass fails even where it is not captured.
        """
        self._model = model
        self._store = store
        self._kernels = kernels
        with torch.inference_mode():
            self._inputs = Inputs.on(model.device, room.maxima(room.tokens))
            self._graphs = Graphs(self._forward, room, model.device, captures)

    @property
    def batches_on(self) -> torch.device:
        """Where it takes a batch's tensors."""
        return _CPU

    @property
    def captured(self) -> int:
        """Passes captured so far; see `Graphs`."""
        return self._graphs.captured

    @property
    def fallbacks(self) -> int:
        """Sizes of passes that run without a graph since they could not be captured; see `Graphs`."""
        return self._graphs.fallbacks

    @torch.inference_mode()
    def run(self, batch: Batch, hidden_layers: Sequence[int] = ()) -> Pass:
        """One target pass; see `Runner.run`. The next one overwrites its results."""
        layers = sorted(hidden_layers)
        ran = self._graphs.run(batch, layers) or self._as_it_comes(batch, layers)
        if ran.logits.is_cuda:
            # Else what follows would be blamed for the pass's time. Other streams are not waited for.
            torch.cuda.current_stream(ran.logits.device).synchronize()
        return ran

    @torch.inference_mode()
    def move(self, sources: Tensor, targets: Tensor) -> None:
        """Copy the keys and values of tokens between slots; see `KVStore.move`."""
        self._store.move(sources, targets)

    def _as_it_comes(self, batch: Batch, layers: Sequence[int]) -> Pass:
        """A pass without padding, and with logits only where they are wanted."""
        inputs, tokens = self._inputs, len(batch.ids)
        inputs.put(batch)
        rows = inputs.rows[: len(batch.logits)]
        return self._forward(inputs.ids[:tokens], inputs.positions[:tokens], rows, inputs.tables, layers)

    def _forward(
        self, ids: Tensor, positions: Tensor, rows: Tensor, tables: Tables, layers: Sequence[int]
    ) -> Pass:
        return forward(self._model, ids, positions, rows, layers, self._kernels(self._store, tables))


def cuda_runner(
    model: PreTrainedModel,
    store: KVStore,
    shapes: Mapping[int, KVShape],
    limits: EngineLimits,
    context_length: int,
) -> CudaRunner | None:
    """The runner of a model on a GPU; None on another device, and where Triton cannot, which is logged.

    Args:
        model: see `CudaRunner`.
        store: see `CudaRunner`.
        shapes: what each layer keeps of a token.
        limits: of the engine.
        context_length: most tokens of a text.

    Raises:
        torch.AcceleratorError: the device is broken.
    """
    if model.device.type != "cuda":
        return None
    try:
        from outrider_serving.engine.target.triton.attention import TritonPass  # not every machine has triton

        if model.dtype not in _DTYPES:
            raise LayoutError(f"there are no kernels for {model.dtype}")
        heads = int(model.config.get_text_config().num_attention_heads)
        multiprocessors = torch.cuda.get_device_properties(model.device).multi_processor_count
        room = room_of(limits, context_length, shapes.values(), heads, multiprocessors)
        return CudaRunner(model, store, room, TritonPass, lambda: CudaCapture(model.device))
    except torch.AcceleratorError:
        raise
    except Exception as error:
        # Triton raises whatever its compilers do. Torch's own kernels attend as well, but slowly.
        logger.warning("attention runs on torch's own kernels, and without graphs: %s", error, exc_info=error)
        return None
