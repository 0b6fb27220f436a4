"""Every parameter means under speculation what it means without: the places where engines went wrong."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from outrider_serving.engine.types import FinishReason
from outrider_serving.models.loading import LoadedModel, load_model
from outrider_serving.sampling import grammar
from outrider_serving.settings import Proposer
from serving.engine import proposers
from serving.engine.suffixes import Noting, warm_suffix
from serving.engine.support import NONE, Result, bench, building, logits_of, request, run
from serving.tiny import make_tiny_model

EOS = 1
PROMPT = list(range(10, 40))
SAMPLED: dict[str, Any] = {"temperature": 1.0, "seed": 8}
CLASSES = {"greedy": {}, "seeded": SAMPLED}


def off(loaded: LoadedModel, **params: Any) -> Result:
    """The request with speculation off."""
    (result,) = run(loaded, request(PROMPT, speculation=NONE, **params))
    return result


def on(loaded: LoadedModel, proposer: object, depth: int = 6, **params: Any) -> Result:
    """The request with a test proposer."""
    (result,) = run(
        loaded, request(PROMPT, **params), proposer=Proposer(max_depth=depth), build=building(proposer)
    )
    return result


def both(loaded: LoadedModel, depth: int = 6, **params: Any) -> tuple[Result, list[Result]]:
    """With speculation off, and with proposals that are right: as a chain, in trees, and from history."""
    plain = off(loaded, **params)
    known = [[*PROMPT, *plain.tokens, *PROMPT]]
    kinds = (
        proposers.Oracle(known),
        proposers.Bushy(known),
        proposers.Oracle(known, wrong=3),
        remembering(plain.tokens),
    )
    return plain, [on(loaded, kind, depth, **params) for kind in kinds]


def remembering(output: Sequence[int], *wrong: int) -> Noting:
    """The suffix proposer, whose history has an output to the prompt, and what else followed its beginnings.

    So the first tree has what is right, and what is wrong in place of each of the first tokens.
    """
    right = [*PROMPT, *output, *PROMPT]
    ends = range(len(PROMPT), len(PROMPT) + 6) if wrong else ()
    return warm_suffix([right, right, *([*right[:end], *wrong] for end in ends)], width=3)


@pytest.mark.parametrize("how", CLASSES)
@pytest.mark.parametrize("penalty", [2.0, -2.0])
def test_a_frequency_penalty_over_an_accepted_run(tiny: LoadedModel, how: str, penalty: float) -> None:
    """-2 makes a token repeat, +2 stops what repeats: each position sees the ones before it."""
    params = {"frequency_penalty": penalty, "max_tokens": 40, "ignore_eos": True, **CLASSES[how]}
    plain, others = both(tiny, **params)
    assert [other.tokens for other in others] == [plain.tokens] * 4
    assert min(others[0].accepted, others[-1].accepted) > 20
    most = Counter(plain.tokens).most_common(1)[0][1]
    free = off(tiny, max_tokens=40, ignore_eos=True, **CLASSES[how]).tokens
    often = Counter(free).most_common(1)[0][1]
    assert most >= often if penalty < 0 else most <= often
    assert on(tiny, remembering(plain.tokens, *free[:6]), **params).tokens == plain.tokens


@pytest.mark.parametrize("how", CLASSES)
def test_end_of_text_in_a_proposal_is_allowed_exactly_at_min_tokens(tiny: LoadedModel, how: str) -> None:
    """The model loves its end of text; the proposer proposes nothing else."""
    love = {"logit_bias": ((EOS, 1000.0),), **CLASSES[how]}
    for least in range(6):
        plain = off(tiny, min_tokens=least, **love)
        assert plain.tokens.index(EOS) == least == len(plain.tokens) - 1
        assert plain.finish_reason is FinishReason.STOP
        suffix = remembering(plain.tokens, EOS)
        for proposer in (proposers.Fixed(EOS), proposers.Oracle([[*PROMPT, *plain.tokens]]), suffix):
            assert on(tiny, proposer, min_tokens=least, **love).tokens == plain.tokens
        assert EOS in suffix.proposed


@pytest.mark.parametrize("how", CLASSES)
def test_a_bias_of_minus_100_on_what_the_proposer_loves(tiny: LoadedModel, how: str) -> None:
    free = off(tiny, ignore_eos=True, **CLASSES[how])
    loved = Counter(free.tokens).most_common(1)[0][0]
    params = {"logit_bias": ((loved, -100.0),), "ignore_eos": True, **CLASSES[how]}
    plain = off(tiny, **params)
    assert loved not in plain.tokens
    suffix = remembering(plain.tokens, loved)
    for proposer in (proposers.Fixed(loved), proposers.Oracle([[*PROMPT, *free.tokens]]), suffix):
        assert on(tiny, proposer, **params).tokens == plain.tokens
    assert loved in suffix.proposed


def test_forbidden_tokens_that_are_proposed_are_never_committed(tiny_llama: LoadedModel) -> None:
    allowed = range(40, 60)
    # After any token that is allowed both were written, what is forbidden last: it is tried first.
    suffix = warm_suffix(
        [[token, *after] for token in allowed for after in ((50, 51, 52), (40, 5, 41))], width=3
    )
    for proposer in (proposers.Drawn(320, support=200), suffix):
        for seed in (3, None):
            result = on(
                tiny_llama,
                proposer,
                temperature=1.0,
                seed=seed,
                allowed_token_ids=tuple(allowed),
                banned_token_ids=(40, 41),
                max_tokens=100,
            )
            assert set(result.tokens) <= set(allowed) - {40, 41}
            assert result.accepted > 0
    assert suffix.proposed >= {5, 40, 41, 50}


@pytest.mark.parametrize("how", CLASSES)
def test_a_stop_token_inside_an_accepted_run_ends_it(tiny: LoadedModel, how: str) -> None:
    free = off(tiny, ignore_eos=True, **CLASSES[how])
    for at in range(8):
        stop = free.tokens[at]
        first = free.tokens.index(stop)
        plain, others = both(tiny, ignore_eos=True, stop_token_ids=(stop,), **CLASSES[how])
        assert plain.tokens == free.tokens[: first + 1]
        assert plain.finish_reason is FinishReason.STOP
        for other in others:
            assert (other.tokens, other.finish_reason) == (plain.tokens, plain.finish_reason)
            assert other.accepted <= len(other.tokens)


@pytest.mark.parametrize("how", CLASSES)
def test_max_tokens_and_usage(tiny: LoadedModel, how: str) -> None:
    depth = 4
    for most in range(1, depth + 3):
        plain, others = both(tiny, depth, max_tokens=most, ignore_eos=True, **CLASSES[how])
        assert len(plain.tokens) == most
        assert [other.tokens for other in others] == [plain.tokens] * 4
        for other in others:
            assert sum(len(delta.tokens) for delta in other.deltas) == most
            assert all(delta.accepted <= len(delta.tokens) for delta in other.deltas)


@pytest.mark.parametrize("how", CLASSES)
def test_logprobs_are_those_of_the_target_alone(tiny: LoadedModel, how: str) -> None:
    """With parameters that change the law: logprobs are of the target's own, as transformers gives it."""
    params = {"logprobs": 4, "frequency_penalty": 1.0, "ignore_eos": True, **CLASSES[how]}
    plain, others = both(tiny, **params)
    text = [*PROMPT, *plain.tokens]
    wanted = torch.log_softmax(logits_of(tiny, text).double(), -1)[len(PROMPT) - 1 : -1]
    for result in (plain, *others):
        assert result.tokens == plain.tokens
        assert len(result.logprobs) == len(result.tokens)
        for row, token, told in zip(wanted, result.tokens, result.logprobs, strict=True):
            assert told.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert [logprob for _, logprob in told.top] == pytest.approx(
                row.topk(4).values.tolist(), abs=1e-5
            )
            assert all(logprob == pytest.approx(float(row[id_]), abs=1e-5) for id_, logprob in told.top)
    assert others[0].accepted > 0


def test_logprobs_of_the_prompt(tiny: LoadedModel) -> None:
    """In chunks, and although the prompt is in the cache."""
    engine = bench(tiny, step_tokens=7, max_running=4)
    wanted = torch.log_softmax(logits_of(tiny, PROMPT).double(), -1)
    for _ in range(2):
        (result,) = engine.run(request(PROMPT, prompt_logprobs=2, max_tokens=3))
        told = result.deltas[0].prompt_logprobs
        assert len(told) == len(PROMPT) - 1
        for row, token, one in zip(wanted, PROMPT[1:], told, strict=False):
            assert one.logprob == pytest.approx(float(row[token]), abs=1e-5)
            assert len(one.top) == 2
        assert all(not delta.prompt_logprobs for delta in result.deltas[1:])
    (long,) = engine.run(request([n % 300 + 2 for n in range(200)], prompt_logprobs=0, max_tokens=1))
    assert len(long.deltas[0].prompt_logprobs) == 199


def test_a_vocabulary_padded_beyond_the_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> None:
    """Surplus ids have the probability that the model gives them, on as off; a grammar never allows them."""
    path = make_tiny_model(tmp_path_factory.mktemp("padded"), dtype=torch.float64, padding=44)
    padded = load_model(str(path))
    assert padded.vocab_size == len(padded.tokenizer) + 44
    plain, others = both(padded, max_tokens=100, ignore_eos=True, **SAMPLED)
    assert max(plain.tokens) >= len(padded.tokenizer)
    assert [other.tokens for other in others] == [plain.tokens] * 4
    digits = grammar.regex_grammar("[0-9]{5}")
    constrained = on(padded, proposers.Drawn(364), grammar=digits, max_tokens=30, **SAMPLED)
    assert len(padded.tokenizer.decode(constrained.tokens[:-1])) == 5


REGEX = r"(cat|dog)s? [0-9]{2,6}( and [a-f]+)?\."


@pytest.mark.parametrize("how", CLASSES)
def test_a_grammar_holds_at_every_proposed_position(tiny: LoadedModel, how: str) -> None:
    """Proposals that follow it, break it, end it too early and go on after its end."""

    params = {"grammar": grammar.regex_grammar(REGEX), "max_tokens": 60, **CLASSES[how]}
    plain = off(tiny, **params)
    text = tiny.tokenizer.decode(plain.tokens, skip_special_tokens=True)
    complete = plain.finish_reason is FinishReason.STOP
    assert re.fullmatch(REGEX, text) if complete else plain.tokens
    known = [[*PROMPT, *plain.tokens, EOS, 44, 45]]
    suffix = remembering(plain.tokens, EOS), remembering(plain.tokens, 44, 45)
    for proposer in (
        *suffix,
        proposers.Oracle(known),
        proposers.Bushy(known),
        proposers.Oracle(known, wrong=2),
        proposers.Drawn(320, width=3),
        proposers.Fixed(EOS),
    ):
        assert on(tiny, proposer, **params).tokens == plain.tokens
    assert EOS in suffix[0].proposed
    assert 44 in suffix[1].proposed


def test_preemption_with_a_grammar_under_way(tiny_llama: LoadedModel) -> None:
    params = {"grammar": grammar.regex_grammar("[a-z ]{40,60}"), "max_tokens": 70, **SAMPLED}
    alone = [run(tiny_llama, request([n + 5] * 9, **params))[0].tokens for n in range(5)]
    engine = bench(tiny_llama, pages=22, step_tokens=64)
    together = engine.run(*(request([n + 5] * 9, **params) for n in range(5)))
    assert [result.tokens for result in together] == alone
    assert sum(record.preemptions for record in engine.records) > 0


def test_unseeded_requests_differ(tiny: LoadedModel) -> None:
    results = run(tiny, *(request(PROMPT, temperature=1.0, max_tokens=20, ignore_eos=True) for _ in range(8)))
    assert len({result.tokens for result in results}) == 8


def test_parameters_that_leave_no_token_fail_the_request_alone(tiny_llama: LoadedModel) -> None:
    engine = bench(tiny_llama)
    none_left, fine = engine.run(
        request(PROMPT, allowed_token_ids=(5,), banned_token_ids=(5,)), request(PROMPT, ignore_eos=True)
    )
    assert "no token is left" in str(none_left.error)
    assert len(fine.tokens) == 32
    assert engine.core.running == 0
