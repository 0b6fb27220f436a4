"""A side that is transformers itself, in process: `generate`, and continuous batching for several streams."""

from __future__ import annotations

import math
import time
from typing import Any, cast

import torch
from transformers import ContinuousBatchingConfig, GenerationConfig
from transformers.generation.streamers import BaseStreamer

from outrider_serving.bench.coverage import Written
from outrider_serving.bench.results import BenchError, Run, Stream
from outrider_serving.bench.sides import check_lengths
from outrider_serving.bench.workloads import Job
from outrider_serving.models.loading import LoadedModel


class _Arrivals(BaseStreamer):
    """Notes when each token came."""

    def __init__(self) -> None:
        self.times: list[float] = []
        self._prompt = True

    def put(self, value: torch.Tensor) -> None:  # noqa: ARG002
        """Called with the prompt, then with each token."""
        if not self._prompt:
            self.times.append(time.perf_counter())
        self._prompt = False

    def end(self) -> None:
        """Called after the last token."""


class TransformersSide:
    """The model by transformers' own attention and cache."""

    def __init__(self, name: str, loaded: LoadedModel, step_tokens: int) -> None:
        """Take a model that no engine runs: its attention becomes transformers' own again.

        `step_tokens` are the most tokens in one pass of a batch, as in `EngineLimits`.
        """
        self.name = name
        self._step_tokens = step_tokens
        self._loaded = loaded
        self._model = cast("Any", loaded.model)
        self._model.set_attn_implementation("sdpa" if self._model._supports_sdpa else "eager")
        self._batched: Job | None = None  # what the batch that transformers keeps is sized for

    def prepare(self, job: Job) -> tuple[Written, ...]:
        """See `Side.prepare`: it remembers nothing.

        Raises:
            BenchError: transformers would run all requests at once.
        """
        if job.workload.streams < len(job.workload.prompts):
            raise BenchError(f"{self.name} cannot run {job.workload.name}, which takes turns")
        return ()

    def run(self, job: Job) -> Run:
        """See `Side.run`."""
        prompts = [list(self._loaded.tokenizer(prompt).input_ids) for prompt in job.workload.prompts]
        if job.sampling.seed is not None:
            torch.manual_seed(job.sampling.seed)
        streams = [self._one(prompts[0], job)] if len(prompts) == 1 else self._several(prompts, job)
        return check_lengths(Run(tuple(streams)), job, self.name)

    def close(self) -> None:
        """See `Side.close`."""
        if self._batched is not None:
            self._model.destroy_cached_continuous_batching_manager()

    def _one(self, prompt: list[int], job: Job) -> Stream:
        tokens = torch.tensor([prompt], device=self._model.device)
        arrivals = _Arrivals()
        start = time.perf_counter()
        output = self._model.generate(
            tokens,
            attention_mask=torch.ones_like(tokens),
            generation_config=self._config(job),
            streamer=arrivals,
        )
        generated = tuple(output[0, len(prompt) :].tolist())
        return Stream(generated, len(generated), tuple(at - start for at in arrivals.times))

    def _several(self, prompts: list[list[int]], job: Job) -> list[Stream]:
        if self._batched not in (None, job):
            self._model.destroy_cached_continuous_batching_manager()
        self._batched = job
        results = self._model.generate_batch(
            inputs=prompts,
            generation_config=self._config(job),
            continuous_batching_config=self._batching(prompts, job),
            record_timestamps=True,
            persistent_manager=True,
        )
        found = list(results.values())
        failed = [result.error for result in found if result.error is not None]
        if failed or len(found) != len(prompts):
            reason = failed[0] if failed else f"{len(found)} of {len(prompts)} requests ended"
            raise BenchError(f"{self.name}, workload {job.workload.name}: {reason}")
        # Counted from when the first one is taken up: a server would not set its batch up each time.
        start = min(result.lifespan[0] for result in found)
        return [
            Stream(
                tuple(result.generated_tokens),
                len(result.generated_tokens),
                tuple(at - start for at in result.timestamps),
            )
            for result in found
        ]

    def _batching(self, prompts: list[list[int]], job: Job) -> ContinuousBatchingConfig:
        """Room for all requests at once; with all the machine's memory, its default, setting up takes long.

        Prompts are not shared: each request is to read its own, as on the other side.
        """
        longest = max(map(len, prompts)) + job.tokens
        blocks = len(prompts) * math.ceil(longest / ContinuousBatchingConfig.page_size)
        return ContinuousBatchingConfig(
            num_blocks=2 * blocks, max_batch_tokens=self._step_tokens, allow_block_sharing=False
        )

    def _config(self, job: Job) -> GenerationConfig:
        sampling = job.sampling
        chosen: dict[str, Any] = {"do_sample": False}
        if sampling.temperature > 0:
            chosen = {
                "do_sample": True,
                "temperature": sampling.temperature,
                "top_p": sampling.top_p,
                "top_k": 0,
            }
        # An end of sequence that is no token: each request goes on to its last one.
        return GenerationConfig(  # type: ignore[no-untyped-call]
            max_new_tokens=job.tokens, eos_token_id=self._loaded.vocab_size, pad_token_id=0, **chosen
        )
