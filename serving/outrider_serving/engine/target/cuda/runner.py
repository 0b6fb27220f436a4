"""Runs the target on a GPU: small batches from graphs, larger ones as they come, attention by Triton."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.schedule.scheduler import EngineLimits
from outrider_serving.engine.target.attention import TargetPass
from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.cuda.graphs import Capture, CudaCapture, Graphs, Inputs
from outrider_serving.engine.target.cuda.reserve import graph_bytes
from outrider_serving.engine.target.cuda.shapes import LayoutError, Room, room_of
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.runner import Pass, forward
from outrider_serving.engine.target.triton.tables import Tables
from outrider_serving.models.comparison import REQUESTS, TOKENS, check_runner, pages_of

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
        """Launch one target pass; see `Runner.run`. The next one overwrites its results."""
        layers = sorted(hidden_layers)
        return self._graphs.run(batch, layers) or self._as_it_comes(batch, layers)

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
    """The runner of a model on a GPU; None on another device, and where `compared_runner` gives none.

    Args:
        model: see `CudaRunner`.
        store: see `CudaRunner`; no page is in use.
        shapes: what each layer keeps of a token.
        limits: of the engine.
        context_length: most tokens of a text.

    Raises:
        torch.AcceleratorError: the device is broken.
    """
    if model.device.type != "cuda":
        return None

    def room() -> Room:
        return _room(model, shapes, limits, context_length, _multiprocessors(model.device))

    return compared_runner(model, store, room, lambda: CudaCapture(model.device))


def compared_runner(
    model: PreTrainedModel, store: KVStore, room: Callable[[], Room], captures: Callable[[], Capture]
) -> CudaRunner | None:
    """A runner that gives what transformers gives; None where Triton cannot, or does not, which is logged.

    Args:
        model: see `CudaRunner`.
        store: see `CudaRunner`; no page is in use.
        room: what batches need at most; raises `LayoutError` where there are no kernels for the model.
        captures: see `Graphs`.

    Raises:
        torch.AcceleratorError: the device is broken.
    """
    try:
        from outrider_serving.engine.target.triton.attention import TritonPass  # not every machine has triton

        needs = room()
        runner = CudaRunner(model, store, needs, TritonPass, captures)
        check_runner(model, runner, needs.page_size)
    except torch.AcceleratorError:
        raise
    except Exception as error:
        # Triton raises whatever its compilers do. Torch's own kernels attend as well, but slowly.
        logger.warning("attention runs on torch's own kernels, and without graphs: %s", error, exc_info=error)
        return None
    return runner


def graph_bytes_of(
    model: PreTrainedModel, shapes: Mapping[int, KVShape], limits: EngineLimits, context_length: int
) -> int:
    """What must be left free for the graphs of `cuda_runner`, in bytes; 0 where it makes none.

    Args:
        model: see `CudaRunner`.
        shapes: what each layer keeps of a token.
        limits: of the engine; pages may be fewer later.
        context_length: most tokens of a text.
    """
    if model.device.type != "cuda":
        return 0
    try:
        room = _room(model, shapes, limits, context_length, _multiprocessors(model.device))
    except LayoutError:
        return 0
    config = model.config.get_text_config()
    return graph_bytes(
        room,
        shapes.values(),
        query_heads=config.num_attention_heads,
        hidden_size=config.hidden_size,
        vocab_size=config.vocab_size,
        dtype=model.dtype,
    )


def _room(
    model: PreTrainedModel,
    shapes: Mapping[int, KVShape],
    limits: EngineLimits,
    context_length: int,
    multiprocessors: int,
) -> Room:
    """Room for all batches of an engine, and for those of the comparison with transformers.

    Raises:
        LayoutError: there are no kernels for this model, or too few pages.
    """
    if model.dtype not in _DTYPES:
        raise LayoutError(f"there are no kernels for {model.dtype}")
    compared = pages_of(limits.page_size)
    if limits.pages < compared:
        raise LayoutError(f"{limits.pages} pages are too few to compare with transformers: {compared} do")
    heads = int(model.config.get_text_config().num_attention_heads)
    room = room_of(limits, context_length, shapes.values(), heads, multiprocessors)
    return replace(
        room,
        tokens=max(room.tokens, TOKENS),
        requests=max(room.requests, REQUESTS),
        pages=max(room.pages, compared),
    )


def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)
