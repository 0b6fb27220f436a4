"""Runs the target: new tokens of one request in, logits out."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.attention import TargetPass
from outrider_serving.engine.kv import SequenceKV


class ModelRunner:
    """The target model, over our own keys and values."""

    def __init__(self, model: PreTrainedModel) -> None:
        """Take a model that was loaded with `attn_implementation` "outrider"."""
        self._model = model
        self._device = model.device

    @torch.inference_mode()
    def run(self, tokens: Sequence[int], kv: SequenceKV, keep: int) -> Tensor:
        """One target pass.

        Args:
            tokens: the T tokens that follow the first `kv.length` ones; their keys and values are written to
                `kv`, whose `length` is left to the caller.
            kv: the request's store.
            keep: for how many of the last tokens logits are wanted, at least 1.

        Returns:
            Logits [keep, vocabulary] in the model's dtype: row i is the target's view after the token
            T - keep + i.

        Raises:
            torch.OutOfMemoryError, RuntimeError: what the model raised.
        """
        start = kv.length
        ids = torch.tensor([tokens], dtype=torch.int64, device=self._device)
        positions = torch.arange(start, start + len(tokens), device=self._device)[None]
        out = self._model(
            input_ids=ids,
            position_ids=positions,
            use_cache=False,
            logits_to_keep=keep,
            target_pass=TargetPass(kv),
        )
        logits: Tensor = out.logits[0]
        return logits
