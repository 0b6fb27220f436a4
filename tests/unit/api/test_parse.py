"""Request bodies: what is accepted, and the error that every other one gets."""

import contextlib
import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.api.errors import ApiError
from outrider_serving.api.parse import parse_chat, parse_completion
from outrider_serving.api.schema import ChatRequest, CompletionRequest
from outrider_serving.settings import Method

TURN = {"role": "user", "content": "hello"}


def completion(**fields: Any) -> CompletionRequest:
    return parse_completion({"model": "m", "prompt": "a"} | fields)


def chat(**fields: Any) -> ChatRequest:
    return parse_chat({"model": "m", "messages": [TURN]} | fields)


def test_defaults_are_openais() -> None:
    request = completion()
    assert (request.temperature, request.top_p, request.seed, request.stop) == (1.0, 1.0, None, ())
    assert (request.stream, request.include_usage, request.limit) == (False, False, None)
    assert request.speculation.proposer is None


@pytest.mark.parametrize(
    ("prompt", "parsed"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([7], [7])],
)
def test_one_prompt_in_each_spelling(prompt: Any, parsed: Any) -> None:
    assert completion(prompt=prompt).prompt == parsed


def test_everything_that_is_honoured() -> None:
    request = completion(
        temperature=0,
        top_p=0.5,
        seed=-(2**63),
        stop=["a", "b"],
        max_tokens=3,
        stream=True,
        stream_options={"include_usage": True, "include_obfuscation": False},
        speculation={"proposer": "ngram", "max_depth": 4, "positions": True},
        ignore_eos=True,
        user="u",
        metadata={"workload": "w"},
        top_k=-1,
        min_p=0.1,
        presence_penalty=-2,
        frequency_penalty=2,
        repetition_penalty=1.2,
        logit_bias={"0": -100, "12": 0.5},
        allowed_token_ids=[3, 4, 3],
        banned_token_ids=[],
        stop_token_ids=[7],
        min_tokens=2,
        n=16,
        best_of=16,
        logprobs=20,
        echo=True,
        timeout=0.5,
        store=False,
        response_format={"type": "text"},
    )
    assert request.stop == ("a", "b")
    assert request.logit_bias == ((0, -100.0), (12, 0.5))
    assert (request.allowed_token_ids, request.stop_token_ids) == ((3, 4), (7,))
    assert (request.likeliest, request.echo, request.store) == (20, True, False)
    assert request.speculation.positions
    assert not request.constrained
    assert request.include_usage
    assert request.speculation.proposer is Method.NGRAM
    assert request.speculation.max_depth == 4
    assert request.limit == 3


SCHEMA = {"type": "object", "properties": {"a": {"const": None}}}


@pytest.mark.parametrize(
    "fields",
    [
        {"response_format": {"type": "json_object"}},
        {"response_format": {"type": "json_object", "json_schema": None}},
        {
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "a", "schema": SCHEMA, "strict": None},
            }
        },
        {"structured_outputs": {"regex": "a+", "choice": None}},
        {"structured_outputs": {"choice": ["a", "b"]}, "response_format": {"type": "text"}},
        {"structured_outputs": {"json": SCHEMA}},
        {"structured_outputs": {"json": json.dumps(SCHEMA)}},
    ],
)
def test_forms(fields: dict[str, Any]) -> None:
    for request in (completion(**fields), chat(**fields)):
        assert request.constrained


def test_a_schema_keeps_its_nulls() -> None:
    named = {"name": "a", "schema": SCHEMA}
    request = chat(response_format={"type": "json_schema", "json_schema": named})
    assert request.response_format is not None
    assert request.response_format.json_schema is not None
    assert request.response_format.json_schema.content == SCHEMA
    request = chat(structured_outputs={"json": json.dumps(SCHEMA)})
    assert request.structured_outputs is not None
    assert request.structured_outputs.content == SCHEMA


@pytest.mark.parametrize(
    ("fields", "likeliest"),
    [
        ({}, None),
        ({"logprobs": False, "top_logprobs": 0}, None),
        ({"logprobs": True}, 0),
        ({"logprobs": True, "top_logprobs": 20}, 20),
    ],
)
def test_logprobs_of_a_chat(fields: dict[str, Any], likeliest: int | None) -> None:
    assert chat(**fields).likeliest == likeliest


def test_null_is_absent() -> None:
    assert completion(temperature=None, stop=None, seed=None, stream_options=None) == completion()
    assert chat(temperature=None, store=None, max_completion_tokens=None) == chat()


@pytest.mark.parametrize("name", ["suffix", "tools", "best_of", "top_logprobs", "echo", "unheard_of"])
def test_null_is_absent_under_any_name(name: str) -> None:
    assert completion(**{name: None}) == completion()
    assert chat(**{name: None}) == chat()
    assert chat(messages=[TURN | {name: None}]) == chat()
    options = {"include_usage": True}
    assert chat(stream=True, stream_options=options | {name: None}) == chat(
        stream=True, stream_options=options
    )
    parts = [{"type": "text", "text": "hello", name: None}]
    assert chat(messages=[{"role": "user", "content": parts}]) == chat()


def test_null_is_a_value_where_names_are_data() -> None:
    for field in ("metadata", "logit_bias"):
        with pytest.raises(ApiError) as refused:
            completion(**{field: {"5": None}})
        assert refused.value.payload["error"]["param"].startswith(field)


def test_one_stop_string() -> None:
    assert completion(stop="x").stop == ("x",)


def test_both_names_of_the_chat_limit() -> None:
    assert (chat(max_tokens=3).limit, chat(max_tokens=3).limit_param) == (3, "max_tokens")
    request = chat(max_completion_tokens=4)
    assert (request.limit, request.limit_param) == (4, "max_completion_tokens")


@pytest.mark.parametrize("best_of", [None, 3])
def test_a_best_of_that_asks_for_nothing(best_of: int | None) -> None:
    assert completion(n=3, best_of=best_of).n == 3


def test_text_parts_are_joined_as_they_are() -> None:
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert chat(messages=[{"role": "user", "content": parts}]).messages[0].content == "ab"


def test_an_answer_can_be_sent_back_as_history() -> None:
    answer: dict[str, Any] = {
        "role": "assistant",
        "content": "hi",
        "refusal": None,
        "annotations": [],
        "audio": None,
        "function_call": None,
        "tool_calls": None,
    }
    assert len(chat(messages=[TURN, answer, TURN]).messages) == 3


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 1, "frequency_penalty": 0.0, "presence_penalty": 0, "logit_bias": {}, "store": None},
        {"suffix": "", "tools": [], "tool_choice": "auto", "functions": [], "function_call": "none"},
        {"parallel_tool_calls": True, "modalities": ["text"], "service_tier": "auto", "verbosity": None},
    ],
)
def test_neutral_parameters_change_nothing(fields: dict[str, Any]) -> None:
    assert completion(**fields) == completion()
    assert chat(**fields) == chat()


def test_neutral_parameters_of_one_endpoint() -> None:
    assert completion(echo=False, logprobs=None, best_of=1) == completion(best_of=1)
    assert chat(logprobs=False, top_logprobs=0) == chat()


# Field, value, and a part of what the error must say is allowed.
REFUSED_EVERYWHERE: list[tuple[str, Any, str]] = [
    ("model", 7, "string"),
    ("temperature", 9, "less than or equal to 2"),
    ("temperature", -0.1, "greater than or equal to 0"),
    ("temperature", "hot", "number"),
    ("temperature", True, "number"),
    ("temperature", float("inf"), "finite"),
    ("top_p", 0, "greater than 0"),
    ("top_p", 1.1, "less than or equal to 1"),
    ("seed", 2**63, "less than"),
    ("seed", -(2**63) - 1, "greater than or equal to"),
    ("seed", 1.5, "integer"),
    ("stop", "", "1 to 1024 characters"),
    ("stop", ["a", ""], "1 to 1024 characters"),
    ("stop", ["a"] * 17, "at most 16"),
    ("stop", [7] * 100_000, "at most 16"),
    ("stop", 7, "string or a list"),
    ("stop", "x" * 1025, "1 to 1024 characters"),
    ("max_tokens", 0, "greater than or equal to 1"),
    ("max_tokens", -5, "greater than or equal to 1"),
    ("max_tokens", "5", "integer"),
    ("stream", "yes", "boolean"),
    ("stream", 1, "boolean"),
    ("stream_options", {"include_usage": True}, "stream: true"),
    ("speculation", 3, "object"),
    ("speculation.proposer", "eagle", "'none', 'ngram' or 'suffix'"),
    ("speculation.max_depth", 0, "greater than or equal to 1"),
    ("speculation.max_depth", 65, "less than or equal to 64"),
    ("speculation.depth", 3, "max_depth, positions, proposer"),
    ("speculation.positions", 1, "boolean"),
    ("user", 7, "string"),
    ("metadata.a", 1, "string"),
    ("metadata", "x", "dictionary"),
    ("metadata", {f"k{number}": 7 for number in range(17)}, "at most 16 entries"),
    ("n", 0, "greater than or equal to 1"),
    ("n", 17, "less than or equal to 16"),
    ("n", True, "integer"),
    ("top_k", -2, "greater than or equal to -1"),
    ("top_k", 1.5, "integer"),
    ("min_p", -0.1, "greater than or equal to 0"),
    ("min_p", 1.1, "less than or equal to 1"),
    ("frequency_penalty", 2.1, "less than or equal to 2"),
    ("presence_penalty", -2.1, "greater than or equal to -2"),
    ("repetition_penalty", 0, "greater than or equal to 0.01"),
    ("repetition_penalty", 2.1, "less than or equal to 2"),
    ("logit_bias", [[5, 1]], "object of at most 1024 entries"),
    ("logit_bias", {str(token): 1 for token in range(1025)}, "at most 1024 entries"),
    ("logit_bias", {"the": 1}, "token id in decimal"),
    ("logit_bias", {"05": 1}, "token id in decimal"),
    ("logit_bias", {"-1": 1}, "token id in decimal"),
    ("logit_bias", {"\u0665": 1}, "token id in decimal"),
    ("logit_bias", {"9" * 30: 1}, "token id in decimal"),
    ("logit_bias", {"5": 100.5}, "from -100 to 100"),
    ("logit_bias", {"5": True}, "from -100 to 100"),
    ("logit_bias", {"5": "1"}, "from -100 to 100"),
    ("allowed_token_ids", [], "at least one"),
    ("allowed_token_ids", ["a"], "list of token ids"),
    ("allowed_token_ids", [True], "list of token ids"),
    ("banned_token_ids", 5, "list of token ids"),
    ("stop_token_ids", [1.5], "list of token ids"),
    ("stop_token_ids", [1] * 257, "at most 256"),
    ("ignore_eos", "no", "boolean"),
    ("min_tokens", -1, "greater than or equal to 0"),
    ("timeout", 0, "greater than 0"),
    ("timeout", "1", "number"),
    ("store", True, "there are no stored answers to read back here: it must be false or null"),
    ("store", 0, "false or null"),
    ("response_format", "json", "object"),
    ("response_format.type", "grammar", "'json_schema'"),
    ("response_format.strict", True, "json_schema, type"),
    ("response_format", {"type": "json_schema"}, "must come together"),
    ("response_format", {"type": "text", "json_schema": {"name": "a", "schema": {}}}, "must come together"),
    ("structured_outputs", {}, "exactly one"),
    ("structured_outputs", {"regex": "a", "choice": ["a"]}, "exactly one"),
    ("structured_outputs", {"regex": None}, "exactly one"),
    ("structured_outputs.regex", 5, "string"),
    ("structured_outputs.choice[1]", {"structured_outputs": {"choice": ["a", 5]}}, "string"),
    ("structured_outputs.json", "[1]", "JSON schema"),
    ("structured_outputs.json", "{", "JSON schema"),
    ("structured_outputs.grammar", "root ::= a", "choice, json, regex"),
    ("guided_regex", "a", "Supported are"),
    ("x" * 500, 1, "Supported are"),
]
REFUSED_IN_COMPLETIONS: list[tuple[str, Any, str]] = [
    ("prompt", ["a", "b"], "send 2 requests"),
    ("prompt", [[1], [2]], "send 2 requests"),
    ("prompt", [["a", "b"]], "list of token ids"),
    ("prompt", [[[1]]], "list of token ids"),
    ("prompt", [["a"]], "list of token ids"),
    ("prompt", 7, "string"),
    ("prompt", [True], "token ids"),
    ("prompt", [1, "a"], "token ids"),
    ("prompt", {"a": 1}, "token ids"),
    ("best_of", 2, "best_of other than n is not supported: 2 was given, but n is 1"),
    ("best_of", {"best_of": 1, "n": 4}, "1 was given, but n is 4"),
    ("best_of", "1", "integer"),
    ("echo", "yes", "boolean"),
    ("logprobs", -1, "greater than or equal to 0"),
    ("logprobs", 21, "less than or equal to 20"),
    ("logprobs", True, "integer"),
    ("top_logprobs", 1, "Supported are"),
    ("suffix", "x", "null"),
    ("tools", [{"type": "function"}], "[] or null"),
    ("messages", [TURN], "Supported are"),
]
REFUSED_IN_CHAT: list[tuple[str, Any, str]] = [
    ("messages", [], "1 to 2048 messages, but it has 0"),
    ("messages", [TURN] * 2049, "1 to 2048 messages, but it has 2049"),
    ("messages", "hi", "list"),
    ("messages[0]", [3], "object"),
    ("messages[0].role", [{"role": "tool", "content": "x"}], "'user' or 'assistant'"),
    ("messages[0].content", [{"role": "user"}], "required"),
    ("messages[0].content", [{"role": "user", "content": 3}], "string"),
    ("messages[0].content", [{"role": "user", "content": []}], "parts"),
    ("messages[0].content", [{"role": "user", "content": [{"type": "image_url"}]}], "parts"),
    ("messages[1].name", [TURN, TURN | {"name": "x"}], "Supported are content, role"),
    ("messages[0].tool_calls", [TURN | {"tool_calls": [{"id": "x"}]}], "[] or null"),
    ("logprobs", 1, "boolean"),
    ("top_logprobs", 1, "logprobs: true"),
    ("top_logprobs", 21, "less than or equal to 20"),
    ("echo", True, "Supported are"),
    ("tools", [{"type": "function"}], "[] or null"),
    ("reasoning_effort", "high", "only null"),
    ("prompt", "a", "Supported are"),
]


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED_EVERYWHERE + REFUSED_IN_COMPLETIONS)
def test_refused_in_completions(field: str, value: Any, allowed: str) -> None:
    _check_refused(lambda body: parse_completion({"model": "m", "prompt": "a"} | body), field, value, allowed)


@pytest.mark.parametrize(("field", "value", "allowed"), REFUSED_EVERYWHERE + REFUSED_IN_CHAT)
def test_refused_in_chat(field: str, value: Any, allowed: str) -> None:
    _check_refused(lambda body: parse_chat({"model": "m", "messages": [TURN]} | body), field, value, allowed)


def _check_refused(parse: Any, field: str, value: Any, allowed: str) -> None:
    name, _, inner = field.partition(".")
    name = name.partition("[")[0]
    body = {name: {inner: value}} if inner and not isinstance(value, list | dict) else {name: value}
    if isinstance(value, dict) and name in value:
        body = value
    with pytest.raises(ApiError) as refused:
        parse(body)
    error = refused.value.payload["error"]
    assert refused.value.status == 400
    assert error["type"] == "invalid_request_error"
    assert error["param"] == field[:80]
    assert error["param"] in error["message"]
    assert allowed in error["message"]
    assert len(error["message"]) < 600
    json.dumps(error)


@pytest.mark.parametrize("missing", ["model", "prompt"])
def test_missing_parameters_are_named(missing: str) -> None:
    body = {"model": "m", "prompt": "a"}
    del body[missing]
    with pytest.raises(ApiError, match=f"{missing}: this parameter is required"):
        parse_completion(body)


NAMED = {"name": "a", "schema": {}}


@pytest.mark.parametrize(
    ("named", "param", "allowed"),
    [
        ({"name": "a"}, "response_format.json_schema.schema", "required"),
        (NAMED | {"schema": None}, "response_format.json_schema.schema", "required"),
        (NAMED | {"schema": 5}, "response_format.json_schema.schema", "JSON schema"),
        (NAMED | {"name": "a b"}, "response_format.json_schema.name", "pattern"),
        (NAMED | {"strict": "yes"}, "response_format.json_schema.strict", "boolean"),
        (NAMED | {"extra": 1}, "response_format.json_schema.extra", "description, name, schema, strict"),
        ([], "response_format.json_schema", "object"),
    ],
)
def test_a_named_schema_at_fault(named: Any, param: str, allowed: str) -> None:
    with pytest.raises(ApiError) as refused:
        chat(response_format={"type": "json_schema", "json_schema": named})
    assert (refused.value.status, refused.value.param) == (400, param)
    assert allowed in refused.value.message


@pytest.mark.parametrize("form", ["structured_outputs", "response_format"])
@pytest.mark.parametrize(
    ("param", "value"),
    [("min_tokens", 1), ("ignore_eos", True), ("allowed_token_ids", [1]), ("banned_token_ids", [1])],
)
def test_a_form_and_another_limit_of_tokens(form: str, param: str, value: Any) -> None:
    forms = {"structured_outputs": {"regex": "a"}, "response_format": {"type": "json_object"}}
    with pytest.raises(ApiError, match=f"{param} cannot be combined with {form}") as refused:
        completion(**{form: forms[form], param: value})
    assert refused.value.param == param


def test_two_forms() -> None:
    with pytest.raises(ApiError, match="give one of them") as refused:
        chat(structured_outputs={"regex": "a"}, response_format={"type": "json_object"})
    assert refused.value.param == "structured_outputs"


def test_contradictions() -> None:
    with pytest.raises(ApiError, match="max_depth: 3 was given, but it is for a proposer") as refused:
        completion(speculation={"proposer": "none", "max_depth": 3})
    assert refused.value.param == "speculation.max_depth"
    with pytest.raises(ApiError, match="give one of them"):
        chat(max_tokens=1, max_completion_tokens=2)


MEGABYTE = 1 << 20


@pytest.mark.parametrize(
    ("parse", "fields"),
    [
        (parse_chat, {"messages": [{}] * (MEGABYTE // 3)}),
        (parse_chat, {"messages": [1] * (MEGABYTE // 2)}),
        (parse_chat, {"messages": [{"role": "user", "content": ""}] * (MEGABYTE // 31)}),
        (parse_chat, {"messages": [TURN | {"content": [{"type": "text", "text": ""}] * (MEGABYTE // 26)}]}),
        (parse_chat, {"messages": [1] * 2048}),
        (parse_chat, {"messages": [{"role": "user", "content": {}}] * 2048}),
        (parse_completion, {"prompt": [1] * (MEGABYTE // 2)}),
        (parse_completion, {"prompt": ["a"] * (MEGABYTE // 4)}),
        (parse_completion, {"prompt": [[[1] * (MEGABYTE // 2)]]}),
        (parse_completion, {"prompt": "a", "stop": [1] * (MEGABYTE // 2)}),
        (parse_completion, {"prompt": "a", "metadata": {str(n): n for n in range(MEGABYTE // 14)}}),
        (parse_completion, {"prompt": "a", "temperature": [[1] * (MEGABYTE // 2)]}),
        (parse_completion, {"prompt": "a"} | {str(n): n for n in range(MEGABYTE // 14)}),
        (parse_completion, {"prompt": "a", "logit_bias": {str(n): 1 for n in range(MEGABYTE // 12)}}),
        (parse_completion, {"prompt": "a", "allowed_token_ids": list(range(MEGABYTE // 7))}),
        (parse_completion, {"prompt": "a", "structured_outputs": {"choice": [1] * (MEGABYTE // 2)}}),
        (parse_completion, {"prompt": "a", "structured_outputs": {"choice": ["a"] * (MEGABYTE // 4)}}),
        (parse_completion, {"prompt": "a", "structured_outputs": {"json": "[" * MEGABYTE}}),
    ],
    ids=range(18),
)
def test_a_megabyte_does_not_stall_the_event_loop(parse: Any, fields: dict[str, Any]) -> None:
    """A tenth of a second of this thread's own time, of which the slowest needs a third."""
    body = {"model": "m"} | fields
    started = time.thread_time()
    with contextlib.suppress(ApiError):
        parse(body)
    assert time.thread_time() - started < 0.1


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda children: (
        st.lists(children, max_size=3) | st.dictionaries(st.text(max_size=5), children, max_size=3)
    ),
    max_leaves=8,
)
NAMES = st.sampled_from(
    sorted(CompletionRequest.model_fields.keys() | ChatRequest.model_fields.keys() | {"tools", "suffix"})
)


@given(st.dictionaries(NAMES, JSON, max_size=5), st.booleans())
def test_any_object_is_parsed_or_refused(fields: dict[str, Any], valid_base: bool) -> None:
    base: dict[str, Any] = {"model": "m", "prompt": "a", "messages": [TURN]} if valid_base else {}
    for parse in (parse_completion, parse_chat):
        with contextlib.suppress(ApiError):
            parse(base | fields)
