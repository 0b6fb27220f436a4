"""What is told of a step: a delta for each request that committed tokens, with the logprobs that it wants."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from outrider_serving.engine.active import Turn
from outrider_serving.engine.target.runner import Pass
from outrider_serving.engine.types import Delta, TokenLogprobs
from outrider_serving.sampling.logprobs import token_logprobs
from outrider_serving.sampling.transfer import sent

_Ask = tuple[int, int, int]
"""A row of logits, a token, and how many of the likeliest tokens are wanted beside it."""


def deltas_of(turns: Sequence[Turn], ran: Pass) -> list[Delta]:
    """One delta for each request that committed tokens, with the logprobs that it wants."""
    prompts, outputs = [], []
    for turn in turns:
        prompts.append(_prompt_targets(turn))
        wanted = turn.sequence.request.params.logprobs
        rows = turn.logit_rows() if wanted is not None else []
        outputs.append([(row, t, wanted or 0) for row, t in zip(rows, turn.committed, strict=False)])
    asked = [ask for asks in (*prompts, *outputs) for ask in asks]
    found = iter(_logprobs(asked, ran))
    for turn, asks in zip(turns, prompts, strict=True):
        turn.active.prompt_logprobs.extend(next(found) for _ in asks)
    logprobs = [tuple(next(found) for _ in asks) for asks in outputs]
    return [turn.delta(own) for turn, own in zip(turns, logprobs, strict=True) if turn.committed]


def _logprobs(asked: Sequence[_Ask], ran: Pass) -> list[TokenLogprobs]:
    if not asked:
        return []
    rows, tokens, top = zip(*asked, strict=True)
    (there,) = sent([np.array(rows)], ran.logits.device)
    return token_logprobs(ran.logits[there], tokens, top)


def _prompt_targets(turn: Turn) -> list[_Ask]:
    """The tokens of the prompt whose logprobs this step gives for the first time."""
    wanted = turn.sequence.request.params.prompt_logprobs
    if wanted is None:
        return []
    known = len(turn.active.prompt_logprobs)
    prompt = turn.sequence.request.prompt
    first_row = turn.root - turn.asks_logits + 1
    positions = range(turn.context + 1, min(turn.context + turn.tokens + 1, len(prompt)))
    return [
        (first_row + position - turn.context - 1, prompt[position], wanted)
        for position in positions
        if position > known
    ]
