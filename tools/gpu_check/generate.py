"""Decoding against transformers' own `generate` with a static cache, in interleaved pairs."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from tools.gpu_check.finding import Finding, Findings
from tools.gpu_check.target import SHAPES, Target, model_of, target_of
from torch import Tensor

from outrider_serving.engine.target.batch import Piece
from outrider_serving.sampling.highest import highest
from outrider_serving.sampling.proposal import Proposal

_NAME = "Llama 3.2 1B"
_PROMPT, _NEW = 128, 128
_PAIRS = 5


def find(device: torch.device) -> Findings:
    """Without compilation first, since that is sure to come to its end."""
    target = target_of(model_of(SHAPES[_NAME], device), 8, _PROMPT + _NEW)
    theirs: Any = model_of(SHAPES[_NAME], device, attention="sdpa")
    for compiled in (False, True):
        for requests in (1, 8):
            name = "compiled" if compiled else "not compiled"
            what = f"{_NAME}, {requests} at once, against `generate`, {name}"
            torch.manual_seed(requests)
            prompts = torch.randint(100_000, (requests, _PROMPT), device=device)
            try:
                yield _pairs(what, target, partial(_generate, theirs, prompts, compiled), prompts)
            except Exception as error:
                yield Finding(what, f"`generate` does not run so here: {type(error).__name__}: {error}"[:300])


def _pairs(what: str, target: Target, theirs: Callable[[], Tensor], prompts: Tensor) -> Finding:
    _decode(target, prompts), theirs()  # which compile what they need
    pairs = []
    for _ in range(_PAIRS):
        ours = _timed(lambda: _decode(target, prompts))
        pairs.append((ours, _timed(theirs)))
    return _against(what, prompts.shape[0] * _NEW, pairs)


def _against(what: str, tokens: int, pairs: Sequence[tuple[float, float]]) -> Finding:
    """Seconds of each pair are ours, then theirs; above 1 we are faster."""
    own, other = (statistics.median(column) for column in zip(*pairs, strict=True))
    ratios = sorted(theirs / ours for ours, theirs in pairs)
    return Finding(
        what,
        f"{tokens / own:.0f} tokens/s against {tokens / other:.0f}, prompts included: "
        f"{statistics.median(ratios):.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f}, {len(pairs)} pairs)",
        numbers={"tokens": tokens, "pairs_seconds": pairs},
    )


def _timed(work: Callable[[], object]) -> float:
    torch.cuda.synchronize()
    started = time.perf_counter()
    work()
    torch.cuda.synchronize()
    return time.perf_counter() - started


def _decode(target: Target, prompts: Tensor) -> list[list[int]]:
    """Greedy, one pass after the other, as the engine's steps run them."""
    texts: list[list[int]] = prompts.tolist()
    context = 0
    for _ in range(_NEW):
        pieces = [
            Piece(text[context:], Proposal(), context, target.pages(one), 1) for one, text in enumerate(texts)
        ]
        context = len(texts[0])
        for text, token in zip(texts, highest(target.run(pieces).logits).tolist(), strict=True):
            text.append(token)
    return texts


def _generate(model: Any, prompts: Tensor, compiled: bool) -> Tensor:
    out: Tensor = model.generate(
        prompts,
        attention_mask=torch.ones_like(prompts),
        min_new_tokens=_NEW,
        max_new_tokens=_NEW,
        do_sample=False,
        cache_implementation="static",
        disable_compile=not compiled,
        pad_token_id=0,
        eos_token_id=0,
    )
    if out.shape[1] != _PROMPT + _NEW:
        raise ValueError(f"it gave {out.shape[1] - _PROMPT} tokens, not {_NEW}")
    return out
