"""OpenAI's response objects: whole answers, and the events of a stream."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from outrider_serving.api.completion import Piece, Scored
from outrider_serving.api.encoding import encoded
from outrider_serving.api.records import Usage
from outrider_serving.api.tokens import Token
from outrider_serving.engine.types import FinishReason

DONE = b"data: [DONE]\n\n"

LEAST_LOGPROB = -9999.0
"""What OpenAI says for a token without any probability: JSON has no infinity."""


def event(data: Mapping[str, Any]) -> bytes:
    """One server-sent event."""
    return b"data: " + encoded(data) + b"\n\n"


@dataclass(frozen=True, slots=True)
class Frame:
    """What all objects of one answer share.

    Attributes:
        id, model, created: as in OpenAI's objects; seconds since 1970.
        choices: how many.
        include_usage: the stream ends with its usage.
        speculation: usage tells what was proposed and accepted.
        positions: and also by position.
    """

    id: str
    model: str
    created: int
    choices: int = 1
    include_usage: bool = False
    speculation: bool = True
    positions: bool = False

    def usage(self, usage: Usage) -> dict[str, Any]:
        """What it tells of the usage."""
        return usage_object(usage, speculation=self.speculation, positions=self.positions)

    def whole(self, kind: str, choices: Iterable[dict[str, Any]], usage: Usage) -> dict[str, Any]:
        """An object that tells of the usage."""
        return {**self._fields(kind, choices), "usage": self.usage(usage)}

    def chunk(self, kind: str, choice: dict[str, Any]) -> dict[str, Any]:
        """An object of a stream that goes on; OpenAI's has a usage of null if the last one will have any."""
        return self._fields(kind, [choice]) | ({"usage": None} if self.include_usage else {})

    def _fields(self, kind: str, choices: Iterable[dict[str, Any]]) -> dict[str, Any]:
        return {
            "id": self.id,
            "object": kind,
            "created": self.created,
            "model": self.model,
            "choices": choices,
        }


def usage_object(usage: Usage, *, speculation: bool = True, positions: bool = False) -> dict[str, Any]:
    """OpenAI's usage, with our `speculation` beside its own fields where that is to be told."""
    told = {"speculation": _speculation(usage, positions)} if speculation else {}
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "prompt_tokens_details": {"cached_tokens": usage.cached_tokens},
        **told,
    }


def _speculation(usage: Usage, positions: bool) -> dict[str, Any]:
    speculation: dict[str, Any] = {
        "verification_steps": usage.verification_steps,
        "proposed_tokens": usage.proposed_tokens,
        "accepted_tokens": usage.accepted_tokens,
        "accepted_length": round(usage.accepted_length, 4),
    }
    if positions:
        speculation["proposed_by_position"] = list(usage.proposed_by_position)
        speculation["accepted_by_position"] = list(usage.accepted_by_position)
    return speculation


class WireFormat(Protocol):
    """How one endpoint spells an answer."""

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """The answer in one piece; `choices` in order, each of them whole.

        For `encoded` only, and once: the objects of the choices are made one by one when they are spelled,
        since all of them at once are so many that the garbage collector stalls every stream.
        """

    def opening(self) -> Sequence[dict[str, Any]]:
        """What a stream begins with, sent together with its first piece."""

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """What a stream sends for a piece; nothing for one that shows nothing."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """What a stream ends with when its usage was asked for."""


class CompletionFormat:
    """/v1/completions: whole answers and chunks have the same shape."""

    KIND = "text_completion"

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._frame.whole(self.KIND, map(_completion_choice, choices), usage)

    def opening(self) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        return ()

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        shows = piece.text or piece.logprobs or piece.finish_reason
        return [self._frame.chunk(self.KIND, _completion_choice(piece))] if shows else ()

    def usage(self, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._frame.whole(self.KIND, [], usage)


def _completion_choice(piece: Piece) -> dict[str, Any]:
    return {
        "index": piece.index,
        "text": piece.text,
        "logprobs": _completion_logprobs(piece.logprobs) if piece.logprobs else None,
        "finish_reason": piece.finish_reason,
    }


def _completion_logprobs(logprobs: Sequence[Scored]) -> dict[str, Any]:
    """Parallel lists; offsets are into the text of the choice.

    `top_logprobs` is null where no likeliest tokens were asked for. Otherwise it also has the token itself,
    so that it may have one entry more than was asked for; tokens that read the same share the likelier's.
    """
    top = [_likeliest(scored) for scored in logprobs]
    return {
        "tokens": [_completion_token(scored.token) for scored in logprobs],
        "token_logprobs": [_finite(scored.logprob) for scored in logprobs],
        "top_logprobs": top if any(top) else None,
        "text_offset": [scored.offset for scored in logprobs],
    }


def _likeliest(scored: Scored) -> dict[str, float | None] | None:
    if not scored.top:
        return None
    found: dict[str, float | None] = {}
    for token, logprob in (*scored.top, (scored.token, scored.logprob)):
        found.setdefault(_completion_token(token), _finite(logprob))
    return found


def _completion_token(token: Token) -> str:
    return f"bytes:{_escaped(token)}" if token.text is None else token.text


class ChatFormat:
    """/v1/chat/completions: messages, and deltas of one."""

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def __init__(self, frame: Frame) -> None:
        self._frame = frame

    def whole(self, choices: Sequence[Piece], usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._frame.whole(self.KIND, map(_chat_choice, choices), usage)

    def opening(self) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        opened = {"role": "assistant", "content": "", "refusal": None}
        return [self._delta(index, opened) for index in range(self._frame.choices)]

    def piece(self, piece: Piece) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        chunks = []
        if piece.text or piece.logprobs:
            chunks.append(self._delta(piece.index, {"content": piece.text}, piece.logprobs))
        if piece.finish_reason:
            chunks.append(self._delta(piece.index, {}, finish=piece.finish_reason))
        return chunks

    def usage(self, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._frame.whole(self.CHUNK, [], usage)

    def _delta(
        self,
        index: int,
        delta: dict[str, Any],
        logprobs: Sequence[Scored] = (),
        finish: FinishReason | None = None,
    ) -> dict[str, Any]:
        choice = {
            "index": index,
            "delta": delta,
            "logprobs": _chat_logprobs(logprobs),
            "finish_reason": finish,
        }
        return self._frame.chunk(self.CHUNK, choice)


def _chat_choice(choice: Piece) -> dict[str, Any]:
    return {
        "index": choice.index,
        "message": {"role": "assistant", "content": choice.text, "refusal": None},
        "logprobs": _chat_logprobs(choice.logprobs),
        "finish_reason": choice.finish_reason,
    }


def _chat_logprobs(logprobs: Sequence[Scored]) -> dict[str, Any] | None:
    if not logprobs:
        return None
    content = [
        _chat_token(scored.token, scored.logprob)
        | {"top_logprobs": [_chat_token(token, logprob) for token, logprob in scored.top]}
        for scored in logprobs
    ]
    return {"content": content, "refusal": None}


def _chat_token(token: Token, logprob: float | None) -> dict[str, Any]:
    """`bytes` of all tokens together are those of the text; null for a token that is no part of it."""
    return {
        "token": _escaped(token) if token.text is None else token.text,
        "logprob": _finite(logprob),
        "bytes": None if token.special else list(token.raw),
    }


def _escaped(token: Token) -> str:
    """Bytes that are no whole characters, as OpenAI spells them."""
    return "".join(f"\\x{byte:02x}" for byte in token.raw)


def _finite(logprob: float | None) -> float | None:
    return None if logprob is None else max(logprob, LEAST_LOGPROB)
