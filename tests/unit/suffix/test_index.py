"""The indexes against brute force, and the compiled one against its twin."""

from __future__ import annotations

import os
import random
from array import array
from dataclasses import replace
from time import monotonic, sleep
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from outrider_serving.native.library import library
from outrider_serving.suffix.compiled import CompiledIndex, GivenBack
from outrider_serving.suffix.lookup import BREAK, MAX_MATCH, MAX_PLACES, Found, Look
from unit.suffix import oracle
from unit.suffix.conftest import Kind, compiled, twin

LONG = bool(os.environ.get("OUTRIDER_TEST_LONG"))
EVERY = Look(max_match=MAX_MATCH, places=MAX_PLACES, least=0.0)
"""So many places that none of a small log is missed."""

texts = st.lists(st.lists(st.integers(0, 6), min_size=1, max_size=60), min_size=1, max_size=5)
alike = st.lists(st.lists(st.integers(0, 2), min_size=1, max_size=20), min_size=1, max_size=5)
"""Texts of few tokens, so that many things followed each of them; all fit in one segment."""
looks = st.builds(
    Look,
    max_match=st.sampled_from([1, 2, 3, 4, 7, 16, 32, 64]),
    places=st.integers(1, MAX_PLACES),
    least=st.sampled_from([0.0, 0.1, 0.3, 0.5, 1.0]),
)


def filled(kind: Kind, texts: list[list[int]], first: int = 128, most: int = 128) -> Any:
    index = kind.make(first, most)
    for text in texts:
        index.extend(text)
        index.end()
    return index


def opened(kind: Kind, text: list[int], first: int = 128, most: int = 128) -> Any:
    index = kind.make(first, most)
    index.extend(text)
    return index


class TestBruteForce:
    """With fewer than 128 places of a token none is missed, and the answer is that of the definition."""

    @pytest.mark.parametrize("name", ["compiled", "twin"])
    @settings(max_examples=3000 if LONG else 300, deadline=None, derandomize=True)
    @given(seen=texts, look=looks, depth=st.integers(1, 12), data=st.data())
    def test_chains(
        self, name: str, seen: list[list[int]], look: Look, depth: int, data: st.DataObject
    ) -> None:
        kind = compiled() if name == "compiled" else twin()
        # The end is often one that was seen, so that long matches occur.
        source = data.draw(st.sampled_from(seen))
        cut = data.draw(st.integers(0, len(source)))
        own = data.draw(st.lists(st.integers(0, 6), max_size=20)) + source[max(0, cut - 20) : cut] or [0]
        places = sum(map(len, seen)) + len(own)
        if look.places < MAX_PLACES and places > 2 * look.places:
            look = Look(look.max_match, MAX_PLACES, look.least)
        history, text = filled(kind, seen), opened(kind, own)
        assert kind.look_up(text, [history], look, depth, depth) == oracle.look_up([seen], own, look, depth)
        assert kind.look_up(text, [text], look, depth, depth) == oracle.look_up([[own]], own, look, depth)
        both = kind.look_up(text, [text, history], look, depth, depth)
        assert both == oracle.look_up([[own], seen], own, look, depth)

    @pytest.mark.parametrize("name", ["compiled", "twin"])
    @settings(max_examples=1500 if LONG else 150, deadline=None, derandomize=True)
    @given(seen=alike, look=looks, depth=st.integers(1, 6), more=st.integers(1, 20), data=st.data())
    def test_trees(
        self, name: str, seen: list[list[int]], look: Look, depth: int, more: int, data: st.DataObject
    ) -> None:
        kind = compiled() if name == "compiled" else twin()
        source = data.draw(st.sampled_from(seen))
        own = data.draw(st.lists(st.integers(0, 2), max_size=5)) + source[: data.draw(st.integers(1, 9))]
        look = replace(look, places=MAX_PLACES)
        history, text, nodes = filled(kind, seen), opened(kind, own), depth + more
        for logs, known in (([history], [seen]), ([text], [[own]]), ([text, history], [[own], seen])):
            expected = oracle.look_up(known, own, look, depth, nodes)
            assert kind.look_up(text, logs, look, depth, nodes) == expected

    def test_over_many_segments(self, kind: Kind) -> None:
        """What follows a place beyond its segment is not known, so some paths are shorter; most are not."""
        draws, same, trials = random.Random(1), 0, 200 if LONG else 40
        for _ in range(trials):
            seen = [[draws.randrange(40) for _ in range(draws.randrange(1, 300))] for _ in range(8)]
            source = draws.choice(seen)
            cut = draws.randrange(len(source)) + 1
            own = source[max(0, cut - draws.randrange(1, 80)) : cut]
            found = kind.look_up(opened(kind, own), [filled(kind, seen)], EVERY, 9, 9)
            after = [text[at : at + len(found.tokens)] for text, at, _ in oracle.places(seen, own, EVERY)]
            assert not found.tokens or list(found.tokens) in after
            same += found == oracle.look_up([seen], own, EVERY, 9)
        assert same > 0.75 * trials

    def test_a_text_that_goes_on_over_segments(self, kind: Kind) -> None:
        draws = random.Random(2)
        own = draws.sample(range(1000), 500)
        text = opened(kind, own)
        for at in range(20, 480):
            text.extend([2000 + at, *own[at - 3 : at]])
            (token,) = kind.look_up(text, [text], EVERY, 1, 1).tokens
            assert token == own[at]


class TestTrees:
    def test_the_most_probable_continuations_come_first(self, kind: Kind) -> None:
        history = filled(kind, [[1, 2, 3], [1, 2, 4], [1, 2, 3], [1, 5, 6], [1, 2, 3]])
        found = kind.look_up(opened(kind, [9, 1]), [history], EVERY, 3, 6)
        assert found.tokens == (2, 3, 5, 4, 6)
        assert found.parents == (-1, 0, -1, 0, 2)
        assert kind.look_up(opened(kind, [9, 1]), [history], EVERY, 1, 6).tokens == (2, 5)
        assert kind.look_up(opened(kind, [9, 1]), [history], Look(least=0.3), 3, 6).tokens == (2, 3)


class TestTheSameFromBoth:
    """The compiled index and its twin, whatever is done with them: to the last bit, collisions and all."""

    @pytest.mark.parametrize("seed", range(60 if LONG else 12))
    def test_any_sequence_of_calls(self, seed: int) -> None:
        draws = random.Random(seed)
        vocabulary = draws.choice([2, 5, 50, 1 << 30])
        kinds = compiled(), twin()
        sizes = (128, draws.choice([128, 256, 1024]))
        logs = [kind.make(*sizes) for kind in kinds]
        heirs = [kind.make(*sizes) for kind in kinds]
        own = [kind.make(128, 256) for kind in kinds]
        for index in own:
            index.extend([0])
        recent = [0]
        for time in range(400):
            match draws.choice(
                ["extend", "extend", "end", "drop", "erase", "limit", "own", "look", "look", "look"]
            ):
                case "extend":
                    fresh = [draws.randrange(vocabulary) for _ in range(draws.randrange(1, 60))]
                    tokens = draws.choice([recent[-50:], fresh])
                    for index in logs:
                        index.extend(tokens, time)
                case "end":
                    for index in logs:
                        index.end()
                case "drop":
                    inherits = draws.random() < 0.5
                    first, second = [
                        index.drop(heir if inherits else None)
                        for index, heir in zip(logs, heirs, strict=True)
                    ]
                    assert (first is None) == (second is None)
                    if first is not None and second is not None:
                        assert [(t, list(x)) for t, x in first] == [(t, list(x)) for t, x in second]
                case "limit":
                    most = draws.choice([128, 256, 512, 1024])
                    for index in draws.choice([logs, heirs]):
                        index.limit(most)
                case "erase" if draws.random() < 0.2:
                    for index in logs:
                        index.end()
                    assert len({index.erase(time - 100) for index in logs}) == 1
                case "own":
                    more = [draws.randrange(vocabulary) for _ in range(draws.randrange(1, 9))]
                    recent += more
                    for index in own:
                        index.extend(more)
                case "look":
                    depth = draws.randrange(1, 12)
                    nodes = depth * draws.choice([1, 1, 3])
                    look = Look(
                        draws.choice([1, 3, 16, 64]), draws.randrange(1, 65), draws.choice([0, 0.1, 0.4])
                    )
                    a, b = (
                        kind.look_up(text, [text, log], look, depth, nodes)
                        for kind, text, log in zip(kinds, own, logs, strict=True)
                    )
                    assert a == b
                    if a.tokens and draws.random() < 0.7:
                        for index in own:
                            index.extend(a.tokens)
                        recent += a.tokens
            assert logs[0].size == logs[1].size
            assert heirs[0].size == heirs[1].size
        assert own[0].size == own[1].size


class TestLog:
    def test_nothing_is_found_in_nothing(self, kind: Kind) -> None:
        empty = kind.make(128, 128)
        assert kind.look_up(empty, [empty], Look(), 4, 4) == Found()
        text = opened(kind, [1, 2])
        assert kind.look_up(text, [empty, text], Look(), 4, 4) == Found()
        assert empty.drop() is None

    def test_a_text_ends_where_it_ends(self, kind: Kind) -> None:
        history = filled(kind, [[1, 2, 3], [4, 5]])
        assert kind.look_up(opened(kind, [1, 2]), [history], Look(), 8, 8).tokens == (3,)
        assert kind.look_up(opened(kind, [3]), [history], Look(), 8, 8).tokens == ()

    def test_what_is_dropped_is_not_proposed(self, kind: Kind) -> None:
        history = filled(kind, [[1, 2, 3], *([[7] * 30] * 8), [4, 5, 6]])
        assert kind.look_up(opened(kind, [1, 2]), [history], Look(), 8, 8).tokens == (3,)
        assert [(time, list(tokens)) for time, tokens in history.drop()] == [(0, [1, 2, 3])]
        assert kind.look_up(opened(kind, [1, 2]), [history], Look(), 8, 8).tokens == ()
        assert kind.look_up(opened(kind, [4, 5]), [history], Look(), 8, 8).tokens == (6,)

    def test_what_is_erased_is_not_proposed_and_nowhere_in_the_log(self, kind: Kind) -> None:
        history = kind.make(128, 256)
        for time, text in enumerate([[1, 2, 3], [4, 5, 6], list(range(100, 300)), [1, 2, 8]]):
            history.extend(text, time)
            history.end()
        assert history.erase(3) == 3 + 3 + 200 + MAX_MATCH  # which stand twice, as a segment began
        assert history.erase(3) == 0
        assert history.erase(0) == 0
        for end, expected in (([1, 2], (8,)), ([4, 5], ()), ([150, 151], ()), ([298], ())):
            assert kind.look_up(opened(kind, end), [history], Look(), 8, 8).tokens == expected

    def test_what_is_discarded_is_nothing(self, kind: Kind) -> None:
        for _ in range(20):
            filled(kind, [[1, 2, 3] * 200], 128, 1 << 14).discard()

    def test_what_takes_long_to_give_back_is_counted_until_it_is(self) -> None:
        kernels = library()
        assert kernels is not None
        given_back = GivenBack(kernels.suffix)
        index = CompiledIndex(kernels.suffix, given_back, 1 << 10, 1 << 16)
        index.extend(array("i", bytes(4 << 20)))
        size = index.size.bytes
        index.discard()
        assert given_back.bytes == size > 40 << 20
        ends = monotonic() + 5
        while given_back.bytes and monotonic() < ends:
            sleep(0.001)
        assert given_back.bytes == 0

    def test_breaks_match_nothing(self, kind: Kind) -> None:
        history = filled(kind, [[1], [2], [1], [3]])
        assert kind.look_up(opened(kind, [5, 1]), [history], Look(), 8, 8) == Found()
        assert BREAK < 0

    def test_its_size(self, kind: Kind) -> None:
        index = kind.make(128, 256)
        assert (index.size.tokens, index.size.bytes) == (0, 0)
        index.extend(range(100))
        index.end()
        assert index.size.tokens == 101
        one = index.size.bytes
        assert one == 128 * 44
        index.extend(array("i", range(1000)))
        assert index.size.bytes == one + 44 * 256 * 5
        index.drop()
        assert index.size.bytes == one + 44 * 256 * 5  # it is kept, until there is a larger one
        index.drop()
        assert index.size.bytes == 44 * 256 * 5
        index.drop()
        assert index.size.bytes == 44 * 256 * 4
        heir = kind.make(128, 256)
        index.drop(heir)
        assert (index.size.bytes, heir.size.bytes) == (44 * 256 * 3, 44 * 256)
        index.drop(heir)
        assert (index.size.bytes, heir.size.bytes) == (44 * 256, 44 * 256)
        heir.limit(1024)
        assert (heir.size.bytes, heir.size.tokens) == (0, 0)

    def test_a_million_tokens_take_a_quarter_of_a_suffix_tree(self) -> None:
        """282 MiB per million is what one takes that keeps 24 tokens deep."""
        index = compiled().make(1 << 10, 1 << 16)
        index.extend(array("i", bytes(4 << 20)))
        assert index.size.bytes < (1 << 20) * 282 / 4
