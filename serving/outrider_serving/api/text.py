"""Text to tokens: prompts and conversations, as the model's own tokenizer and chat template spell them."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

from jinja2 import TemplateSyntaxError

from outrider_serving.api.completion import Echo
from outrider_serving.api.detokenize import Detokenizer
from outrider_serving.api.errors import ApiError, invalid
from outrider_serving.api.longest import longest_token
from outrider_serving.api.schema import Body, CompletionRequest, Message
from outrider_serving.api.tokens import Vocabulary
from outrider_serving.api.turns import Turns
from outrider_serving.api.wording import shown
from outrider_serving.engine.options import DEFAULT_MAX_WAITING

NO_TEMPLATE = (
    "This model has no chat template, so that it cannot answer conversations: use /v1/completions, or give "
    "a template: spec.model.chatTemplate of the SpeculativeModel, or `outrider serve --chat-template FILE`."
)


_MESSAGE_SIZE = 50
"""Characters of text that take as long as what a template does with one message, whatever its text."""

_ECHOED_TOKEN_SIZE = 30
"""Characters of text that take as long to encode as one token takes to be decoded by itself."""


class TemplateError(ValueError):
    """A chat template that is not a valid template; the message says where."""


class TextEncoder:
    """Encodes prompts for one model, off the event loop.

    All the work happens in one thread: a fast tokenizer must not be used by two threads at once, and a
    large prompt takes long enough to stall every stream if it ran on the event loop. Tenants share it fairly
    (`Turns`); where too many wait, the methods that need the thread raise QueueFullError.
    """

    def __init__(
        self,
        tokenizer: Any,
        *,
        vocab_size: int,
        chat_template: str | None = None,
        eos_token_ids: Collection[int] = (),
        max_waiting: int = DEFAULT_MAX_WAITING,
    ) -> None:
        """Take the tokenizer of a model.

        Args:
            tokenizer: transformers'.
            vocab_size: how many token ids the model knows.
            chat_template: replaces the tokenizer's own.
            eos_token_ids: what the model's texts end with, beside the tokenizer's own end of sequence.
            max_waiting: how many may wait for the thread.

        Raises:
            TemplateError: the template is malformed.
        """
        own = {tokenizer.eos_token_id} - {None}
        self.vocabulary = Vocabulary(tokenizer)
        self.vocab_size = vocab_size
        self.eos_token_ids = frozenset(own.union(eos_token_ids))
        self._tokenizer = tokenizer
        self._template = chat_template
        self._has_template = bool(chat_template or tokenizer.chat_template)
        self._longest_token = longest_token(tokenizer)
        self._turns = Turns("tokenizer", max_waiting)
        if self._has_template:
            self._check_syntax()

    def least_tokens(self, body: Body) -> int:
        """How many tokens a body's prompt has at least, known without encoding it; 0 where nothing is.

        Nothing is known of a conversation: its template may leave parts of it out.
        """
        if not isinstance(body, CompletionRequest):
            return 0
        if not isinstance(body.prompt, str):
            return len(body.prompt)
        return -(-len(body.prompt.encode()) // self._longest_token) if self._longest_token else 0

    async def encode_body(self, body: Body, tenant: str) -> tuple[int, ...]:
        """The tokens of whatever a body asks to continue; ApiError (400) if there are none, or bad ones."""
        if isinstance(body, CompletionRequest):
            return await self.encode(body.prompt, tenant)
        return await self.encode_chat(body.messages, tenant)

    async def encode(self, prompt: str | Sequence[int], tenant: str) -> tuple[int, ...]:
        """The prompt's tokens, with the special tokens that the tokenizer adds; ids are taken as they are."""
        if not prompt:  # before the tokenizer's own special tokens hide it
            raise _empty("prompt")
        if isinstance(prompt, str):
            prompt = await self._turns.run(tenant, len(prompt), self._encode_text, prompt)
        if not prompt:
            raise _empty("prompt")
        check_ids(prompt, self.vocab_size, "prompt")
        return tuple(prompt)

    async def encode_chat(self, messages: Sequence[Message], tenant: str) -> tuple[int, ...]:
        """The conversation's tokens, up to where the assistant's answer starts."""
        if not self._has_template:
            raise invalid(NO_TEMPLATE, param="messages", code="no_chat_template")
        # OpenAI renamed the system role for newer models; templates know the old name.
        turns = [
            {"role": "system" if message.role == "developer" else message.role, "content": message.content}
            for message in messages
        ]
        size = sum(_MESSAGE_SIZE + len(message.content) for message in messages)
        ids = await self._turns.run(tenant, size, self._encode_turns, turns)
        if not ids:
            raise _empty("messages")
        check_ids(ids, self.vocab_size, "messages")
        return tuple(ids)

    async def echo(
        self, prompt: str | Sequence[int], tokens: Sequence[int], tenant: str, *, offsets: bool
    ) -> Echo:
        """The prompt as it is echoed; `tokens` are those that it was encoded to.

        A string is echoed as it came, ids as the text that they decode to. Where the tokens spell a string
        otherwise (the tokenizer changes what it encodes), their offsets are those of their own spelling.
        """
        if isinstance(prompt, str) and not offsets:
            return Echo(prompt)
        text, begins = await self._turns.run(tenant, _ECHOED_TOKEN_SIZE * len(tokens), self._decoded, tokens)
        return Echo(prompt if isinstance(prompt, str) else text, begins if offsets else None)

    def close(self) -> None:
        """End the thread."""
        self._turns.close()

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

    def _decoded(self, tokens: Sequence[int]) -> tuple[str, tuple[int, ...]]:
        """The text of tokens from its very start, and where in it each of them begins."""
        detokenizer = Detokenizer(self._tokenizer, ())
        text, offsets = "", []
        for token in tokens:
            offsets.append(len(text))
            text += detokenizer.push(token)
        return text + detokenizer.flush(), tuple(offsets)


def check_ids(ids: Collection[int], vocab_size: int, param: str) -> None:
    """ApiError (400) naming `param` if one of the ids is not a token of the model."""
    low, high = min(ids, default=0), max(ids, default=0)
    if low < 0 or high >= vocab_size:
        raise invalid(
            f"{param}: token id {shown(low if low < 0 else high)} is outside the model's vocabulary "
            f"(0 to {vocab_size - 1}).",
            param,
            "invalid_token",
        )


def _empty(param: str) -> ApiError:
    return invalid(f"{param}: the prompt is empty; at least one token is needed.", param, "empty_prompt")
