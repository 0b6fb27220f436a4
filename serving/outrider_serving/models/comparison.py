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
from outrider_serving.engine.target.runner import ModelRunner, Runner
from outrider_serving.models.errors import ModelError
from outrider_serving.sampling.proposal import ROOT, Proposal

_REFERENCE = "eager"
"""The attention that every model of transformers has."""

_PAGE = 4
_TEXT, _OTHER = 12, 3
"""Tokens of the two texts."""

_CACHED = 5
"""Tokens of the first one that are run in a pass of their own first."""

_PARENTS = (ROOT, ROOT, 1)
"""Of the tree that follows the first one."""

TOKENS, REQUESTS = _TEXT - _CACHED + len(_PARENTS) + _OTHER, 2
"""The largest pass of the comparison."""

_PRECISE, _HALF = 0.01, 0.5
"""Most that logits may differ by, in standard deviations of theirs: rounding of 16 bits adds up over layers.

What is computed wrongly differs by one and more.
"""


class DeviationError(Exception):
    """Logits are not those of transformers' own attention; says how far off they are."""


def check_against_transformers(
    model: PreTrainedModel, shapes: Mapping[int, KVShape], source: object, compiled: Compiled | None = None
) -> None:
    """See that a model can be served over pages; see `check_runner`.

    It catches what no configuration tells: a model that looks at tokens to come, that counts positions in a
    way of its own, or whose tokens depend on what else is in the batch.

    Args:
        model: loaded with our attention, which it has again afterwards.
        shapes: what each layer keeps of a token.
        source: what the user called it.
        compiled: what runs it in the place of transformers' modules.

    Raises:
        ModelError: the logits differ by more than rounding.
    """
    store = KVStore(shapes, pages_of(_PAGE) * _PAGE, model.dtype, model.device)
    try:
        check_runner(model, ModelRunner(model, store, compiled), _PAGE)
    except DeviationError as error:
        raise ModelError(f"model {source} ({model.config.model_type}) cannot be served: {error}") from error


def check_runner(model: PreTrainedModel, runner: Runner, page_size: int) -> None:
    """See that a packed pass over scattered pages, with a tree of tokens, gives what each path alone gives.

    Costs some passes over a few tokens.

    Args:
        model: loaded with our attention, which it has again afterwards.
        runner: runs it, with room for TOKENS of REQUESTS and for `pages_of` pages that nobody uses yet.
        page_size: tokens of its pages.

    Raises:
        DeviationError: the logits differ by more than rounding.
    """
    limit = _HALF if model.dtype.itemsize == 2 else _PRECISE
    text, other = _tokens(model, _TEXT), _tokens(model, _OTHER)
    proposal = Proposal((text[3], text[1], text[7]), _PARENTS)
    ours = _paged(runner, page_size, text, other, proposal).double()
    paths = [text, *([*text, *(proposal.tokens[on] for on in proposal.path(n))] for n in range(3)), other]
    theirs = _alone(model, paths).double()
    worst = float(((ours - theirs).pow(2).mean(-1).sqrt() / theirs.std(-1)).max())
    if not worst <= limit:
        raise DeviationError(
            "over pages its logits differ from those that transformers computes for the same text, "
            f"by {worst:.2g} standard deviations"
        )


def pages_of(page_size: int) -> int:
    """How many pages of this many tokens the comparison needs."""
    return sum(_pages_of_texts(page_size))


def _pages_of_texts(page_size: int) -> tuple[int, int]:
    return -(-(_TEXT + len(_PARENTS)) // page_size), -(-_OTHER // page_size)


def _tokens(model: PreTrainedModel, count: int) -> list[int]:
    """Some token ids, not special ones as a rule."""
    size = int(model.config.get_text_config().vocab_size)
    return [(37 + 101 * n) % size for n in range(count)]


@torch.inference_mode()
def _paged(
    runner: Runner, page_size: int, text: Sequence[int], other: Sequence[int], proposal: Proposal
) -> Tensor:
    """[5, vocabulary]: after the text, after each node, and after the other text in the same pass."""
    first, second = _pages_of_texts(page_size)
    every = range(first + second)
    scattered = [*every[1::2], *every[::2]]
    own, others = scattered[:first], scattered[first:]
    runner.run(pack([Piece(text[:_CACHED], Proposal(), 0, own, 0)], page_size, runner.batches_on))
    pieces = [Piece(text[_CACHED:], proposal, _CACHED, own, 1), Piece(other, Proposal(), 0, others, 1)]
    return runner.run(pack(pieces, page_size, runner.batches_on)).wait().logits


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
