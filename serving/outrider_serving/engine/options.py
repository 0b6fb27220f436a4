"""What an engine is told when it is started: plain data that crosses to its process. No torch."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

DType = Literal["auto", "float32", "bfloat16", "float16"]

DEFAULT_MAX_WAITING = 256
DEFAULT_MAX_RUNNING = 32
DEFAULT_PAGE_SIZE = 16
MAX_PAGE_SIZE = 1024

MEMORY_SHARE_GPU, MEMORY_SHARE_CPU = 0.9, 0.4
"""A GPU is the engine's alone; a container's memory is also the API's and the page cache's."""

STEP_TOKENS_GPU, STEP_TOKENS_CPU = 2048, 512
"""About where a target pass of a small model stops getting cheaper by the token."""


@dataclass(frozen=True, slots=True)
class EngineOptions:
    """Options of one engine.

    Attributes:
        model: what the user calls it; see `models.source.parse_source`.
        revision: of the hub, or the digest that the files must have; None takes what is there.
        dtype: of the weights in memory.
        context_length: most tokens of prompt and output; None is the model's own.
        max_waiting: requests that may wait before others are refused.
        max_running: requests in one step at most.
        step_tokens: tokens in one target pass at most; None goes by the device.
        page_size: tokens in a page of keys and values.
        memory_share: share of the device's memory, or of the container's on a CPU, that weights, pages,
            CUDA graphs and proposers may take, over 0 to 1; None goes by the device.
        proposer_memory: bytes of that share kept free for proposers.
    """

    model: str
    revision: str | None = None
    dtype: DType = "auto"
    context_length: int | None = None
    max_waiting: int = DEFAULT_MAX_WAITING
    max_running: int = DEFAULT_MAX_RUNNING
    step_tokens: int | None = None
    page_size: int = DEFAULT_PAGE_SIZE
    memory_share: float | None = None
    proposer_memory: int = 0

    def memory_share_on(self, device: str) -> float:
        """The share of memory on a type of device, as torch names it ("cuda", "cpu")."""
        default = MEMORY_SHARE_CPU if device == "cpu" else MEMORY_SHARE_GPU
        return default if self.memory_share is None else self.memory_share

    def step_tokens_on(self, device: str) -> int:
        """Tokens in one target pass on a type of device, as torch names it; one for each request at least."""
        default = STEP_TOKENS_CPU if device == "cpu" else STEP_TOKENS_GPU
        return max(default, self.max_running) if self.step_tokens is None else self.step_tokens
