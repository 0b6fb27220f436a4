"""Target passes of a few sizes, each recorded once and replayed: one launch in the place of hundreds.

A graph reads and writes the same memory whenever it is replayed. So each size has `Inputs` of its own, and a
batch is put there with its padding: tokens without a slot, which write nothing and attend to nothing. Results
go to `_Outputs`, which all sizes share, and the next pass overwrites them.

When graphs are made. All sizes are, when the engine starts: some seconds beside those that weights take. A
proposer that is loaded later may want hidden states that no graph writes; then each size is captured anew
when it comes up first, which holds a step up by a few passes' time. Once written, hidden states stay: that
costs a copy of them, and proposers that come and go cost no more captures.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np
import torch
from torch import Tensor

from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.cuda.shapes import Room, size_of
from outrider_serving.engine.target.runner import Pass
from outrider_serving.engine.target.triton.tables import Maxima, Tables, tables_of

logger = logging.getLogger(__name__)

Work = Callable[[], None]

Capture = Callable[[Work], Work]
"""Runs some work and records what it launches; what it returns does that again. Raises `CaptureError`."""


class CaptureError(Exception):
    """Some work cannot be captured; the device is sound."""


@dataclass(frozen=True, slots=True)
class Inputs:
    """What passes of up to so many tokens read, on the device.

    Attributes:
        numbers: int64 [3, tokens], of which the next three are rows.
        ids: the tokens; those of padding are 0.
        positions: of the tokens; those of padding are 0.
        rows: which tokens' logits are wanted; what is not in use repeats the first one.
        tables: what attention needs to know.
    """

    numbers: Tensor
    ids: Tensor
    positions: Tensor
    rows: Tensor
    tables: Tables

    @staticmethod
    def on(device: torch.device, maxima: Maxima) -> Inputs:
        """Those of nothing but padding."""
        numbers = torch.zeros((3, maxima.tokens), dtype=torch.int64, device=device)
        ids, positions, rows = numbers
        return Inputs(numbers, ids, positions, rows, Tables.on(device, maxima))

    def put(self, batch: Batch) -> None:
        """Describe a batch, whose tensors are on the CPU.

        Raises:
            ValueError: it is larger than there is room for.
        """
        self.tables.put(tables_of(batch.pieces, batch, self.tables.maxima))
        numbers = np.zeros(self.numbers.shape, dtype=np.int64)
        for row, own in zip(numbers, (batch.ids, batch.positions, batch.logits), strict=True):
            row[: len(own)] = own.numpy()
        numbers[2, len(batch.logits) :] = numbers[2, 0]
        self.numbers.copy_(torch.from_numpy(numbers), non_blocking=True)


class Forward(Protocol):
    """One pass of the model."""

    def __call__(
        self, ids: Tensor, positions: Tensor, rows: Tensor, tables: Tables, layers: Sequence[int]
    ) -> Pass:
        """Logits of `rows` and the hidden states of `layers`; keys and values go to their slots."""
        ...


@dataclass(frozen=True, slots=True)
class _Outputs:
    """Where graphs leave results: logits [tokens, vocabulary], and of each layer [tokens, hidden size]."""

    logits: Tensor
    hidden: Mapping[int, Tensor]

    @staticmethod
    def like(one: Pass, tokens: int) -> _Outputs:
        """With room for so many tokens, each like that of a pass of one token."""
        hidden = {layer: states.new_empty((tokens, states.shape[-1])) for layer, states in one.hidden.items()}
        return _Outputs(one.logits.new_empty((tokens, one.logits.shape[-1])), hidden)

    def keep(self, ran: Pass) -> None:
        self.logits[: len(ran.logits)].copy_(ran.logits)
        for layer, states in ran.hidden.items():
            self.hidden[layer][: len(states)].copy_(states)

    def of(self, batch: Batch, layers: Sequence[int]) -> Pass:
        hidden = {layer: self.hidden[layer][: len(batch.ids)] for layer in layers}
        return Pass(self.logits[: len(batch.logits)], hidden)


class Graphs:
    """The captured passes of a model.

    Attributes:
        captured: passes captured so far.
        fallbacks: sizes that could not be captured, and never will be tried again.
    """

    def __init__(
        self, forward: Forward, room: Room, device: torch.device, captures: Callable[[], Capture]
    ) -> None:
        """Capture all sizes, the largest first, so that others find its memory.

        Args:
            forward: runs the model. It waits for nothing on the device, as what does cannot be captured.
            room: has the sizes.
            device: where the model is.
            captures: makes what captures, and is asked again when all graphs are dropped, or one has failed:
                what shares memory is in use together.
        """
        self.captured = self.fallbacks = 0
        self._forward = forward
        self._room = room
        self._sizes = room.sizes
        self._device = device
        self._captures = captures
        self._failed: set[int] = set()
        self._begin(frozenset())
        for size in reversed(self._sizes):
            self._graph(size)

    def run(self, batch: Batch, layers: Sequence[int]) -> Pass | None:
        """Run a batch, whose tensors are on the CPU; None where there is no graph for so many tokens.

        Args:
            batch: what to run.
            layers: whose hidden states are wanted.

        Returns:
            What the next call overwrites. The device may still be at it.
        """
        size = size_of(len(batch.ids), self._sizes)
        if size is None or size in self._failed:
            return None
        if not self._layers.issuperset(layers):
            self._begin(self._layers.union(layers))
        graph = self._graph(size)
        if graph is None:
            return None
        inputs, replay = graph
        inputs.put(batch)
        replay()
        return self._outputs.of(batch, layers)

    def _begin(self, layers: frozenset[int]) -> None:
        """Drop all graphs, and make room for results with these layers: a pass over padding shows sizes."""
        inputs = Inputs.on(self._device, self._room.maxima(1))
        one = self._forward(inputs.ids, inputs.positions, inputs.rows, inputs.tables, sorted(layers))
        self._graphs: dict[int, tuple[Inputs, Work]] = {}
        self._outputs = _Outputs.like(one, self._sizes[-1])
        self._layers = layers
        self._capture = self._captures()

    def _graph(self, size: int) -> tuple[Inputs, Work] | None:
        """Inputs and replay of a size, which is captured where it is not; None where it cannot be."""
        if size not in self._graphs:
            try:
                inputs = Inputs.on(self._device, self._room.maxima(size))
                self._graphs[size] = inputs, self._capture(self._work(inputs))
            except (CaptureError, torch.OutOfMemoryError) as error:
                if not self._failed:
                    logger.warning("passes of %d tokens run without a graph: %s", size, error, exc_info=error)
                self._failed.add(size)
                self.fallbacks += 1
                self._capture = self._captures()
                return None
            self.captured += 1
        return self._graphs[size]

    def _work(self, inputs: Inputs) -> Work:
        """A pass over the inputs. What it reads and writes stays where it is, whatever becomes of `self`."""
        forward, outputs, layers = self._forward, self._outputs, sorted(self._layers)

        def work() -> None:
            outputs.keep(forward(inputs.ids, inputs.positions, inputs.rows, inputs.tables, layers))

        return work


class CudaCapture:
    """Captures CUDA graphs, which share their memory: none may run while another one does."""

    def __init__(self, device: torch.device) -> None:
        """Take a stream of the device; memory is taken as graphs need it."""
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()

    def __call__(self, work: Work) -> Work:
        """Run some work, which compiles and loads what it needs, and capture it; see `Capture`.

        Raises:
            CaptureError: it cannot be captured.
            torch.AcceleratorError: the device is broken.
        """
        graph = torch.cuda.CUDAGraph()
        try:
            # The outer context leaves the stream even where the end of a capture raises.
            with torch.cuda.device(self._device), torch.cuda.stream(self._stream):
                torch.cuda.synchronize()
                work()
                # Threads in which proposers load take memory meanwhile, which may not disturb a capture.
                with torch.cuda.graph(
                    graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
                ):
                    work()
        except Exception as error:
            torch.cuda.synchronize(self._device)  # raises where the device itself is broken
            raise CaptureError(f"{type(error).__name__}: {error}") from error
        return graph.replay
