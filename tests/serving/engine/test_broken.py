"""Proposers, grammars and targets that are broken or slow: each fails what it must, and nothing else."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import replace

import numpy as np
import pytest
import torch

from outrider_serving.engine.target.batch import Batch
from outrider_serving.engine.target.kv import KVShape
from outrider_serving.engine.target.runner import ModelRunner, Pass
from outrider_serving.engine.types import DeadlineError, EngineError, QueueFullError
from outrider_serving.models.loading import LoadedModel
from outrider_serving.proposers.base import Advanced, Event, Needs, Row, Surroundings
from outrider_serving.sampling.distribution import Distribution
from outrider_serving.sampling.grammar import regex_grammar
from outrider_serving.sampling.matcher import GrammarCompiler, Matcher
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.settings import NgramSettings, default_settings
from outrider_serving.settings import Proposer as ProposerSettings
from serving.engine import proposers
from serving.engine.support import NONE, bench, building, reference, request, run

PROMPT = [5, 6, 7, 8] * 4

OTHERS = default_settings(ProposerSettings(ngram=NgramSettings(max_match=9)))


@pytest.mark.parametrize("also", ["", "observe"])
def test_a_proposer_that_cannot_be_closed_fails_no_request(tiny_llama: LoadedModel, also: str) -> None:
    proposer = proposers.Raising([], lambda name, _: name in ("close", also))
    engine = bench(tiny_llama, build=building(proposer), proposer_bytes=1000)
    (result,) = engine.submit(request(PROMPT))
    engine.step()
    engine.core.set_settings(OTHERS)
    while engine.core.busy:
        engine.step()
    assert result.tokens == reference(tiny_llama, PROMPT, 32)
    engine.core.close()
    assert engine.core.proposer_free == 1000


def test_a_proposer_that_wants_a_layer_which_the_target_lacks_fails_no_request(
    tiny_llama: LoadedModel,
) -> None:
    class Lost(proposers.Oracle):
        def __init__(self) -> None:
            super().__init__([])
            self.needs = Needs(hidden_layers=(99,))

    engine = bench(tiny_llama, build=building(Lost()))
    (result,) = engine.run(request(PROMPT))
    assert result.tokens == reference(tiny_llama, PROMPT, 32)
    assert engine.core.proposer_trouble is not None


BAD_NEEDS: dict[str, tuple[object, object, str]] = {
    "none": (None, 0, "its needs are None, which are not Needs"),
    "half a layer": (Needs(hidden_layers=(1.5,)), 0, "its hidden layer is 1.5"),  # type: ignore[arg-type]
    "a layer that counts as one": (Needs(hidden_layers=(1.0,)), 0, "hidden layer is 1.0"),  # type: ignore[arg-type]
    "a layer that is a truth": (Needs(hidden_layers=(True,)), 0, "its hidden layer is True"),
    "a layer of numpy": (Needs(hidden_layers=(np.int64(1),)), 0, "hidden layer is np.int64"),  # type: ignore[arg-type]
    "a negative layer": (Needs(hidden_layers=(-1,)), 0, "its hidden layer is -1"),
    "no layers": (Needs(hidden_layers=None), 0, "not iterable"),  # type: ignore[arg-type]
    "a shape that is none": (Needs(kv_layers=((1, 1, 2),)), 0, "shape (1, 1, 2)"),  # type: ignore[arg-type]
    "a shape without heads": (Needs(kv_layers=(KVShape(0, 1, 2),)), 0, "its number of heads is 0"),
    "keys of negative size": (Needs(kv_layers=(KVShape(1, -1, 2),)), 0, "its size of keys is -1"),
    "values of half a size": (Needs(kv_layers=(KVShape(1, 1, 0.5),)), 0, "size of values is 0.5"),  # type: ignore[arg-type]
    "no width": (Needs(width=None), 0, "its width is None"),  # type: ignore[arg-type]
    "half a width": (Needs(width=2.5), 0, "its width is 2.5"),  # type: ignore[arg-type]
    "a width of nothing": (Needs(width=0), 0, "its width is 0, but must be a whole number of at least 1"),
    "a negative width": (Needs(width=-100), 0, "its width is -100"),
    "a width that is a truth": (Needs(width=True), 0, "its width is True"),
    "negative memory": (Needs(), -1, "its memory_bytes is -1, but must be a whole number of at least 0"),
    "no memory": (Needs(), None, "its memory_bytes is None"),
    "half a byte": (Needs(), 0.5, "its memory_bytes is 0.5"),
}


@pytest.mark.parametrize("name", BAD_NEEDS)
def test_a_proposer_whose_needs_make_no_sense_fails_no_request(tiny_llama: LoadedModel, name: str) -> None:
    needs, memory_bytes, says = BAD_NEEDS[name]
    proposer = proposers.Raising([], lambda *_: False)
    proposer.needs, proposer.memory_bytes = needs, memory_bytes  # type: ignore[assignment]
    engine = bench(tiny_llama, build=building(proposer), proposer_bytes=1000)
    asked, other = engine.run(request(PROMPT), request(PROMPT, speculation=NONE))
    assert asked.tokens == other.tokens == reference(tiny_llama, PROMPT, 32)
    trouble = engine.core.proposer_trouble
    assert trouble is not None
    assert trouble.startswith("proposer ngram failed: ")
    assert says in trouble
    assert engine.records[0].proposer_failures == 1
    assert proposer.calls == {}, "it was not loaded"
    assert engine.core.proposer_free == 1000


@pytest.mark.parametrize(
    "later",
    [Needs(hidden_layers=(99,)), Needs(hidden_layers=(1.0,)), Needs(width=2.5), Needs(width=-1), None],
)
def test_what_a_proposer_needs_is_read_once(tiny_llama: LoadedModel, later: Needs | None) -> None:
    class Fickle(proposers.HiddenReader):
        def observe(self, events: Sequence[Event]) -> None:
            self.seen = {layer for event in events if isinstance(event, Advanced) for layer in event.hidden}

        def propose(self, rows: Sequence[Row]) -> list[Proposal]:
            return [Proposal.chain((5,)) for _ in rows]

        def load(self, surroundings: Surroundings) -> None:
            layers.append(2)
            self.needs, self.memory_bytes = later, -1  # type: ignore[assignment]

    layers = [1]
    fickle = Fickle([], layers)  # type: ignore[arg-type]
    engine = bench(tiny_llama, build=building(fickle))
    results = engine.run(request(PROMPT), request([9]), request(PROMPT, speculation=NONE))
    for result, prompt in zip(results, (PROMPT, [9], PROMPT), strict=True):
        assert result.tokens == reference(tiny_llama, prompt, 32)
    assert fickle.seen == {1}
    assert results[0].proposed > 0
    assert engine.core.proposer_trouble is None
    assert sum(record.proposer_failures for record in engine.records) == 0


BAD: dict[str, Callable[[], tuple[object, Distribution | None]]] = {
    "q in single precision": lambda: (5, Distribution(torch.tensor([5, 6]), torch.tensor([0.5, 0.5]))),
    "q beyond the vocabulary": lambda: (5, Distribution(torch.tensor([5, 999]), _halves())),
    "q before the vocabulary": lambda: (5, Distribution(torch.tensor([5, -999]), _halves())),
    "q of two dimensions": lambda: (5, Distribution(None, torch.full((320, 1), 1 / 320).double())),
    "half a token": lambda: (5.5, None),
    "a token of numpy": lambda: (np.int64(5), None),
    "a token that is a tensor": lambda: (torch.tensor(5), None),
    "a token that is a truth": lambda: (True, None),
}


def _halves() -> torch.Tensor:
    return torch.tensor([0.5, 0.5], dtype=torch.float64)


@pytest.mark.parametrize("name", BAD)
def test_a_proposal_that_is_no_proposal_fails_no_request(tiny_llama: LoadedModel, name: str) -> None:
    class Wrong(proposers.Reader):
        def one(self, row: Row, text: list[int]) -> Proposal:
            token, q = BAD[name]()
            return Proposal((token,), (-1,), (q,))  # type: ignore[arg-type]

    results = run(
        tiny_llama,
        *(
            request(
                PROMPT,
                temperature=n % 2,
                max_tokens=12,
                ignore_eos=True,
                logit_bias=((5, 4.0 - 8 * (n > 2)),),
            )
            for n in range(6)
        ),
        build=building(Wrong()),
    )
    assert [str(result.error) for result in results if result.error] == []
    assert all(type(token) is int for result in results for token in result.tokens)


def test_q_that_is_no_distribution_does_not_let_a_banned_token_through(tiny_llama: LoadedModel) -> None:
    """A negative q would add to the residual of a token that the target's law gives nothing."""
    banned = 9

    class Wrong(proposers.Reader):
        def one(self, row: Row, text: list[int]) -> Proposal:
            q = torch.full((320,), 1 / 320, dtype=torch.float64)
            q[banned] = -5.0
            return Proposal((5,), (-1,), (Distribution(None, q),))

    results = run(
        tiny_llama,
        *(request(PROMPT, temperature=1.0, ignore_eos=True, banned_token_ids=(banned,)) for _ in range(4)),
        build=building(Wrong()),
    )
    assert not any(banned in result.tokens for result in results)


def test_a_request_with_a_grammar_that_does_not_fit_the_pages_is_refused(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama, pages=4)
    (other,) = engine.submit(request([5, 6, 7], max_tokens=8))
    with pytest.raises(ValueError, match="pages"):
        engine.submit(request([5, 6, 7], max_tokens=100, grammar=regex_grammar("[ab]{3}")))
    while engine.core.busy:
        engine.step()
    assert other.tokens == reference(tiny_llama, [5, 6, 7], 8)


def slow_grammars(monkeypatch: pytest.MonkeyPatch, seconds: float) -> None:
    original = GrammarCompiler.matcher

    def matcher(self: GrammarCompiler, grammar: str) -> Matcher:
        time.sleep(seconds)
        return original(self, grammar)

    monkeypatch.setattr(GrammarCompiler, "matcher", matcher)


def test_a_deadline_holds_while_a_grammar_waits_to_be_compiled(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_grammars(monkeypatch, 0.2)
    now = 0.0
    engine = bench(tiny_llama, clock=lambda: now)
    results = engine.submit(
        *(request([5, 6], max_tokens=4, grammar=regex_grammar("[ab]{3}"), deadline=1.0) for _ in range(6))
    )
    now = 2.0
    for _ in range(3):
        engine.step()
    assert all(isinstance(result.error, DeadlineError) for result in results)
    engine.core.close()


def test_a_tenant_that_floods_with_grammars_keeps_no_other_one_out(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow_grammars(monkeypatch, 0.2)
    engine = bench(tiny_llama, max_waiting=4)
    grammar = regex_grammar("[ab]{3}")
    try:
        for _ in range(8):
            engine.submit(request([5, 6], max_tokens=4, grammar=grammar, tenant="flood"))
    except QueueFullError:
        pass
    engine.submit(request([5, 6], max_tokens=4, grammar=grammar, tenant="other"))
    engine.core.close()


@pytest.mark.parametrize("broken", [float("nan"), float("inf")])
@pytest.mark.parametrize("params", [{"temperature": 0}, {"temperature": 0, "presence_penalty": 1.0}], ids=str)
def test_a_target_that_computes_no_numbers_fails_greedy_requests_too(
    tiny_llama: LoadedModel, monkeypatch: pytest.MonkeyPatch, params: dict[str, float], broken: float
) -> None:
    original = ModelRunner.run

    def damaged(self: ModelRunner, batch: Batch, layers: list[int]) -> Pass:
        ran = original(self, batch, layers)
        logits = ran.logits.clone()
        logits[:, 17] = broken
        return replace(ran, logits=logits)

    monkeypatch.setattr(ModelRunner, "run", damaged)
    (result,) = run(tiny_llama, request(PROMPT, logprobs=1, speculation=NONE, **params))
    assert isinstance(result.error, EngineError)
