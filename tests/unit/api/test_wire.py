"""Answers have the shapes of OpenAI's, checked with the stock client's own types."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, Literal

import pytest
from openai.types import Completion, CompletionChoice, CompletionUsage
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.completion_choice import Logprobs

from outrider_serving.api.completion import Piece, Scored
from outrider_serving.api.encoding import encoded
from outrider_serving.api.records import Usage
from outrider_serving.api.tokens import Token
from outrider_serving.api.wire import ChatFormat, CompletionFormat, Frame, event, usage_object
from outrider_serving.engine.types import FinishReason

USAGE = Usage(7, 5, 3, 4, 2, 6, (2, 1, 1), (1, 1))
THE = Token(b" the", " the", special=False)
HALF = Token(b"\xe6\x97", None, special=False)
EOS = Token(b"<eos>", "<eos>", special=True)
LOGPROBS = (
    Scored(THE, 0, -0.5, ((THE, -0.5), (HALF, -1.5))),
    Scored(HALF, 4, -math.inf, ((THE, -0.25), (EOS, -2.0))),
)
PLAIN = Piece(0, "hi", (1,), (), 0.0)
SCORED = Piece(1, " the", (1, 2), LOGPROBS, 0.0)
LAST = Piece(0, "", (1,), (), 0.0, FinishReason.STOP)


class StreamedLogprobs(Logprobs):
    """As OpenAI sends it with echo: the client's type has no null, and the client does not check."""

    token_logprobs: list[float | None]  # type: ignore[assignment]
    top_logprobs: list[dict[str, float] | None] | None = None  # type: ignore[assignment]


class StreamedChoice(CompletionChoice):
    """As OpenAI sends it within a stream: the client's type has no null, and the client does not check."""

    finish_reason: Literal["stop", "length"] | None  # type: ignore[assignment]
    logprobs: StreamedLogprobs | None = None


class StreamedCompletion(Completion):
    choices: list[StreamedChoice]  # type: ignore[assignment]


def frame(**fields: Any) -> Frame:
    return Frame("id-1", "m", 1234, **fields)


def checked(model: type[Any], value: dict[str, Any]) -> Any:
    """As it is read on the other side; nothing that we send is unknown there but our own `speculation`."""
    read = model.model_validate_json(encoded(value), strict=True)
    unknown = _unknown(read)
    assert unknown <= {"speculation"}
    return read


def _unknown(value: Any) -> set[str]:
    if isinstance(value, list):
        return set().union(*map(_unknown, value))
    if not hasattr(value, "model_extra"):
        return set()
    inner = [getattr(value, name) for name in type(value).model_fields]
    return set(value.model_extra or {}).union(*map(_unknown, inner))


def whole_choices() -> list[Piece]:
    return [
        Piece(0, "hi", (1, 2), (), 0.0, FinishReason.LENGTH),
        Piece(1, " the", (1, 2), LOGPROBS, 0.0, FinishReason.STOP),
    ]


def test_a_whole_completion() -> None:
    answer = checked(Completion, CompletionFormat(frame()).whole(whole_choices(), USAGE))
    assert (answer.id, answer.model, answer.created, answer.object) == ("id-1", "m", 1234, "text_completion")
    assert [(choice.index, choice.text, choice.finish_reason) for choice in answer.choices] == [
        (0, "hi", "length"),
        (1, " the", "stop"),
    ]
    assert answer.choices[0].logprobs is None
    assert answer.choices[1].logprobs.to_dict() == {
        "tokens": [" the", r"bytes:\xe6\x97"],
        "token_logprobs": [-0.5, -9999.0],
        "top_logprobs": [
            {" the": -0.5, r"bytes:\xe6\x97": -1.5},
            {" the": -0.25, "<eos>": -2.0, r"bytes:\xe6\x97": -9999.0},
        ],
        "text_offset": [0, 4],
    }


def test_a_whole_chat() -> None:
    answer = checked(ChatCompletion, ChatFormat(frame()).whole(whole_choices(), USAGE))
    assert answer.object == "chat.completion"
    assert [(choice.index, choice.message.content, choice.finish_reason) for choice in answer.choices] == [
        (0, "hi", "length"),
        (1, " the", "stop"),
    ]
    assert {choice.message.role for choice in answer.choices} == {"assistant"}
    assert answer.choices[0].logprobs is None
    the, half = answer.choices[1].logprobs.content
    assert (the.token, the.logprob, the.bytes) == (" the", -0.5, list(b" the"))
    assert [(top.token, top.logprob, top.bytes) for top in the.top_logprobs] == [
        (" the", -0.5, list(b" the")),
        (r"\xe6\x97", -1.5, [0xE6, 0x97]),
    ]
    assert (half.token, half.logprob, half.bytes) == (r"\xe6\x97", -9999.0, [0xE6, 0x97])
    assert half.top_logprobs[1].bytes is None  # a special token is no part of the text


def test_no_likeliest_tokens_were_asked_for() -> None:
    piece = Piece(0, " the", (1,), (Scored(THE, 0, -0.5),), 0.0, FinishReason.STOP)
    answer = checked(Completion, CompletionFormat(frame()).whole([piece], USAGE))
    assert answer.choices[0].logprobs.top_logprobs is None
    answer = checked(ChatCompletion, ChatFormat(frame()).whole([piece], USAGE))
    assert answer.choices[0].logprobs.content[0].top_logprobs == []


def test_an_echoed_prompt_begins_without_a_logprob() -> None:
    logprobs = (Scored(EOS, 0, None), *LOGPROBS)
    (chunk,) = CompletionFormat(frame()).piece(Piece(0, " the", (), logprobs, 0.0))
    found = checked(StreamedCompletion, chunk).choices[0].logprobs
    assert found.token_logprobs == [None, -0.5, -9999.0]
    assert found.top_logprobs[0] is None


def test_a_stream_of_completions() -> None:
    spelling = CompletionFormat(frame(choices=2))
    assert list(spelling.opening()) == []
    chunks = [checked(StreamedCompletion, chunk) for chunk in stream(spelling, [PLAIN, SCORED, LAST])]
    assert [(c.choices[0].index, c.choices[0].text, c.choices[0].finish_reason) for c in chunks] == [
        (0, "hi", None),
        (1, " the", None),
        (0, "", "stop"),
    ]
    assert chunks[1].choices[0].logprobs.tokens == [" the", r"bytes:\xe6\x97"]
    assert {chunk.object for chunk in chunks} == {"text_completion"}


def test_a_stream_of_a_chat() -> None:
    spelling = ChatFormat(frame(choices=2))
    opened = [checked(ChatCompletionChunk, chunk).choices[0] for chunk in spelling.opening()]
    assert [(choice.index, choice.delta.role, choice.delta.content) for choice in opened] == [
        (0, "assistant", ""),
        (1, "assistant", ""),
    ]
    chunks = [checked(ChatCompletionChunk, chunk) for chunk in stream(spelling, [PLAIN, SCORED, LAST])]
    assert [(c.choices[0].index, c.choices[0].delta.content, c.choices[0].finish_reason) for c in chunks] == [
        (0, "hi", None),
        (1, " the", None),
        (0, None, "stop"),
    ]
    assert [item.token for item in chunks[1].choices[0].logprobs.content] == [" the", r"\xe6\x97"]
    assert chunks[2].choices[0].logprobs is None


def stream(spelling: CompletionFormat | ChatFormat, pieces: Sequence[Piece]) -> list[dict[str, Any]]:
    return [chunk for piece in pieces for chunk in spelling.piece(piece)]


@pytest.mark.parametrize("spelling", [CompletionFormat(frame()), ChatFormat(frame())])
def test_a_piece_that_shows_nothing_is_not_sent(spelling: CompletionFormat | ChatFormat) -> None:
    assert list(spelling.piece(Piece(0, "", (1, 2), (), 0.0))) == []


def test_logprobs_do_not_wait_for_text() -> None:
    piece = Piece(0, "", (2,), LOGPROBS[1:], 0.0)
    (chunk,) = ChatFormat(frame()).piece(piece)
    choice = checked(ChatCompletionChunk, chunk).choices[0]
    assert (choice.delta.content, len(choice.logprobs.content)) == ("", 1)
    assert len(CompletionFormat(frame()).piece(piece)) == 1


@pytest.mark.parametrize(
    ("spelling", "model"), [(CompletionFormat, StreamedCompletion), (ChatFormat, ChatCompletionChunk)]
)
def test_usage_comes_last_where_it_was_asked_for(spelling: Any, model: type[Any]) -> None:
    made = spelling(frame(include_usage=True))
    for chunk in [*made.opening(), *made.piece(PLAIN), *made.piece(LAST)]:
        assert chunk["usage"] is None
    assert all("usage" not in chunk for chunk in spelling(frame()).piece(PLAIN))
    last = checked(model, made.usage(USAGE))
    assert (last.choices, last.usage.completion_tokens, last.usage.total_tokens) == ([], 5, 12)


def test_usage() -> None:
    found = checked(CompletionUsage, usage_object(USAGE))
    assert found.prompt_tokens_details.cached_tokens == 6
    assert found.to_dict()["speculation"] == {
        "verification_steps": 3,
        "proposed_tokens": 4,
        "accepted_tokens": 2,
        "accepted_length": 0.6667,
    }
    positions = usage_object(USAGE, positions=True)["speculation"]
    assert positions["proposed_by_position"] == [2, 1, 1]
    assert positions["accepted_by_position"] == [1, 1]
    assert usage_object(Usage())["speculation"]["accepted_length"] == 0


def test_an_event_is_one_line() -> None:
    assert event({"text": "a\n\u2028é"}) == 'data: {"text":"a\\n\u2028é"}\n\n'.encode()
