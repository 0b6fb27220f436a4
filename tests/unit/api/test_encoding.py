"""An answer spelled in parts is the same JSON."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api import encoding
from outrider_serving.api.encoding import BATCH, encoded, parts

leaves = st.none() | st.integers() | st.floats(allow_nan=False, allow_infinity=False) | st.text(max_size=3)
values = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(st.text(max_size=2), inner, max_size=4),
)


def scored(count: int) -> dict[str, Any]:
    tokens = [f"té{number}" for number in range(count)]
    return {"tokens": tokens, "top_logprobs": [{token: -0.5, "choices": -1.5} for token in tokens]}


@given(st.dictionaries(st.text(max_size=2), values, max_size=4), st.lists(values, max_size=3))
def test_the_parts_are_the_json_of_the_whole(answer: dict[str, Any], choices: list[Any]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(encoding, "BATCH", 2)
        whole = answer | {"choices": choices}
        assert "".join(parts(whole)) == json.dumps(whole, ensure_ascii=False, separators=(",", ":"))


@pytest.mark.parametrize("count", [0, 1, BATCH, BATCH + 1, 10 * BATCH])
def test_an_answer_with_logprobs_reads_back_as_it_was(count: int) -> None:
    answer = {
        "id": "é",
        "choices": [{"index": 0, "logprobs": scored(count)}, {"logprobs": None}],
        "usage": {},
    }
    assert json.loads(encoded(answer)) == answer


def test_choices_are_made_when_their_turn_comes() -> None:
    made: list[int] = []

    def choice(index: int) -> dict[str, Any]:
        made.append(index)
        return {"index": index, "logprobs": None}

    spelled = iter(parts({"id": "x", "choices": map(choice, range(9)), "usage": None}))
    while '"index":' not in next(spelled):
        pass
    assert made == [0]
    choices = json.loads(encoded({"choices": map(choice, range(3))}))["choices"]
    assert [each["index"] for each in choices] == [0, 1, 2]


def test_no_part_has_more_than_a_batch_of_tokens() -> None:
    answer = {"choices": [{"logprobs": scored(25 * BATCH)}, {"logprobs": {"content": [{}] * 25 * BATCH}}]}
    longest = len(json.dumps(scored(BATCH)["top_logprobs"]))
    assert max(map(len, parts(answer))) <= 2 * longest


def test_what_json_has_no_number_for_is_an_error_and_not_sent() -> None:
    with pytest.raises(ValueError, match="Out of range float"):
        encoded({"choices": [], "usage": float("nan")})
