"""A runner whose passes take their time, as a GPU's do: nothing of a pass is there until it is waited for."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Self

import pytest
import torch

from outrider_serving.engine import core
from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.runner import ModelRunner, Pass


@dataclass(frozen=True, slots=True)
class LatePass(Pass):
    """Results that are no numbers until `land` was called."""

    land: Callable[[], None]

    def wait(self) -> Self:
        self.land()
        return self


@dataclass
class Late:
    """What happens in passes.

    Attributes:
        launching: called when a pass is launched, and
        landing: when one is waited for, with its batch; both may raise.
        events: "launch" and "land", in order; tests add what they see in between.
    """

    launching: Callable[[Batch], None] = lambda _: None
    landing: Callable[[Batch], None] = lambda _: None
    events: list[str] = field(default_factory=list)


class LateRunner(ModelRunner):
    """Runs a pass when it is waited for; to launch one spoils the results of the one before."""

    late: Late

    def run(self, batch: Batch, hidden_layers: Sequence[int] = ()) -> Pass:
        self.late.events.append("launch")
        self.late.launching(batch)
        config, dtype = self._model.config, self._model.dtype
        for spoiled in getattr(self, "_results", ()):
            spoiled.fill_(torch.nan)
        logits = torch.full((len(batch.logits), config.vocab_size), torch.nan, dtype=dtype)
        hidden = {
            layer: torch.full((len(batch.ids), config.hidden_size), torch.nan, dtype=dtype)
            for layer in hidden_layers
        }
        self._results = [logits, *hidden.values()]

        def land() -> None:
            self.late.events.append("land")
            self.late.landing(batch)
            ran = ModelRunner.run(self, batch, hidden_layers)
            logits.copy_(ran.logits)
            for layer, states in ran.hidden.items():
                hidden[layer].copy_(states)

        return LatePass(logits, hidden, land)


def make_late(monkeypatch: pytest.MonkeyPatch) -> Late:
    """Let engines that are made from now on have late passes; tells of them."""
    told = Late()
    monkeypatch.setattr(LateRunner, "late", told, raising=False)
    monkeypatch.setattr(core, "ModelRunner", LateRunner)
    return told
