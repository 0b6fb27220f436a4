"""The target pass of a step: one over all its turns, or one for each turn where that one fails."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import partial

from outrider_serving.engine.active import Turn
from outrider_serving.engine.containment import tried
from outrider_serving.engine.target.batch import Piece, pack
from outrider_serving.engine.target.runner import Pass, Runner, joined
from outrider_serving.sampling.proposal import Proposal


class Passes:
    """Launches passes and waits for them. Belongs to the thread of the step loop."""

    def __init__(self, runner: Runner, page_size: int) -> None:
        """Take what runs the target, over pages of so many tokens."""
        self._runner = runner
        self._page_size = page_size

    def launch(self, turns: Sequence[Turn], layers: Collection[int]) -> Pass | None:
        """Launch a pass over all pending and proposed tokens; sets where the turns' tokens lie in it.

        Args:
            turns: those of the step.
            layers: whose hidden states are wanted.

        Returns:
            A pass that may be under way; None where there is nothing to run, or it could not be launched.

        Raises:
            torch.AcceleratorError: the device is broken.
        """
        return tried((), lambda: self._pass(turns, layers)) if turns else None

    def wait(self, turns: Sequence[Turn], launched: Pass | None, layers: Collection[int]) -> Pass | None:
        """What `launch` gave for these turns, when its results are there; None where there are no results.

        Where it has failed, each request is run alone, so that what is wrong with one fails no other.

        Raises:
            torch.AcceleratorError: the device is broken.
        """
        ran = None if launched is None else tried((), launched.wait)
        return self._run_alone(turns, layers) if ran is None else ran

    def _pass(self, turns: Sequence[Turn], layers: Collection[int]) -> Pass:
        pieces = [Piece(t.pending, t.proposal, t.context, t.sequence.pages, t.asks_logits) for t in turns]
        batch = pack(pieces, self._page_size, self._runner.batches_on)
        for turn, segment in zip(turns, batch.segments, strict=True):
            turn.first, turn.root = segment.first, segment.logits + turn.asks_logits - 1
        return self._runner.run(batch, sorted(layers))

    def _run_alone(self, turns: Sequence[Turn], layers: Collection[int]) -> Pass | None:
        passes: list[Pass] = []
        tokens = rows = 0
        for turn in turns:
            turn.proposal = Proposal()  # which may be what there was no memory for
            alone = tried([turn], partial(self._alone, turn, layers))
            if alone is not None:
                turn.first, turn.root = turn.first + tokens, turn.root + rows
                tokens += turn.tokens
                rows += len(alone.logits)
                passes.append(alone)
        return tried(turns, lambda: joined(passes)) if passes else None

    def _alone(self, turn: Turn, layers: Collection[int]) -> Pass:
        return self._pass([turn], layers).wait().copy()  # the next one's pass may overwrite it
