"""Text to tokens: prompts and conversations, as the model's own tokenizer and chat template spell them."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jinja2 import TemplateSyntaxError

from outrider_serving.api.errors import ApiError, invalid
from outrider_serving.api.schema import Message
from outrider_serving.api.wording import shown

NO_TEMPLATE = (
    "This model has no chat template, so that it cannot answer conversations: use /v1/completions, or give "
    "a template: spec.model.chatTemplate of the SpeculativeModel, or `outrider serve --chat-template FILE`."
)


class TemplateError(ValueError):
    """A chat template that is not a valid template; the message says where."""


class TextEncoder:
    """Encodes prompts for one model, off the event loop.

    All the work happens in one thread: a fast tokenizer must not be used by two threads at once, and a
    large prompt takes long enough to stall every stream if it ran on the event loop.
    """

    def __init__(self, tokenizer: Any, *, vocab_size: int, chat_template: str | None = None) -> None:
        """`tokenizer` is transformers'; `chat_template` replaces its own. TemplateError if malformed."""
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._template = chat_template
        self._has_template = bool(chat_template or tokenizer.chat_template)
        self._executor = ThreadPoolExecutor(max_workers=1, thread_name_prefix="tokenizer")
        if self._has_template:
            self._check_syntax()

    async def encode(self, prompt: str | Sequence[int]) -> tuple[int, ...]:
        """The prompt's tokens, with the special tokens that the tokenizer adds; ids are taken as they are."""
        if not prompt:  # before the tokenizer's own special tokens hide it
            raise _empty("prompt")
        if isinstance(prompt, str):
            prompt = await self._in_thread(self._encode_text, prompt)
        return self._checked(prompt, "prompt")

    async def encode_chat(self, messages: Sequence[Message]) -> tuple[int, ...]:
        """The conversation's tokens, up to where the assistant's answer starts."""
        if not self._has_template:
            raise invalid(NO_TEMPLATE, param="messages", code="no_chat_template")
        # OpenAI renamed the system role for newer models; templates know the old name.
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        return self._checked(await self._in_thread(self._encode_turns, turns), "messages")

    def close(self) -> None:
        """End the thread."""
        self._executor.shutdown(wait=False, cancel_futures=True)

    async def _in_thread(self, work: Any, argument: Any) -> Sequence[int]:
        result: Sequence[int] = await asyncio.get_running_loop().run_in_executor(
            self._executor, work, argument
        )
        return result

    def _encode_text(self, text: str) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer(text).input_ids
        return ids

    def _encode_turns(self, turns: list[dict[str, str]]) -> Sequence[int]:
        try:
            return self._render(turns)
        except Exception as error:
            # A template is code of the model's author, which refuses a conversation by raising.
            raise invalid(
                f"messages: the model's chat template refuses this conversation: {str(error)[:500]}",
                param="messages",
                code="chat_template_error",
            ) from error

    def _render(self, turns: list[dict[str, str]]) -> Sequence[int]:
        ids: Sequence[int] = self._tokenizer.apply_chat_template(
            turns,
            chat_template=self._template,
            add_generation_prompt=True,
            # Tokenizes without adding a second BOS to the template's own.
            tokenize=True,
            return_dict=False,
            # Text that spells a control token stays text: no message can forge another's turn.
            sanitize_control_tokens=True,
        )
        return ids

    def _check_syntax(self) -> None:
        try:
            self._render([{"role": "user", "content": "x"}])
        except TemplateSyntaxError as error:
            raise TemplateError(f"line {error.lineno}: {error.message}") from error
        except Exception:
            # A well-formed template may refuse this conversation, and accept others.
            return

    def _checked(self, ids: Sequence[int], param: str) -> tuple[int, ...]:
        if not ids:
            raise _empty(param)
        low, high = min(ids), max(ids)
        if low < 0 or high >= self._vocab_size:
            wrong = low if low < 0 else high
            raise invalid(
                f"{param}: token id {shown(wrong)} is outside the model's vocabulary "
                f"(0 to {self._vocab_size - 1}).",
                param,
                "invalid_token",
            )
        return tuple(ids)


def _empty(param: str) -> ApiError:
    return invalid(f"{param}: the prompt is empty; at least one token is needed.", param, "empty_prompt")
