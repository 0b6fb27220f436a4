"""Compiled code gives the laws and the coupled tokens of the torch code, on every kind of CPU."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from outrider_serving.engine.types import SamplingParams
from outrider_serving.native.library import Library, usable
from outrider_serving.sampling import compiled
from outrider_serving.sampling.coupling import coupled_tokens
from outrider_serving.sampling.distribution import Cut, Distribution, cut
from outrider_serving.sampling.law import At, NoTokenLeftError, TokenLaw, distributions
from outrider_serving.sampling.noise import NoiseKey

INF, NAN = math.inf, math.nan
DTYPES = [torch.bfloat16, torch.float32, torch.float64]


@pytest.fixture(params=[variant.name for variant in usable()])
def kernels(request: pytest.FixtureRequest) -> Library:
    """Every kind of library that this machine can run."""
    return Library(next(variant for variant in usable() if variant.name == request.param))


@contextmanager
def using(kernels: Library | None) -> Iterator[None]:
    """What large vocabularies are computed with."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(compiled, "library", lambda: kernels)
        yield


def law(vocabulary: int, **values: object) -> TokenLaw:
    params = SamplingParams(99, **values)  # type: ignore[arg-type]
    return TokenLaw(params, (1, 2, 3), vocab_size=vocabulary, ends=frozenset({2, 4}))


def random_logits(seed: int, shape: Sequence[int], spread: float, kind: str) -> Tensor:
    """Normal ones; all of them, or some, on a coarse grid or ruled out."""
    made = torch.randn(*shape, generator=torch.Generator().manual_seed(seed), dtype=torch.float64) * spread
    match kind:
        case "grid":
            return made.div(spread / 2).round().mul(spread / 2)
        case "few left":
            ruled_out = torch.rand(shape, generator=torch.Generator().manual_seed(seed)) > 20 / shape[-1]
            ruled_out[..., 17] = False
            return made.masked_fill(ruled_out, -INF)
        case "one peak":
            made[..., shape[-1] // 2] += 50 * spread
    return made


def agree(found: Distribution, expected: Distribution, top_p: float = 1, min_p: float = 0) -> bool:
    """Whether the supports are equal; where not, a boundary must be so near that rounding decides."""
    if found.ids is None or expected.ids is None:
        assert found.ids is expected.ids
        assert_near(found.probs, expected.probs)
        return True
    both = min(len(found.probs), len(expected.probs))
    if len(found.probs) == len(expected.probs):
        assert found.ids.tolist() == expected.ids.tolist()
        assert_near(found.probs, expected.probs)
        return True
    longer = max(found, expected, key=lambda p: len(p.probs))
    share, ratio = float(longer.probs[:both].sum()), float(longer.probs[both] / longer.probs[0])
    assert len(longer.probs) == both + 1
    assert ratio == pytest.approx(min_p, rel=1e-12) or share >= top_p * (1 - 1e-12)
    return False


def assert_near(found: Tensor, expected: Tensor) -> None:
    """As near as 20,000 float64 are added up in any order (n eps), but for numbers near the least of them."""
    torch.testing.assert_close(found, expected, rtol=20_000 * 2.0**-53, atol=1e-300)
    assert torch.equal(found > 1e-290, expected > 1e-290)


cuts = st.builds(
    Cut,
    top_k=st.sampled_from([0, 0, 1, 2, 40, 3000]),
    top_p=st.one_of(st.just(1.0), st.floats(0.01, 0.9999), st.sampled_from([0.25, 0.5, 1 - 1e-12])),
    min_p=st.one_of(st.just(0.0), st.floats(0.001, 1.0), st.sampled_from([1e-300, 1e-9])),
)
temperatures = st.sampled_from([1e-300, 1e-3, 0.3, 0.8, 1.0, 2.0, 100.0])
sizes = st.sampled_from([4096, 4097, 5003, 8191, 16_384, 16_385, 20_000])
kinds = st.sampled_from(["all", "all", "grid", "few left", "one peak"])


def test_laws_are_those_of_the_reference(kernels: Library) -> None:
    near = 0

    @given(
        seed=st.integers(0, 2**31),
        size=sizes,
        spread=st.sampled_from([1e-3, 1.0, 3.0, 12.0, 300.0]),
        kind=kinds,
        dtype=st.sampled_from(DTYPES),
        rows=st.lists(st.tuples(temperatures, st.one_of(st.none(), cuts)), min_size=1, max_size=3),
    )
    def check(
        seed: int,
        size: int,
        spread: float,
        kind: str,
        dtype: torch.dtype,
        rows: list[tuple[float, Cut | None]],
    ) -> None:
        nonlocal near
        logits = random_logits(seed, [len(rows), size], spread, kind).to(dtype)
        degrees, wanted = zip(*rows, strict=True)
        z = logits.double()
        z = (z - z.amax(-1, keepdim=True)) / torch.tensor(degrees, dtype=torch.float64)[:, None]
        expected = cut(torch.softmax(z, -1), wanted)
        found = compiled.distributions(kernels, list(logits), degrees, wanted)
        assert found is not None
        for ours, theirs, one in zip(found, expected, wanted, strict=True):
            near += not agree(ours, theirs, *(() if one is None else (one.top_p, one.min_p)))

    check()
    assert near <= 1


@given(
    seed=st.integers(0, 2**31),
    kind=kinds,
    dtype=st.sampled_from([*DTYPES, torch.float16]),
    rows=st.lists(
        st.sampled_from(
            [
                {"temperature": 0.0},
                {"temperature": 0.8, "top_p": 0.95},
                {"temperature": 1.0},
                {"temperature": 0.8, "top_k": 50, "logit_bias": ((7, 3.0), (11, -100.0))},
                {"temperature": 1.3, "min_p": 0.01, "repetition_penalty": 1.4},
                {"temperature": 1.0, "frequency_penalty": 1.0, "top_p": 0.7},
                {"temperature": 1.0, "banned_token_ids": (17,), "min_tokens": 3},
                {"temperature": 1.0, "allowed_token_ids": (3, 17), "top_k": 40},
            ]
        ),
        min_size=1,
        max_size=5,
    ),
)
def test_rows_are_edited_as_for_the_reference(
    kernels: Library, seed: int, kind: str, dtype: torch.dtype, rows: list[dict[str, object]]
) -> None:
    logits = random_logits(seed, [len(rows), 4999], 3.0, kind).to(dtype)
    logits[:, 3] = 1.0  # something is left
    at: At = [(law(4999, **values), (5, 7)) for values in rows]
    before = logits.clone()
    with using(kernels):
        found = distributions(logits, at)
    with using(None):
        expected = distributions(logits, at)
    assert torch.equal(logits, before)
    for ours, theirs in zip(found, expected, strict=True):
        assert agree(ours, theirs)


def test_exponentials_are_right_to_the_last_bits(kernels: Library) -> None:
    """Of numbers so far below 0 that their sum adds nothing to that of 0."""
    x = np.concatenate(([0.0], np.linspace(-708, -45, 20_000)))
    found = compiled.distributions(kernels, [torch.from_numpy(x)], [1.0], [None])
    assert found is not None
    expected = np.exp(x.astype(np.longdouble)).astype(np.float64)
    assert np.max(np.abs(found[0].probs.numpy() - expected) / np.spacing(expected)) <= 1


def test_the_least_numbers_are_kept_until_they_are_0(kernels: Library) -> None:
    """Half the least number, which is what is left of the first logit, is rounded to 0."""
    logits = torch.full((1, 4100), -INF, dtype=torch.float64)
    logits[0, :7] = torch.tensor([-744.9, -744.0, -709.0, -730.0, -746.0, 0.0, 0.0])
    for wanted, left in ((Cut(top_k=40), [5, 6, 2, 3, 1]), (Cut(min_p=1e-318), [5, 6, 2, 3])):
        found = compiled.distributions(kernels, list(logits), [1.0], [wanted])
        assert found is not None
        assert agree(found[0], cut(torch.softmax(logits, -1), [wanted])[0])
        assert found[0].ids is not None
        assert found[0].ids.tolist() == left


def test_what_min_p_cuts_off_still_counts_for_a_share_of_top_k(kernels: Library) -> None:
    logits = torch.full((1, 5000), -9.0)
    logits[0, :11] = torch.tensor([0.0, *[-1.0] * 10])
    wanted = Cut(top_k=2000, top_p=0.9, min_p=0.01)
    found = compiled.distributions(kernels, list(logits), [1.0], [wanted])
    assert found is not None
    assert found[0].ids is not None
    assert found[0].ids.tolist() == list(range(11))
    assert agree(found[0], cut(torch.softmax(logits.double(), -1), [wanted])[0])


@pytest.mark.parametrize("equal", [4096, 4097, 30_000])
@pytest.mark.parametrize(
    "wanted", [Cut(top_k=301), Cut(top_p=0.25017), Cut(top_k=400, top_p=0.499), Cut(min_p=1.0)]
)
def test_among_equally_probable_tokens_the_lower_id_comes_first(
    kernels: Library, equal: int, wanted: Cut
) -> None:
    logits = torch.full((40_000,), -3.0, dtype=torch.bfloat16)
    logits[-equal:] = 5.0
    found = compiled.distributions(kernels, [logits], [0.01], [wanted])
    length = {301: 301, 400: 200}.get(wanted.top_k, equal if wanted.min_p else math.ceil(0.25017 * equal))
    assert found is not None
    assert found[0].ids is not None
    assert found[0].ids.tolist() == list(range(40_000 - equal, 40_000))[:length]
    assert found[0].probs.tolist() == pytest.approx([1 / length] * length)


@pytest.mark.parametrize("dtype", DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("threads", [1, 2, 3, 7])
def test_bits_depend_neither_on_neighbours_nor_on_threads_nor_on_the_type(
    kernels: Library, threads: int, dtype: torch.dtype
) -> None:
    """Numbers of bfloat16, of any type: together they are worth as many threads as there are."""
    logits = random_logits(7, [5, 400_001], 3.0, "all").bfloat16()
    degrees = [0.8, 1.0, 1.3, 1e-3, 2.0]
    wanted = [Cut(top_p=0.95), None, Cut(top_k=70, min_p=0.01), None, Cut(top_p=0.5)]
    keys = [NoiseKey(3, 0, position) for position in range(20)]

    def ask(rows: Sequence[int], dtype: torch.dtype) -> list[Distribution]:
        theirs = [logits[n].to(dtype) for n in rows]
        found = compiled.distributions(kernels, theirs, [degrees[n] for n in rows], [wanted[n] for n in rows])
        assert found is not None
        return found

    before = torch.get_num_threads()
    try:
        torch.set_num_threads(1)
        alone = [ask([n], torch.bfloat16)[0] for n in range(5)]
        tokens = [compiled.coupled_tokens(kernels, [alone[1].probs], [key])[0] for key in keys]
        torch.set_num_threads(threads)
        together = ask(range(5), dtype)
        assert compiled.coupled_tokens(kernels, [alone[1].probs] * 20, keys) == tokens
    finally:
        torch.set_num_threads(before)
    for ours, theirs in zip(together, alone, strict=True):
        assert ours.ids is None or torch.equal(ours.ids, theirs.ids)  # type: ignore[arg-type]
        assert torch.equal(ours.probs, theirs.probs)


@pytest.mark.parametrize("dtype", [*DTYPES, torch.float16])
@pytest.mark.parametrize(
    "broken",
    [
        {0: NAN},
        {16_500: NAN},
        {20_000: NAN},
        {16_500: INF},
        {20_000: INF},
        {0: NAN, 16_500: INF},
        {0: INF, 20_000: NAN},
        dict.fromkeys(range(20_001), -INF),
    ],
    ids=lambda broken: f"{list(broken.values())[:2]} at {list(broken)[:2]}",
)
@pytest.mark.parametrize("values", [{"temperature": 0.8, "top_p": 0.9}, {"temperature": 1.0}])
def test_where_nothing_is_left_that_is_said(
    kernels: Library, dtype: torch.dtype, broken: dict[int, float], values: dict[str, object]
) -> None:
    logits = random_logits(1, [3, 20_001], 3.0, "all").to(dtype)
    logits[1, list(broken)] = torch.tensor(list(broken.values()), dtype=dtype)
    at: At = [(law(20_001, **values), ())] * 3
    with using(kernels):
        with pytest.raises(NoTokenLeftError):
            distributions(logits, at)
        assert len(distributions(logits[[0, 2]], at[:2])) == 2
        with pytest.raises(ValueError, match="20000 logits where the vocabulary has 20001"):
            distributions(logits[:, :20_000], at)


def test_what_is_kept_owns_no_more_memory_than_it_needs(kernels: Library) -> None:
    logits = random_logits(1, [2, 20_001], 12.0, "all")
    found = compiled.distributions(kernels, list(logits), [1.0, 1.0], [Cut(top_k=3), None])
    assert found is not None
    assert found[0].ids is not None
    assert found[0].ids.untyped_storage().nbytes() == found[0].probs.untyped_storage().nbytes() == 24
    assert found[1].probs.untyped_storage().nbytes() < 8 * 20_100


@given(
    seed=st.integers(0, 2**64),
    size=sizes,
    spread=st.sampled_from([0.0, 1.0, 12.0, 300.0]),
    kind=kinds,
    rows=st.integers(1, 20),
)
def test_coupled_tokens_are_those_of_the_reference(
    kernels: Library, seed: int, size: int, spread: float, kind: str, rows: int
) -> None:
    logits = random_logits(seed % 2**31, [rows, size], spread, kind if spread else "all")
    ps = [Distribution(None, row) for row in torch.softmax(logits, -1)]
    keys = [NoiseKey(seed, row % 3, row) for row in range(rows)]
    with using(kernels):
        found = coupled_tokens(ps, keys)
    with using(None):
        assert found == coupled_tokens(ps, keys)
    assert all(p.probs[token] > 0 for p, token in zip(ps, found, strict=True))


def test_supports_and_whole_vocabularies_are_chosen_from_together(kernels: Library) -> None:
    whole = torch.softmax(random_logits(1, [2, 5000], 3.0, "all"), -1)
    ps = [
        Distribution(None, whole[0]),
        Distribution(torch.tensor([3]), torch.ones(1, dtype=torch.float64)),
        Distribution(None, whole[1]),
    ]
    keys = [NoiseKey(5, 0, n) for n in range(3)]
    with using(kernels):
        found = coupled_tokens(ps, keys)
    with using(None):
        assert found == coupled_tokens(ps, keys)


def test_compiled_code_is_for_large_vocabularies_on_cpus(kernels: Library) -> None:
    with using(kernels):
        assert compiled.kernels(torch.empty(2, 4096)) is kernels
        assert compiled.kernels(torch.empty(2, 4095)) is None
        assert compiled.kernels(torch.empty(2, 4096, device="meta")) is None
    with using(None):
        assert compiled.kernels(torch.empty(2, 4096)) is None


def test_rows_need_not_lie_side_by_side(kernels: Library) -> None:
    logits = random_logits(1, [5000, 2], 3.0, "all").T
    at: At = [(law(5000, temperature=0.8, top_p=0.9), ()), (law(5000, temperature=1.0), ())]
    keys = [NoiseKey(1, 0, 0)]
    with using(kernels):
        found = distributions(logits, at)
        strided = Distribution(None, torch.stack([found[1].probs] * 2, 1)[:, 0])
        assert coupled_tokens([strided], keys) == coupled_tokens([found[1]], keys)
    with using(None):
        for ours, theirs in zip(found, distributions(logits, at), strict=True):
            assert agree(ours, theirs)
