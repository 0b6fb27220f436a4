"""A new model's first passes: over our pages, against transformers' own attention."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor
from transformers import PreTrainedModel

from outrider_serving.engine.target.attention import IMPLEMENTATION
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.kv import KVShape, KVStore
from outrider_serving.engine.target.native.decoder import Compiled
from outrider_serving.engine.target.runner import ModelRunner
from outrider_serving.models.errors import ModelError
from outrider_serving.sampling.proposal import ROOT, Proposal

_REFERENCE = "eager"
"""The attention that every model of transformers has."""

_PAGE = 4
_CACHED = 5
"""Tokens that are run in a pass of their own first."""

_PRECISE, _HALF = 0.01, 0.5
"""Most that logits may differ by, in standard deviations of theirs: rounding of 16 bits adds up over layers.

What is computed wrongly differs by one and more.
"""


def check_against_transformers(
    model: PreTrainedModel, shapes: Mapping[int, KVShape], source: object, compiled: Compiled | None = None
) -> None:
    """See that a packed pass over scattered pages, with a tree of tokens, gives what each path alone gives.

    It catches what no configuration tells: a model that looks at tokens to come, that counts positions in a
    way of its own, or whose tokens depend on what else is in the batch. Costs some passes over a few tokens.

    Args:
        model: loaded with our attention, which it has again afterwards.
        shapes: what each layer keeps of a token.
        source: what the user called it.
        compiled: what runs it in the place of transformers' modules.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    limit = _HALF if model.dtype.itemsize == 2 else _PRECISE
    text, other = _tokens(model, 12), _tokens(model, 3)
    proposal = Proposal((text[3], text[1], text[7]), (ROOT, ROOT, 1))
    ours = _paged(ModelRunner(model, _store(model, shapes), compiled), text, other, proposal).double()
    paths = [text, *([*text, *(proposal.tokens[on] for on in proposal.path(n))] for n in range(3)), other]
    theirs = _alone(model, paths).double()
    worst = float(((ours - theirs).pow(2).mean(-1).sqrt() / theirs.std(-1)).max())
    if not worst <= limit:
        raise ModelError(
            f"model {source} ({model.config.model_type}) cannot be served: over pages its logits differ from "
            f"those that transformers computes for the same text, by {worst:.2g} standard deviations"
        )


def _tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Some token ids, not special ones as a rule."""
    size = int(model.config.get_text_config().vocab_size)
    return [(37 + 101 * n) % size for n in range(count)]


def _store(model: PreTrainedModel, shapes: Mapping[int, KVShape]) -> KVStore:
    return KVStore(shapes, 10 * _PAGE, model.dtype, model.device)


@torch.inference_mode()
def _paged(runner: ModelRunner, text: Sequence[int], other: Sequence[int], proposal: Proposal) -> Tensor:
    """[5, vocabulary]: after the text, after each node, and after the other text in the same pass."""
    pages = [7, 2, 3, 5]
    runner.run(pack([Piece(text[:_CACHED], Proposal(), 0, pages, 0)], _PAGE, runner.batches_on))
    pieces = [Piece(text[_CACHED:], proposal, _CACHED, pages, 1), Piece(other, Proposal(), 0, [9], 1)]
    return runner.run(pack(pieces, _PAGE, runner.batches_on)).logits


@torch.inference_mode()
def _alone(model: PreTrainedModel, texts: Sequence[Sequence[int]]) -> Tensor:
    """[texts, vocabulary]: after each text, run by itself."""
    model.set_attn_implementation(_REFERENCE)
    try:
        return torch.stack(
            [
                model(input_ids=torch.tensor([list(text)], device=model.device), use_cache=False).logits[
                    0, -1
                ]
                for text in texts
            ]
        )
    finally:
        model.set_attn_implementation(IMPLEMENTATION)
