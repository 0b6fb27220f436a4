"""With a seed the output is a function of the request alone: speculation changes no token of it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.models.loading import LoadedModel
from outrider_serving.settings import NgramSettings, Proposer
from serving.engine import proposers
from serving.engine.support import NONE, bench, building, request, run, sampled
from serving.engine.test_greedy import PROMPTS, PROPOSERS, SHAPES, TOKENS, Texts

HOT: dict[str, Any] = {"temperature": 1.0}
SETTINGS: list[dict[str, Any]] = [
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 1.3, "top_k": 20, "min_p": 0.02},
    {"temperature": 1.0, "frequency_penalty": 1.5, "presence_penalty": -0.5, "repetition_penalty": 1.2},
    {"temperature": 0.9, "logit_bias": ((31, 4.0), (11, -100.0)), "banned_token_ids": (5, 6)},
    {"temperature": 1.0, "min_tokens": 9, "ignore_eos": False, "stop_token_ids": tuple(range(200, 260))},
    {"temperature": 1.0, "allowed_token_ids": tuple(range(40, 90))},
]


def wanted(more: dict[str, Any] | None = None) -> list[Any]:
    """One request for each prompt, each with other parameters; the same ones at every call."""
    return [
        request(prompt, **{"max_tokens": TOKENS, "ignore_eos": True, "seed": 11 * n, **how, **(more or {})})
        for how in SETTINGS
        for n, prompt in enumerate(PROMPTS)
    ]


@pytest.fixture(scope="session")
def plain(tiny: LoadedModel) -> Texts:
    """Outputs with speculation off, each request alone."""
    off = {"speculation": NONE}
    return [list(run(tiny, one)[0].tokens) for one in wanted(off)]


@pytest.mark.parametrize(("name", "shape"), sampled(PROPOSERS, SHAPES))
def test_whoever_proposes(tiny: LoadedModel, plain: Texts, name: str, shape: str) -> None:
    known = [[*one.prompt, *out] for one, out in zip(wanted(), plain, strict=True)]
    engine = bench(
        tiny,
        Proposer(max_depth=5),
        build=building(PROPOSERS[name](known)),
        proposer_bytes=1 << 20,
        **SHAPES[shape],
    )
    assert [list(result.tokens) for result in engine.run(*wanted())] == plain
    if name in ("oracle", "bushy"):
        assert sum(row.accepted for record in engine.records for row in record.rows) > 0


@given(
    prompt=st.lists(st.integers(2, 319), min_size=1, max_size=6).map(lambda phrase: phrase * 6),
    seed=st.integers(-(2**63), 2**63 - 1),
    temperature=st.sampled_from([0.3, 1.0, 1.8]),
    top_p=st.sampled_from([0.3, 0.9, 1.0]),
    ngram=st.tuples(st.integers(1, 4), st.integers(1, 12)),
)
def test_any_request(
    tiny: LoadedModel, prompt: list[int], seed: int, temperature: float, top_p: float, ngram: tuple[int, int]
) -> None:
    how: Any = {"seed": seed, "temperature": temperature, "top_p": top_p}
    proposer = Proposer(max_depth=ngram[1], ngram=NgramSettings(min_match=ngram[0], max_match=4))
    off, on = bench(tiny, proposer).run(request(prompt, speculation=NONE, **how), request(prompt, **how))
    assert on.tokens == off.tokens


def test_a_warm_cache_and_another_order_change_nothing(tiny: LoadedModel, plain: Texts) -> None:
    engine = bench(tiny, max_running=4)
    for order in (1, -1):
        results = engine.run(*wanted()[::order])[::order]
        assert [list(result.tokens) for result in results] == plain
    assert sum(row.reused for record in engine.records for row in record.rows) > 0


def test_a_proposer_that_takes_the_same_noise_is_accepted_more(tiny_llama: LoadedModel) -> None:
    """The proposer's laws are not the target's, but the same noise favours the same tokens."""
    accepted = []
    for kind in (proposers.Drawn, proposers.DrawnByItself):
        engine = bench(tiny_llama, Proposer(max_depth=4), build=building(kind(320, width=1)))
        engine.run(*(request([n + 2], max_tokens=60, seed=5, **HOT) for n in range(8)))
        rows = [row for record in engine.records for row in record.rows]
        accepted.append(sum(row.accepted for row in rows) / sum(row.proposed for row in rows))
    assert accepted[0] > 2 * accepted[1]


def test_choices_differ_and_repeat(tiny: LoadedModel) -> None:
    def choices(seed: int | None) -> list[tuple[int, ...]]:
        group = [request(PROMPTS[0], seed=seed, choice=n, group="call", **HOT) for n in range(6)]
        return [result.tokens for result in run(tiny, *group)]

    first, again, unseeded, unseeded_again = choices(3), choices(3), choices(None), choices(None)
    assert len(set(first)) == 6
    assert first == again
    assert len({*first, *unseeded, *unseeded_again}) == 18


def test_unseeded_neighbours_change_nothing(tiny: LoadedModel) -> None:
    fixed = [
        request(PROMPTS[n % 4], temperature=n % 2, seed=n, max_tokens=20, ignore_eos=True) for n in range(8)
    ]
    alone = [run(tiny, one)[0].tokens for one in fixed]
    for _ in range(2):
        noise = [request(PROMPTS[n % 4], max_tokens=15 + n, ignore_eos=True, **HOT) for n in range(6)]
        mixed = [one for pair in zip(fixed, [*noise, None, None], strict=True) for one in pair if one]
        results = dict(zip((one.id for one in mixed), run(tiny, *mixed, max_running=5), strict=True))
        assert [results[one.id].tokens for one in fixed] == alone
