"""OpenAI's response objects: whole answers, and the events of a stream."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, Protocol

from outrider_serving.engine.types import FinishReason, Usage

DONE = b"data: [DONE]\n\n"


def event(data: Any) -> bytes:
    """One server-sent event."""
    return b"data: " + json.dumps(data, ensure_ascii=False, separators=(",", ":")).encode() + b"\n\n"


def usage_object(usage: Usage) -> dict[str, Any]:
    """OpenAI's usage, with our `speculation` beside its own fields."""
    return {
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        "speculation": {
            "verification_steps": usage.verification_steps,
            "proposed_tokens": usage.proposed_tokens,
            "accepted_tokens": usage.accepted_tokens,
        },
    }


class WireFormat(Protocol):
    """How one endpoint spells an answer."""

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        """The answer in one piece."""

    def opening(self) -> Sequence[dict[str, Any]]:
        """What a stream begins with, sent together with its first text."""

    def piece(self, text: str, finish: FinishReason | None) -> Sequence[dict[str, Any]]:
        """What a stream sends for new text, for its end, or for both."""

    def usage(self, usage: Usage) -> dict[str, Any]:
        """What a stream ends with when its usage was asked for."""


class _Frame:
    """The fields that every object of one answer shares."""

    def __init__(self, identifier: str, model: str, created: int, *, include_usage: bool = False) -> None:
        self._fields: dict[str, Any] = {"id": identifier, "created": created, "model": model}
        # With usage asked for, OpenAI sends it as null in every chunk but the last.
        self._pending_usage: dict[str, Any] = {"usage": None} if include_usage else {}

    def _object(self, kind: str, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {**self._fields, "object": kind, "choices": choices, **more}


class CompletionFormat(_Frame):
    """/v1/completions: whole answers and chunks have the same shape."""

    KIND = "text_completion"

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._object(self.KIND, [self._choice(text, finish)], usage=usage_object(usage))

    def opening(self) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        return ()

    def piece(self, text: str, finish: FinishReason | None) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        return [self._object(self.KIND, [self._choice(text, finish)], **self._pending_usage)]

    def usage(self, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._object(self.KIND, [], usage=usage_object(usage))

    @staticmethod
    def _choice(text: str, finish: FinishReason | None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": None, "finish_reason": finish}


class ChatFormat(_Frame):
    """/v1/chat/completions: messages, and deltas of one."""

    KIND = "chat.completion"
    CHUNK = "chat.completion.chunk"

    def whole(self, text: str, finish: FinishReason, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        message = {"role": "assistant", "content": text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": finish}
        return self._object(self.KIND, [choice], usage=usage_object(usage))

    def opening(self) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        return [self._delta({"role": "assistant", "content": "", "refusal": None}, None)]

    def piece(self, text: str, finish: FinishReason | None) -> Sequence[dict[str, Any]]:
        """See WireFormat."""
        chunks = [self._delta({"content": text}, None)] if text else []
        return [*chunks, self._delta({}, finish)] if finish else chunks

    def usage(self, usage: Usage) -> dict[str, Any]:
        """See WireFormat."""
        return self._object(self.CHUNK, [], usage=usage_object(usage))

    def _delta(self, delta: dict[str, Any], finish: FinishReason | None) -> dict[str, Any]:
        choice = {"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}
        return self._object(self.CHUNK, [choice], **self._pending_usage)
