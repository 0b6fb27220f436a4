"""The tokens that a grammar allows, against what may follow by a definition of its own."""

from __future__ import annotations

import contextlib
import random
import re
from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from transformers import PreTrainedTokenizerBase

from outrider_serving.sampling import grammar as grammar_module
from outrider_serving.sampling.grammar import (
    GrammarError,
    choice_grammar,
    json_object_grammar,
    json_schema_grammar,
    regex_grammar,
)
from outrider_serving.sampling.matcher import GrammarCompiler, Matcher
from unit.sampling.grammar_support import (
    BOS,
    BYTES,
    COMPILER,
    ENDS,
    EOS,
    SECOND_EOS,
    TOKENIZER,
    VOCABULARY,
    tokens_of,
    walk,
)

# What is allowed, exactly: languages with few texts, all of which can be listed.


def check_every_step(matcher: Matcher, language: set[bytes], rng: random.Random) -> None:
    """Along a random path the mask is what the listed texts say, for every token of the model."""
    text = b""
    while True:
        mask = matcher.mask().tolist()
        assert len(mask) == VOCABULARY
        for token in range(VOCABULARY):
            if token in ENDS:
                expected = text in language
            elif token < 320 and BYTES[token]:
                expected = any(whole.startswith(text + BYTES[token]) for whole in language)
            else:
                expected = False
            assert mask[token] == expected, (text, token)
        token = rng.choice([t for t in range(VOCABULARY) if mask[t]])
        matcher.advance([token])
        if token in ENDS:
            assert text in language
            return
        text += BYTES[token]


@given(
    choices=st.lists(
        st.text(min_size=1, max_size=6) | st.text("abthe c", min_size=1), min_size=1, max_size=6
    ),
    rng=st.randoms(use_true_random=False),
)
def test_choices_allow_exactly_their_beginnings(choices: list[str], rng: random.Random) -> None:
    language = {choice.encode() for choice in choices}
    check_every_step(COMPILER.matcher(choice_grammar(choices)), language, rng)


Expression = tuple[str, frozenset[str]]
"""A regular expression, and all texts that it matches."""


def _larger(inner: st.SearchStrategy[Expression]) -> st.SearchStrategy[Expression]:
    def joined(left: Expression, right: Expression) -> Expression:
        return left[0] + right[0], frozenset(a + b for a in left[1] for b in right[1])

    def either(left: Expression, right: Expression) -> Expression:
        return f"(?:{left[0]}|{right[0]})", left[1] | right[1]

    def optional(part: Expression) -> Expression:
        return f"(?:{part[0]})?", part[1] | {""}

    def twice(part: Expression) -> Expression:
        return f"({part[0]}){{1,2}}", part[1] | joined(part, part)[1]

    pairs = st.tuples(inner, inner)
    larger = st.one_of(
        pairs.map(lambda pair: joined(*pair)),
        pairs.map(lambda pair: either(*pair)),
        inner.map(optional),
        inner.map(twice),
    )
    return larger.filter(lambda expression: len(expression[1]) <= 100)


EXPRESSIONS = st.recursive(
    st.sampled_from(
        [
            ("a", frozenset({"a"})),
            ("[ab]", frozenset({"a", "b"})),
            ("[^b-\U0010ffff\x00-`]", frozenset({"a"})),
            ("é🦦", frozenset({"é🦦"})),
        ]
    ),
    _larger,
    max_leaves=5,
)


@given(
    expression=EXPRESSIONS,
    anchors=st.sampled_from(["", "^", "$", "^$"]),
    rng=st.randoms(use_true_random=False),
)
def test_expressions_allow_exactly_what_can_still_match(
    expression: Expression, anchors: str, rng: random.Random
) -> None:
    pattern, texts = expression
    anchored = f"{anchors.rstrip('$')}(?:{pattern}){anchors.lstrip('^')}"
    matcher = COMPILER.matcher(regex_grammar(anchored))
    check_every_step(matcher, {text.encode() for text in texts}, rng)


@pytest.mark.parametrize(
    "pattern",
    [
        r"\d{1,3}(\.\d{1,3}){3}",
        r"[A-Z][a-z]+ (the|a) .{0,9}",
        r"é+🦦?[^\W1-9]",
        r"[\d_]\D\\d",
        r"(?i)hey|no",
        r"a/b\\/[/]",
        r'"\w*"',
        "line\nfeed",
        r"[^\n]{3}",
        r"(a|b)*abb",
    ],
)
def test_walks_end_in_text_that_the_expression_matches(pattern: str) -> None:
    grammar, rng, ended = regex_grammar(pattern), random.Random(0), 0
    for _ in range(20):
        text = walk(COMPILER.matcher(grammar), rng)
        if text is not None:
            assert re.fullmatch(pattern, text.decode(), re.ASCII), text
            ended += 1
    assert ended > 10


# Asking changes nothing; committing does.

SCHEMA = {
    "type": "object",
    "properties": {"name": {"type": "string", "maxLength": 3}, "age": {"type": "integer", "minimum": 1}},
    "required": ["name"],
    "additionalProperties": False,
}
PATH = st.lists(st.sampled_from([*tokens_of('{"name":1,a }'), BOS, EOS, SECOND_EOS, 330]), max_size=6)
GRAMMARS = [
    json_schema_grammar(SCHEMA),
    json_object_grammar(),
    regex_grammar(r"(\{|name|a*)*"),
    choice_grammar(['{"name"', '{"n', "{{", "a"]),
]


@given(
    grammar=st.sampled_from(GRAMMARS),
    steps=st.lists(st.tuples(st.lists(PATH, max_size=4), st.integers(0, 10**6)), max_size=6),
)
def test_masks_of_any_paths_are_those_of_a_fresh_matcher(
    grammar: str, steps: Sequence[tuple[list[list[int]], int]]
) -> None:
    matcher, committed = COMPILER.matcher(grammar), list[int]()
    for paths, choice in steps:
        for path in (*paths, []):
            assert torch.equal(matcher.mask(path), mask_after(grammar, committed, path))
        allowed = matcher.mask().nonzero().flatten().tolist()
        if not allowed:
            return
        token = allowed[choice % len(allowed)]
        matcher.advance([token])
        committed.append(token)


def mask_after(grammar: str, committed: list[int], path: list[int]) -> torch.Tensor:
    """The mask by committing token after token, each of them only where the mask allows it."""
    matcher = COMPILER.matcher(grammar)
    for token in (*committed, *path):
        mask = matcher.mask()
        if not mask[token]:
            return torch.zeros(VOCABULARY, dtype=torch.bool)
        matcher.advance([token])
    return matcher.mask()


def test_committing_part_of_a_path_goes_on_from_there() -> None:
    matcher = COMPILER.matcher(choice_grammar(["abc", "abd", "b"]))
    a, b, c, d = tokens_of("abcd")
    assert matcher.mask([a, b, c])[EOS]
    matcher.advance([a])
    matcher.advance([b, d])
    assert matcher.mask()[EOS]


# Ends, and tokens that are no text.


def test_all_ends_are_allowed_where_the_text_may_end() -> None:
    matcher = COMPILER.matcher(regex_grammar("ab?"))
    assert not matcher.mask()[list(ENDS)].any()
    (a, b) = tokens_of("ab")
    may = matcher.mask([a])
    assert may[list(ENDS)].all()
    assert may[b]
    assert set(matcher.mask([a, b]).nonzero().flatten().tolist()) == ENDS


@pytest.mark.parametrize("end", sorted(ENDS))
def test_nothing_follows_an_end(end: int) -> None:
    matcher = COMPILER.matcher(regex_grammar("a*"))
    (a,) = tokens_of("a")
    assert not matcher.mask([a, end]).any()
    assert matcher.mask([a])[a]
    matcher.advance([a, end])
    assert not matcher.mask().any()
    assert not matcher.mask([a]).any()
    with pytest.raises(ValueError, match="does not allow"):
        matcher.advance([a])


def test_special_and_surplus_tokens_are_never_text() -> None:
    mask = COMPILER.matcher(regex_grammar("(?s:.)*")).mask()
    assert not mask[BOS]
    assert not mask[320:].any()
    assert mask[[*ENDS]].all()
    assert int(mask.sum()) > 100


@pytest.mark.parametrize("tokens", [[EOS], [BOS], [330], tokens_of("ac"), [*tokens_of("ab"), EOS, EOS]])
def test_forbidden_tokens_are_not_committed(tokens: list[int]) -> None:
    matcher = COMPILER.matcher(choice_grammar(["ab"]))
    before = matcher.mask()
    with pytest.raises(ValueError, match="does not allow"):
        matcher.advance(tokens)
    assert torch.equal(matcher.mask(), before)
    matcher.advance([*tokens_of("ab"), EOS])


# Limits, and models that cannot.


def test_a_path_that_reaches_a_limit_leaves_the_matcher_where_it_was() -> None:
    matcher = COMPILER.matcher(regex_grammar("((((a{1,50}){1,50}){1,50}){1,50})"))
    (a,) = tokens_of("a")
    matcher.advance([a])
    before = matcher.mask()
    with pytest.raises(GrammarError, match="too many"):
        list(map(matcher.mask, ([a] * length for length in range(200))))
    assert torch.equal(matcher.mask(), before)
    matcher.advance([a])


LIMITED = {
    "a schema": json_schema_grammar(
        {"type": "array", "items": {"type": "string", "pattern": "^.*[A-Z].{0,60}$"}}
    ),
    "an expression": regex_grammar("(.*a.{500}b.*){20}"),
}


@pytest.fixture
def limit(monkeypatch: pytest.MonkeyPatch) -> Callable[[int, int], None]:
    """Lets parsers have fewer states, and fewer expressions for a mask."""

    def lower(states: int, expressions: int) -> None:
        for name, initial in (("_LIMITS", None), ("_REPLAY_LIMITS", 1 << 62)):
            limits = LLParserLimits(
                max_lexer_states=states,
                step_lexer_fuel=expressions,
                initial_lexer_fuel=initial,
                verbose_errors=False,
            )
            monkeypatch.setattr(grammar_module, name, limits)

    return lower


@pytest.fixture
def made(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """The texts' lengths that parsers are made behind, in order."""
    lengths = list[int]()

    def counted(grammar: str, tokenizer: LLTokenizer, text: Sequence[int] = ()) -> LLMatcher:
        lengths.append(len(text))
        return grammar_module.compiled(grammar, tokenizer, text)

    monkeypatch.setattr("outrider_serving.sampling.matcher.compiled", counted)
    return lengths


def text_of(grammar: str, length: int, seed: int) -> list[int]:
    """A random text, written under the usual limits."""
    matcher, rng, text = COMPILER.matcher(grammar), random.Random(seed), list[int]()
    while len(text) < length:
        mask = matcher.mask()
        mask[list(ENDS)] = False
        text.append(rng.choice(mask.nonzero().flatten().tolist()))
        matcher.advance(text[-1:])
    return text


def failure(grammar: str, text: list[int], ask: Callable[[Matcher, list[int]], None], run: int = 1) -> Any:
    """Where a text fails that is committed in runs, and how; None where it does not."""
    matcher = COMPILER.matcher(grammar)
    for start in range(0, len(text), run):
        ahead = text[start : start + run]
        try:
            ask(matcher, ahead)
            matcher.advance(ahead)
        except GrammarError as error:
            return start, str(error)
    return None


def ask_as_verification(matcher: Matcher, ahead: list[int]) -> None:
    for length in range(len(ahead)):
        matcher.mask(ahead[:length])


def ask_again(matcher: Matcher, ahead: list[int]) -> None:
    """And go on where it is only the first answer that fails."""
    with contextlib.suppress(GrammarError):
        matcher.mask()
    ask_as_verification(matcher, ahead)
    ask_as_verification(matcher, ahead)


def ask_elsewhere(matcher: Matcher, ahead: list[int]) -> None:
    """As a proposer may that looks at masks along paths of its own, before and after verification does."""
    look_around(matcher)
    ask_as_verification(matcher, ahead)
    look_around(matcher)


def look_around(matcher: Matcher) -> None:
    rng, path = random.Random(0), list[int]()
    with contextlib.suppress(GrammarError):
        while len(path) < 5 and (allowed := matcher.mask(path)[2:300].nonzero().flatten().tolist()):
            path.append(2 + rng.choice(allowed))


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize(("states", "expressions"), [(400, 10**6), (600, 700), (10**5, 700)])
@pytest.mark.parametrize("name", LIMITED)
def test_where_a_text_fails_depends_on_nothing_but_the_text(
    limit: Callable[[int, int], None], name: str, states: int, expressions: int, seed: int
) -> None:
    grammar = LIMITED[name]
    text = text_of(grammar, 400, seed)
    limit(states, expressions)
    plain = failure(grammar, text, ask_as_verification)
    assert plain is not None
    at, reason = plain
    assert re.search(r"too many (states|expressions for one token) \(at most \d+\)", reason)
    for ask in (ask_as_verification, ask_again, ask_elsewhere):
        for run in (1, 3, 8):
            assert failure(grammar, text, ask, run) == (at - at % run, reason), (ask, run)


def test_a_text_goes_on_where_only_what_was_worked_out_for_it_is_too_much(
    limit: Callable[[int, int], None], made: list[int]
) -> None:
    grammar = LIMITED["a schema"]
    text = text_of(grammar, 400, 0)
    made.clear()
    limit(1000, 10**6)
    assert failure(grammar, text, ask_as_verification) is None
    assert len(made) > 2
    assert made == sorted(set(made))


def test_a_text_near_what_any_parser_can_follow_is_not_read_again_for_each_token(
    limit: Callable[[int, int], None], made: list[int]
) -> None:
    grammar = LIMITED["a schema"]
    text = text_of(grammar, 400, 0)
    made.clear()
    limit(400, 10**6)
    assert failure(grammar, text, ask_as_verification) is not None
    assert all(later - sooner >= 16 for sooner, later in pairwise(made[1:]))


def test_no_token_is_named_in_an_error() -> None:
    matcher = COMPILER.matcher(choice_grammar(["ab"]))
    with pytest.raises(ValueError, match="does not allow") as raised:
        matcher.advance([330, 331])
    assert not re.search("33[01]", str(raised.value))


def test_a_dead_end_is_an_error_and_not_an_empty_mask() -> None:
    loop = {"$defs": {"a": {"$ref": "#/$defs/a"}}}
    grammar = json_schema_grammar({"type": "array", "items": {"$ref": "#/$defs/a"}, "minItems": 1, **loop})
    matcher = COMPILER.matcher(grammar)
    with pytest.raises(GrammarError, match="nothing can match"):
        matcher.mask(tokens_of("["))


def test_what_is_no_grammar_is_an_error() -> None:
    with pytest.raises(GrammarError):
        COMPILER.matcher("start: nowhere")


@pytest.mark.parametrize(
    ("tokenizer", "vocabulary", "ends", "reason"),
    [
        (TOKENIZER, 320, frozenset[int](), "no token that ends"),
        (TOKENIZER, 100, frozenset({EOS}), "too small"),
        (PreTrainedTokenizerBase(), 320, frozenset({EOS}), "PreTrainedTokenizerBase"),
    ],
)
def test_a_model_whose_output_cannot_be_constrained_says_so(
    tokenizer: PreTrainedTokenizerBase, vocabulary: int, ends: frozenset[int], reason: str
) -> None:
    with pytest.raises(GrammarError, match=reason):
        GrammarCompiler(tokenizer, vocab_size=vocabulary, eos_token_ids=ends)
