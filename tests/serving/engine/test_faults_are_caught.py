"""Each fault is put into a shipped module: the named test passes without it, and fails with it.

(The faults of sampling and verification are in tests/unit/sampling.)
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest

from outrider_serving.engine.active import Turn
from outrider_serving.engine.residence import Residence
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.schedule.tables import PageTables
from outrider_serving.engine.target import batch, paged
from outrider_serving.engine.target.kv import KVStore
from outrider_serving.engine.target.native import decoder
from outrider_serving.models.loading import LoadedModel
from serving.engine import (
    test_greedy,
    test_lifecycle,
    test_paged,
    test_parameters,
    test_proposer_needs,
    test_seeded,
)
from serving.engine.support import reference


@dataclass(frozen=True)
class Models:
    """What guards need."""

    llama: LoadedModel
    mistral: LoadedModel

    def expected(self, loaded: LoadedModel) -> list[list[int]]:
        return [list(reference(loaded, p, test_greedy.TOKENS, eos=False)) for p in test_greedy.PROMPTS]


@pytest.fixture(scope="module")
def models(tiny_models: dict[str, LoadedModel]) -> Models:
    return Models(tiny_models["llama"], tiny_models["mistral"])


Guard = Callable[[Models], None]


def greedy(name: str, shape: str = "together") -> Guard:
    return lambda m: test_greedy.test_whoever_proposes(m.llama, m.expected(m.llama), name, shape)


def kept(m: Models) -> None:
    test_greedy.test_proposals_that_are_right_are_kept(m.llama, m.expected(m.llama))


def windows(m: Models) -> None:
    test_paged.test_every_node_sees_its_own_path(m.mistral, compiled=False)  # type: ignore[call-arg]


def paths(m: Models) -> None:
    test_paged.test_every_node_sees_its_own_path(m.mistral, compiled=True)  # type: ignore[call-arg]


def warm_cache(m: Models) -> None:
    plain = [list(test_seeded.run(m.llama, one)[0].tokens) for one in test_seeded.wanted()]
    test_seeded.test_a_warm_cache_and_another_order_change_nothing(m.llama, plain)


def wrapped(target: Any, name: str, change: Callable[[Any, Any], Any]) -> tuple[Any, str, Any]:
    """`target.name`, whose result is changed; `change` gets the result and the arguments."""
    original = getattr(target, name)
    return target, name, lambda *args, **how: change(original(*args, **how), args)


def last_slot_is_the_one_before(slots: Any, _: Any) -> Any:
    """Off by one: a token overwrites the keys and values of the one before it."""
    return np.concatenate([slots[:-1], slots[-2:-1]]) if len(slots) > 1 else slots


def one_token_is_taken_as_run(_: Any, args: Any) -> None:
    """Off by one: a request that begins with cached pages leaves out the token after them."""
    if args[1].computed:
        args[1].computed += 1


def window_by_slots(segment: batch.Segment, first: int, window: int | None) -> Any:
    """The window counts slots, so siblings push each other out of it."""
    ancestors = segment.ancestors if segment.ancestors is not None else np.tri(segment.count, dtype=bool)
    seen = np.concatenate([np.ones((segment.count, segment.context - first), dtype=bool), ancestors], 1)
    places = np.arange(first, segment.context + segment.count)
    if window is not None:
        seen &= places[None, :] > places[segment.context - first :, None] - window
    return seen


def commits_too_much(self: Sequence, tokens: Any) -> tuple[int, ...]:
    """Tokens after an end of sequence are kept."""
    within = tuple(tokens[: self.remaining])
    self.tokens.extend(within)
    ended = any(token in self.ends for token in within)
    self.finish_reason = "stop" if ended else "length" if self.remaining == 0 else None  # type: ignore[assignment]
    return within


visible = paged.visible


def window_too_wide(segment: batch.Segment, first: int, window: int | None) -> Any:
    """A token sees one more than its window."""
    return visible(segment, first, None if window is None else window + 1)


def moved_one_by_one(self: KVStore, sources: Any, targets: Any) -> None:
    """A token is read after another one was written over it."""
    for pair in self.pairs:
        for store in pair:
            for source, target in zip(reversed(sources), reversed(targets), strict=True):
                store[target] = store[source]


def without_the_last(ran: list[int], args: Any) -> list[int]:
    """Proposers are not told of the target's own token."""
    args[0].committed = args[0].committed[:-1]
    return ran


FAULTS: dict[str, tuple[tuple[Any, str, Any], Guard]] = {
    "a token overwrites the one before": (
        wrapped(batch, "slots_of", last_slot_is_the_one_before),
        greedy("oracle"),
    ),
    "a reused prefix is one token too long": (
        wrapped(PageTables, "begin", one_token_is_taken_as_run),
        warm_cache,
    ),
    "an accepted path stays where its nodes were": ((Turn, "moves", lambda _: []), greedy("bushy")),
    "a tree is run as a chain": ((batch, "_ancestors", lambda *_: None), greedy("bushy")),
    "compiled code runs a tree as a chain": ((decoder, "_paths", lambda _: None), paths),
    "windows count slots": ((paged, "visible", window_by_slots), windows),
    "windows are one too wide": (
        (paged, "visible", window_too_wide),
        windows,
    ),
    "keys and values are not moved as if read first": (
        (KVStore, "move", moved_one_by_one),
        lambda _: test_paged.test_moving_reads_before_it_writes(),
    ),
    "tenants share pages": (
        (PageNames, "salt", lambda *_: b""),
        lambda m: test_lifecycle.test_tenants_and_private_requests_share_no_pages(m.llama),
    ),
    "proposers miss the target's own token": (
        wrapped(Turn, "ran", without_the_last),
        kept,
    ),
    "hidden states are of the row before": (
        wrapped(Turn, "rows", lambda rows, _: [max(0, row - 1) for row in rows]),
        lambda m: test_proposer_needs.test_every_row_of_hidden_states_is_that_of_transformers(
            m.llama, "together"
        ),
    ),
    "pages without a proposer's layers are reused for it": (
        (Residence, "marks", property(lambda _: frozenset())),
        lambda m: test_proposer_needs.test_a_prefix_that_lacks_the_layers_of_the_arm_in_force_is_read_again(
            m.llama
        ),
    ),
    "tokens after an end are kept": (
        (Sequence, "commit", commits_too_much),
        lambda m: test_parameters.test_a_stop_token_inside_an_accepted_run_ends_it(m.llama, "greedy"),
    ),
    "logprobs are of the position before": (
        wrapped(Turn, "logit_rows", lambda rows, _: [rows[0], *rows[:-1]] if rows else rows),
        lambda m: test_parameters.test_logprobs_are_those_of_the_target_alone(m.llama, "greedy"),
    ),
}


@pytest.mark.parametrize("name", FAULTS)
def test_a_fault_is_caught(models: Models, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    (target, attribute, replacement), guard = FAULTS[name]
    guard(models)
    monkeypatch.setattr(target, attribute, replacement)
    with pytest.raises((AssertionError, BaseExceptionGroup)):
        guard(models)
