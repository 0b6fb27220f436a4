"""From committed tokens to text: whole characters only, ending before a stop string."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_CONTEXT = 6
"""Prompt tokens decoded along with the first output tokens, so that these know whether they begin a text."""

_HALF = 3
"""Most bytes, so most tokens, of a character that is not complete."""

_MAX_HELD = 64
"""Tokens held back in the hope that they complete a character, before they are taken for broken text."""

_REPLACEMENT = "�"


class Detokenizer:
    """Decodes one request's output token by token.

    A token's text can depend on what stands before it (a leading space that a tokenizer drops at the very
    start of a text; a character spread over several tokens). So each new token is decoded together with the
    tokens of the last piece of text, and the text is what this adds. Text that ends in half a character is
    held back. Special tokens have no text.

    The pieces together are `decode(prompt + output)` less `decode(prompt)`. Where the prompt ends inside a
    character that the output completes, this character is the output's.
    """

    def __init__(self, tokenizer: PreTrainedTokenizerBase, prompt: Sequence[int]) -> None:
        """Begin after the given prompt."""
        self._tokenizer = tokenizer
        self._window, self._read = self._end(prompt)
        self._text = self._known = self._decode(self._window)
        self._whole = self._without_half(self._known)

    def push(self, token: int) -> str:
        """The text that a token completes; empty while a character is incomplete."""
        self._window.append(token)
        text = self._decode(self._window)
        if text == self._text and not self._decode([token, token]):
            self._window.pop()  # it has no text anywhere, and thousands of its kind may follow
            return ""
        self._text = text
        held = len(self._window) - self._read
        if text.endswith(_REPLACEMENT) and held <= _MAX_HELD:
            return ""
        return self._emit(text)

    def flush(self) -> str:
        """What is still held back, with a replacement character for half a character. Nothing may follow."""
        return self._emit(self._text)

    def _emit(self, text: str) -> str:
        """What the text adds to the known one; where it changes that, a half character is now whole."""
        new = text[len(self._known if text.startswith(self._known) else self._whole) :]
        if new:
            self._window = self._window[self._read :]
            self._read = len(self._window)
            self._text = self._known = self._whole = self._decode(self._window)
        return new

    def _end(self, prompt: Sequence[int]) -> tuple[list[int], int]:
        """The prompt's last tokens, and how many of them come before a character that it ends inside of.

        The first one is not inside a character either: where bytes are tokens, some tokenizers make no text
        of a whole run of them because of one.
        """
        for more in range(_HALF + 1):
            window = list(prompt[-_CONTEXT - more :])
            read = len(window) - self._half(window)
            if not self._decode(window[:read]).startswith(_REPLACEMENT):
                break
        return window, read

    def _half(self, tokens: list[int]) -> int:
        """How many tokens at the end hold a character that is not complete; 0 where that explains nothing."""
        for count in range(min(_HALF, len(tokens)) + 1):
            if not self._decode(tokens[: len(tokens) - count]).endswith(_REPLACEMENT):
                return count
        return 0

    def _without_half(self, text: str) -> str:
        """The text of the prompt's last tokens without the character that it ends inside of."""
        before = self._decode(self._window[: self._read])
        if not text.startswith(before):
            return before
        return before + text[len(before) :].rstrip(_REPLACEMENT)

    def _decode(self, tokens: list[int]) -> str:
        text = self._tokenizer.decode(tokens, skip_special_tokens=True, clean_up_tokenization_spaces=False)
        assert isinstance(text, str)
        return text


class StopMatcher:
    """Lets text pass up to the first stop string, and holds back what may become one.

    The stop string that is complete first ends the text, the longest one where several end at the same
    character; so the result does not depend on how the text was cut into pieces. One that is complete within
    text that came with `armed` false is text like any other.
    """

    def __init__(self, stops: Sequence[str]) -> None:
        """Take the stop strings, none of them empty."""
        self._stops = tuple(stops)
        self._held = ""
        self._passed = 0
        """How many of the characters in `_held` no stop string may end at."""
        self.stopped = False

    def push(self, text: str, *, armed: bool = True) -> str:
        """The text that may be shown now; after it `stopped` says whether a stop string was found."""
        self._held += text
        if not armed:
            self._passed = len(self._held)
        matches = [(at + len(stop), at) for stop in self._stops if (at := self._find(stop)) >= 0]
        if matches:
            self.stopped = True
            _, cut = min(matches)
            shown, self._held = self._held[:cut], ""
            return shown
        return self._show(len(self._held) - self._partial())

    def flush(self) -> str:
        """What was held back, when the text ends for another reason."""
        return self._show(len(self._held))

    def _find(self, stop: str) -> int:
        """Where the first stop string begins that ends after what has passed; -1 for none."""
        return self._held.find(stop, max(0, self._passed - len(stop) + 1))

    def _show(self, count: int) -> str:
        shown, self._held = self._held[:count], self._held[count:]
        self._passed = max(0, self._passed - count)
        return shown

    def _partial(self) -> int:
        """Length of the longest end of the text that begins a stop string."""
        longest = min(len(self._held), max((len(stop) for stop in self._stops), default=1) - 1)
        for length in range(longest, 0, -1):
            if any(stop.startswith(self._held[-length:]) for stop in self._stops):
                return length
        return 0
