"""Each mistake that would change the law of the output is put into the shipped code, and a test must fail.

A fault replaces a function for the time of one test, which is called as it stands and must raise
AssertionError; without the fault it must pass.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
import torch

from outrider_serving.sampling import coupling, distribution, edits, law, rejection, verification
from outrider_serving.sampling.distribution import Cut, Distribution, residual
from outrider_serving.sampling.history import History
from outrider_serving.sampling.law import TokenLaw
from outrider_serving.sampling.noise import NoiseKey
from outrider_serving.sampling.proposal import Proposal
from outrider_serving.sampling.randomness import Randomness
from outrider_serving.sampling.reading import Reading
from outrider_serving.sampling.rejection import Candidate
from unit.sampling import (
    exhaustive,
    test_coupling,
    test_exactness,
    test_law,
    test_noise,
    test_verification,
    test_waiting,
)

Patch = pytest.MonkeyPatch


@dataclass
class Generous:
    """Accepts more often than it is told to."""

    source: Randomness

    def bernoulli(self, p: float) -> bool:
        return self.source.bernoulli(min(1.0, 1.05 * p))

    def categorical(self, weights: torch.Tensor) -> int:
        return self.source.categorical(weights)

    def draw(self, weights: torch.Tensor) -> torch.Tensor:
        return self.source.draw(weights)


def accepts_too_often(patch: Patch) -> None:
    real = rejection.sample
    patch.setattr(verification, "sample", lambda p, candidates, source: real(p, candidates, Generous(source)))


def draws_from_p_after_a_refusal(patch: Patch) -> None:
    patch.setattr(rejection, "residual", lambda r, q, token: r)


def takes_q_for_one_hot_after_a_refusal(patch: Patch) -> None:
    patch.setattr(rejection, "residual", lambda r, q, token: residual(r, None, token))


def does_not_renormalise_between_siblings(patch: Patch) -> None:
    def unnormalised(r: Distribution, q: Distribution | None, token: int) -> Distribution:
        whole = residual(r, q, token)
        return Distribution(r.ids, whole.probs * 0.9)

    patch.setattr(rejection, "residual", unnormalised)


def tries_every_sibling_against_p(patch: Patch) -> None:
    def sample(
        p: Distribution, candidates: Sequence[Candidate], randomness: Randomness
    ) -> Reading[tuple[int, int | None]]:
        yield []
        left = p
        for index, (x, q) in enumerate(candidates):
            if randomness.bernoulli(min(1.0, p.prob(x) / (1.0 if q is None else q.prob(x)))):
                return x, index
            left = residual(left, q, x)
        return left.token(randomness.categorical(left.probs)), None

    patch.setattr(verification, "sample", sample)


def forgets_that_siblings_are_drawn_without_replacement(patch: Patch) -> None:
    """Siblings keep the q of the first one, as if each had been drawn from it."""

    def q_of_the_first(self: Proposal, node: int) -> Distribution | None:
        first = self.q[self.children[self.parents[node]][0]]
        return first if first is not None and first.prob(self.tokens[node]) > 0 else self.q[node]

    patch.setattr(Proposal, "q_of", q_of_the_first)


def accepts_what_is_likely_enough(patch: Patch) -> None:
    real = rejection.sample

    def typical(
        p: Distribution, candidates: Sequence[Candidate], randomness: Randomness
    ) -> Reading[tuple[int, int | None]]:
        likely = [index for index, (x, _) in enumerate(candidates) if p.prob(x) > 0.3]
        if likely:
            return candidates[likely[0]][0], likely[0]
        return (yield from real(p, candidates, randomness))

    patch.setattr(verification, "sample", typical)


def keeps_a_drawn_token_by_its_own_confidence(patch: Patch) -> None:
    real = exhaustive.RandomTrees.__call__

    def confident(self: exhaustive.RandomTrees, text: tuple[int, ...], randomness: Randomness) -> Proposal:
        whole = real(self, text, randomness)
        first = whole.q_of(0) if len(whole) else None
        return whole if first is None or first.prob(whole.tokens[0]) > 0.4 else Proposal()

    patch.setattr(exhaustive.RandomTrees, "__call__", confident)


def parameters_see_the_committed_text_only(patch: Patch) -> None:
    real = TokenLaw.edit
    patch.setattr(TokenLaw, "edit", lambda self, path: real(self, ()))


def penalties_see_the_committed_text_only(patch: Patch) -> None:
    real = History.along
    patch.setattr(History, "along", lambda self, path: real(self, ()))


def penalties_count_a_token_of_the_path_once(patch: Patch) -> None:
    real = History.along
    patch.setattr(History, "along", lambda self, path: real(self, set(path)))


def biases_before_it_penalises(patch: Patch) -> None:
    def swapped(logits: torch.Tensor, wanted: Sequence[edits.Edit]) -> torch.Tensor:
        biased = edits.edited(logits, [edits.Edit(bias=edit.bias) for edit in wanted])
        return edits.edited(biased, [replace(edit, bias=None) for edit in wanted])

    patch.setattr(law, "edited", swapped)


def tempers_before_it_edits(patch: Patch) -> None:
    def tempered(logits: torch.Tensor, wanted: Sequence[edits.Edit]) -> torch.Tensor:
        return edits.edited(logits.double() / 1.7, wanted) * 1.7

    patch.setattr(law, "edited", tempered)


def masks_after_the_cut(patch: Patch) -> None:
    real = law.edited

    def unmasked(logits: torch.Tensor, wanted: Sequence[edits.Edit]) -> torch.Tensor:
        kept = real(logits, [replace(edit, mask=None) for edit in wanted]).topk(2).indices
        cut = torch.full(logits.shape, -math.inf, dtype=torch.float64).scatter(
            1, kept, logits.gather(1, kept)
        )
        masked = real(cut, wanted)
        return torch.where(masked.amax(-1, keepdim=True).isfinite(), masked, real(logits, wanted))

    patch.setattr(law, "edited", unmasked)


def draws_and_then_repairs_what_the_mask_forbids(patch: Patch) -> None:
    """A forbidden token is drawn, and replaced by the best one that is allowed."""
    real = verification.distributions

    def repaired(logits: torch.Tensor, at: law.At) -> list[Distribution]:
        masks = [each.edit(path).mask for each, path in at]
        with pytest.MonkeyPatch.context() as unmasked:
            edit = TokenLaw.edit
            unmasked.setattr(TokenLaw, "edit", lambda self, path: replace(edit(self, path), mask=None))
            free = real(logits, at)
        found = []
        for p, mask in zip(free, masks, strict=True):
            allowed = torch.ones_like(p.probs, dtype=torch.bool) if mask is None else mask
            probs = torch.where(allowed, p.probs, 0.0)
            probs[probs.argmax()] += 1 - probs.sum()
            found.append(Distribution(None, probs))
        return found

    patch.setattr(verification, "distributions", repaired)


def keeps_one_token_less_than_top_p_asks_for(patch: Patch) -> None:
    real = distribution._kept

    def shorter(top: Any, ids: Any, wanted: Cut, *, complete: bool) -> Distribution | None:
        kept = real(top, ids, wanted, complete=complete)
        if kept is None or kept.ids is None or len(kept.probs) == 1:
            return kept
        return Distribution(kept.ids[:-1], kept.probs[:-1] / kept.probs[:-1].sum())

    patch.setattr(distribution, "_kept", shorter)


def goes_on_after_the_end(patch: Patch) -> None:
    patch.setattr(TokenLaw, "ends_with", lambda self, token: False)


def takes_the_last_of_the_best(patch: Patch) -> None:
    def last(logits: torch.Tensor, at: law.At) -> list[int]:
        return [len(row) - 1 - int(row.flip(0).argmax()) for row in law._edited(logits, at)]

    patch.setattr(test_law, "best", last)


def reads_the_logits_before_a_node(patch: Patch) -> None:
    patch.setattr(verification._Walk, "logits", lambda walk, node: walk.row.root + max(0, node))


def uses_one_noise_for_a_whole_step(patch: Patch) -> None:
    patch.setattr(verification._Walk, "key", lambda walk, after: walk.row.noise)


def noise_without(**fixed: int) -> Callable[[Patch], None]:
    def fault(patch: Patch) -> None:
        real = coupling.exponentials

        def blind(keys: Sequence[NoiseKey], ids: torch.Tensor) -> torch.Tensor:
            return real([key._replace(**fixed) for key in keys], ids)

        patch.setattr(coupling, "exponentials", blind)

    fault.__name__ = f"noise_without_{'_'.join(fixed)}"
    return fault


def noise_of_few_bits(patch: Patch) -> None:
    def coarse(words: torch.Tensor) -> torch.Tensor:
        return -torch.log1p(-((words >> 39).double() + 0.5) * 2.0**-24)

    patch.setattr(test_noise, "_variates", coarse)


def proposers_couple_by_inversion(patch: Patch) -> None:
    """One uniform number a position: of the right law, but not what verification takes."""

    def inverted(ps: Sequence[Distribution], keys: Sequence[NoiseKey]) -> list[int]:
        tokens = []
        for p, key in zip(ps, keys, strict=True):
            u = math.exp(-float(coupling.exponentials([key], torch.tensor([0]))))
            tokens.append(p.token(int((p.probs.cumsum(0) < u).sum())))
        return tokens

    patch.setattr(coupling, "coupled_tokens", inverted)


def looks_at_one_row_after_the_other(patch: Patch) -> None:
    real = verification.together
    patch.setattr(verification, "together", lambda readings: [real([each])[0] for each in readings])


def rows_wait_together() -> None:
    with pytest.MonkeyPatch.context() as patch:
        test_waiting.test_verification_waits_as_often_for_many_rows_as_for_few("drawn", {}, 4, patch)


def exact(name: str, shape: str) -> Callable[[], None]:
    return lambda: test_exactness.test_each_parameter_keeps_its_law(name, shape)


def exact_pair(*pair: str) -> Callable[[], None]:
    return lambda: test_exactness.test_each_pair_of_parameters_keeps_its_law((pair[0], pair[1]))


def replayed(*pair: str) -> Callable[[], None]:
    return lambda: test_exactness.test_coupled_output_is_the_same_whatever_is_proposed((pair[0], pair[1]))


def coupled_law() -> None:
    test_coupling.test_coupled_outputs_have_the_law_of_the_target(exhaustive.nothing)


FAULTS: list[tuple[Callable[[Patch], None], Callable[[], None]]] = [
    (accepts_too_often, exact("hot", "chain")),
    (accepts_too_often, exact("hot", "chosen")),
    (draws_from_p_after_a_refusal, exact("hot", "chain")),
    (draws_from_p_after_a_refusal, exact("hot", "chosen")),
    (takes_q_for_one_hot_after_a_refusal, exact("hot", "chain")),
    (does_not_renormalise_between_siblings, exact("hot", "tree")),
    (tries_every_sibling_against_p, exact("hot", "tree")),
    (forgets_that_siblings_are_drawn_without_replacement, exact("hot", "tree")),
    (accepts_what_is_likely_enough, exact("hot", "chosen")),
    (keeps_a_drawn_token_by_its_own_confidence, exact("hot", "chain")),
    (parameters_see_the_committed_text_only, exact("grammar", "chain")),
    (parameters_see_the_committed_text_only, exact("min_tokens", "chain")),
    (
        parameters_see_the_committed_text_only,
        test_verification.TestGreedy().test_an_ending_token_is_not_accepted_before_min_tokens,
    ),
    (penalties_see_the_committed_text_only, exact("frequency", "chain")),
    (penalties_see_the_committed_text_only, exact("presence", "chosen")),
    (penalties_see_the_committed_text_only, replayed("top_p", "presence")),
    (
        penalties_count_a_token_of_the_path_once,
        test_verification.TestGreedy().test_a_frequency_penalty_ends_an_accepted_run_where_it_would_end_without_proposals,
    ),
    (biases_before_it_penalises, exact_pair("repetition", "bias")),
    (tempers_before_it_edits, exact_pair("hot", "presence")),
    (masks_after_the_cut, exact_pair("top_k", "grammar")),
    (draws_and_then_repairs_what_the_mask_forbids, exact("grammar", "chain")),
    (reads_the_logits_before_a_node, exact("hot", "tree")),
    (keeps_one_token_less_than_top_p_asks_for, exact("top_p", "chain")),
    (goes_on_after_the_end, exact("hot", "chain")),
    (takes_the_last_of_the_best, test_law.test_greedy_takes_the_lowest_of_the_best),
    (looks_at_one_row_after_the_other, rows_wait_together),
    (uses_one_noise_for_a_whole_step, replayed("hot", "bias")),
    (noise_without(position=0), coupled_law),
    (noise_without(seed=0), coupled_law),
    (noise_without(choice=0), test_coupling.test_tokens_of_other_choices_positions_and_seeds_differ),
    (noise_of_few_bits, lambda: test_noise.test_a_clock_of_any_rate_rings_first_as_often_as_it_should(1e-9)),
    (
        proposers_couple_by_inversion,
        test_verification.test_coupled_keeps_a_sampled_proposal_that_took_the_same_noise,
    ),
]


@pytest.mark.parametrize(
    "fault", range(len(FAULTS)), ids=[f"{n}-{fault.__name__}" for n, (fault, _) in enumerate(FAULTS)]
)
def test_a_fault_fails_the_test_that_guards_against_it(fault: int, monkeypatch: Patch) -> None:
    put_in, guard = FAULTS[fault]
    guard()
    put_in(monkeypatch)
    with pytest.raises(AssertionError):
        guard()
