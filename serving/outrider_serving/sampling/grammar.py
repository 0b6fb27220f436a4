"""From what a request says about the form of its output to a grammar, or to a refusal that says why.

A grammar is a string in the language of llguidance, so that it can travel with a request; `sampling.matcher`
follows it token by token. This module is for the process that reads requests: it imports neither torch nor
a tokenizer. What it returns has been compiled once, over single bytes.

Every grammar forbids llguidance to force tokens: where only one text can follow it would otherwise allow only
the tokenizer's own way of spelling it, so that what is allowed would depend on more than the text.

Nobody's grammar may stall the server. llguidance limits most of what a grammar costs, `grammar_limits` the
rest. Within them the worst that we found compiles in about two seconds, without the interpreter's lock;
what is usual takes about a millisecond.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

from llguidance import LLMatcher, LLParserLimits, LLTokenizer, regex_to_lark

from outrider_serving.sampling.grammar_limits import MAX_BYTES, schema_excess

_HEAD = '%llguidance {"no_forcing": true}\n'

_JSON_OPTIONS = {
    # Models may fall into endless white space, which any JSON allows; this is enough to indent.
    "whitespace_pattern": r"[ \t\n\r]{1,64}",
    # All but \uXXXX: with it a name could be spelled so that a schema does not recognise it.
    "json_allowed_escapes": 'nrbtf\\"',
}

_STATES = 50_000
"""Most states of a parser, over all that it was asked: some 60 MB where it follows what is usual."""
_FUEL = 1_000_000
"""Most expressions that a parser makes for one mask: at most about 50 ms of a small machine's time, 150 ms
for the worst that we found."""
_LIMITS = LLParserLimits(max_lexer_states=_STATES, step_lexer_fuel=_FUEL, verbose_errors=False)
_REPLAY_LIMITS = LLParserLimits(
    max_lexer_states=_STATES, step_lexer_fuel=_FUEL, initial_lexer_fuel=1 << 62, verbose_errors=False
)
"""For a text that was followed before: until the first mask a parser has but its initial fuel to read it."""

_TOO_MANY = {
    "states": f"too many states (at most {_STATES})",
    "expressions": f"too many expressions for one token (at most {_FUEL})",
    "items": "too many rules that may come next",
}

_KEYWORDS = (
    "type, enum, const, anyOf, allOf, oneOf (of options that exclude each other), $ref (within the schema), "
    "properties, required, additionalProperties, patternProperties, minProperties, maxProperties, items, "
    "prefixItems, minItems, maxItems, minLength, maxLength, pattern, format (date-time, date, time, "
    "duration, email, hostname, ipv4, ipv6, uuid, uri), minimum, maximum, exclusiveMinimum, "
    "exclusiveMaximum, multipleOf"
)
_SYNTAX = (
    "a regular expression matches the whole output, in the syntax of Rust's regex: without look-around, "
    "back references and word boundaries; ^ and $ only at the ends"
)


class GrammarError(ValueError):
    """A grammar cannot be had or followed; the message says why and what is allowed."""


def json_schema_grammar(schema: Mapping[str, Any]) -> str:
    r"""The grammar of the JSON texts that a schema allows, without white space around them.

    They are some of those that JSON Schema 2020-12 allows: named properties come in the schema's order,
    numbers with bounds have no exponent, strings have no `\u` escapes, and at most 64 characters of white
    space stand together. A `format` is a form only: 29 February is a date of any year. Keywords that JSON
    Schema does not know are annotations and do nothing.

    Raises:
        GrammarError: a keyword or format is not supported, the schema is no schema, nothing can satisfy it,
            or it is too large.
    """
    try:
        text = json.dumps({**schema, "x-guidance": _JSON_OPTIONS}, ensure_ascii=False, allow_nan=False)
    except RecursionError as error:
        raise GrammarError("the schema cannot be used: it is nested too deep") from error
    except (TypeError, ValueError) as error:
        raise GrammarError(f"the schema cannot be used: it is not JSON: {error}") from error
    _check_size(text, "schema")
    if excess := schema_excess(schema):
        raise GrammarError(f"the schema cannot be used: {excess}")
    return _valid(f"start: %json {text}", "schema", f"allowed: {_KEYWORDS}")


def json_object_grammar() -> str:
    """The grammar of any JSON object; see `json_schema_grammar`."""
    return json_schema_grammar({"type": "object"})


def regex_grammar(pattern: str) -> str:
    r"""The grammar of the texts that a regular expression matches as a whole.

    It has the syntax of Rust's crate regex, but `\d` and `\w` are ASCII's, as in `pattern` of JSON Schema.

    Raises:
        GrammarError: the expression is empty, malformed, not supported, too large or matches nothing.
    """
    if not pattern:
        raise GrammarError("the regular expression is empty")
    # regex_to_lark would drop a last backslash, and make one line, so one comment, of several.
    if (len(pattern) - len(pattern.rstrip("\\"))) % 2:
        raise GrammarError("the regular expression cannot be used: it ends in a backslash")
    if "\n" in pattern and re.search(r"\(\?\w*x", pattern):
        raise GrammarError("the regular expression cannot be used: (?x) over several lines; use one line")
    _check_size(pattern, "regular expression")
    return _valid(f"start: /{regex_to_lark(pattern, 'dw')}/", "regular expression", _SYNTAX)


def choice_grammar(choices: Sequence[str]) -> str:
    """The grammar of some texts.

    Raises:
        GrammarError: there is no choice, one is no text or an empty one, or all together are too large.
    """
    if not choices or not all(isinstance(choice, str) and choice for choice in choices):
        raise GrammarError("choices must be at least one string, none of them empty")
    _check_size("".join(choices), "choices")
    # One terminal: as alternatives of a rule each choice would be a symbol of its own.
    return _valid(
        "start: CHOICE\nCHOICE: " + " | ".join(map(json.dumps, choices)), "choices", "allowed: strings"
    )


def compiled(grammar: str, tokenizer: LLTokenizer, text: Sequence[int] = ()) -> LLMatcher:
    """A parser behind a text, the beginning of its grammar; compiles without the interpreter's lock.

    Args:
        grammar: what to follow.
        tokenizer: of the tokens.
        text: tokens that another parser of the grammar has followed; about 3 microseconds each.

    Raises:
        GrammarError: it cannot be compiled, or the text not followed.
    """
    limits = _REPLAY_LIMITS if text else _LIMITS
    parser = LLMatcher(tokenizer, grammar, log_level=0, limits=limits)
    check(parser)
    if text:
        parser.try_consume_tokens(list(text))
        check(parser)
    return parser


def check(parser: LLMatcher) -> None:
    """Nothing, while a parser works.

    Raises:
        GrammarError: it has stopped for good, because a limit was reached or nothing can follow.
    """
    if parser.is_error():
        raise GrammarError(_reason(parser.get_error()))


def _valid(body: str, what: str, allowed: str) -> str:
    """The grammar with this body, after it was compiled and something was found that it can begin with."""
    grammar = _HEAD + body
    try:
        parser = compiled(grammar, _bytes())
        parser.compute_bitmask()
        check(parser)
    except GrammarError as error:
        raise GrammarError(f"the {what} cannot be used: {error}; {allowed}") from error
    return grammar


def _check_size(text: str, what: str) -> None:
    try:
        size = len(text.encode())
    except UnicodeEncodeError as error:
        raise GrammarError(f"the {what} cannot be used: half a surrogate pair is no text") from error
    if size > MAX_BYTES:
        raise GrammarError(f"the {what} cannot be used: {size} bytes, at most {MAX_BYTES} are allowed")


@cache
def _bytes() -> LLTokenizer:
    """A vocabulary of single bytes, which can spell what any other can."""
    return LLTokenizer("byte")


def _reason(message: str) -> str:
    """What llguidance says, without positions in the grammar and without quoting it."""
    if message.startswith("panic"):
        return "it is too large"
    if message.startswith("NoExtension"):
        return "nothing can match it"
    if limit := re.search(r"too many (states|expressions|items)", message, re.IGNORECASE):
        return f"a limit of the parser is reached: {_TOO_MANY[limit[1]]}"
    if "recursion limit exceeded" in message:
        return "it is nested too deep"
    if "oneOf constraints are not supported" in message:
        return "oneOf of options that do not exclude each other is not supported; use anyOf"
    message = re.split(r"\n +\d+ \| ", message, maxsplit=1)[0]
    message = re.sub(r"^(at )?\d+\(\d+\): ", "", message).removeprefix("failed to compile JSON schema: ")
    for before in ("(in regex): ", "\nerror: "):
        message = message.rpartition(before)[2]
    message = message.replace("Unimplemented keys:", "keywords that are not supported:")
    return " ".join(message.split())[:300]
