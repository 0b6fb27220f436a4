"""What of outputs was seen before."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.bench.coverage import WIDTH, Written, covered, examine, looked_up, windows

TOKENS = st.lists(st.integers(0, 2), max_size=40)


@given(st.lists(TOKENS, max_size=4), TOKENS, st.integers(1, 5))
def test_covered_tokens_are_those_of_windows_that_were_seen(
    stored: list[list[int]], output: list[int], width: int
) -> None:
    seen = frozenset(window for one in stored for window in windows(one, width))
    marks = [False] * len(output)
    for at in range(len(output) - width + 1):
        run = output[at : at + width]
        if any(run == one[n : n + width] for one in stored for n in range(len(one) - width + 1)):
            marks[at : at + width] = [True] * width
    assert covered(output, seen, width) == sum(marks)


def test_windows_are_all_runs() -> None:
    assert list(windows([1, 2, 3, 4], 3)) == [(1, 2, 3), (2, 3, 4)]
    assert not list(windows([1, 2], 3))


@given(TOKENS, TOKENS)
def test_a_lookup_gives_what_followed_the_longest_suffix_last(prompt: list[int], output: list[int]) -> None:
    right = 0
    for number, token in enumerate(output):
        text = prompt + output[:number]
        for length in range(len(text) - 1, 1, -1):
            ends = [end for end in range(length, len(text)) if text[end - length : end] == text[-length:]]
            if ends:
                right += text[ends[-1]] == token
                break
    assert looked_up(prompt, output) == right


def written(prompt: str, output: str) -> Written:
    """With a token for each character."""
    return Written(tuple(map(ord, prompt)), tuple(map(ord, output)))


def test_shares_of_what_was_seen() -> None:
    old, new = "abcdefghijklmnopqrstuvwxyz", "ZYXWVUTSRQ"
    found = examine([written("one", old)], [written("two", old[:20] + new)])
    assert (found.tokens, found.covered, found.looked_up, found.share) == (30, 20, 0, 20 / 30)


def test_runs_shorter_than_a_window_are_new() -> None:
    run = "abcdefghij"[: WIDTH - 1]
    assert examine([written("one", run + "X")], [written("two", run + "Y")]).covered == 0


@pytest.mark.parametrize("stored", [("a prompt", ""), ("", "so: a prompt!"), ("see a pr", "ompt")])
def test_prompts_that_were_stored_are_counted(stored: tuple[str, str]) -> None:
    assert examine([written(*stored)], [written("a prompt", "x"), written("another", "y")]).verbatim == 1
    assert examine([written("a promp", "x")], [written("a prompt", "x")]).verbatim == 0


def test_what_the_own_text_gives_is_reported() -> None:
    found = examine([], [written("abcdefgh", "abcdefgh")])
    assert (found.share, found.own_share) == (0.0, 6 / 8)
    assert examine([], []).own_share == examine([], []).share == 0.0
