"""The stock client against the real server: every way of asking gives the same answer."""

import asyncio
import json
import re
from typing import Any

import openai
import pytest

from serving.api.conftest import KEY
from serving.api.process import ServerProcess

PROMPT = "one two three four one two three four one two"
GREEDY: dict[str, Any] = {
    "model": "tiny",
    "temperature": 0,
    "max_tokens": 24,
    "extra_body": {"ignore_eos": True},
}
TURNS: Any = [{"role": "system", "content": "be brief"}, {"role": "user", "content": PROMPT}]


@pytest.fixture(scope="module")
def client(server: ServerProcess) -> openai.OpenAI:
    return server.client(KEY)


def test_a_completion_in_one_piece_and_in_a_stream(client: openai.OpenAI) -> None:
    whole = client.completions.create(prompt=PROMPT, **GREEDY)
    assert whole.object == "text_completion"
    assert whole.id.startswith("cmpl-")
    assert whole.model == "tiny"
    choice = whole.choices[0]
    assert (choice.index, choice.finish_reason, choice.logprobs) == (0, "length", None)
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert whole.usage.total_tokens == whole.usage.prompt_tokens + 24

    chunks = list(
        client.completions.create(
            prompt=PROMPT, stream=True, stream_options={"include_usage": True}, **GREEDY
        )
    )
    assert "".join(chunk.choices[0].text for chunk in chunks[:-1]) == choice.text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-2]] == [None] * (len(chunks) - 2)
    assert chunks[-2].choices[0].finish_reason == "length"
    assert chunks[-1].choices == []
    assert _tokens(chunks[-1].usage) == _tokens(whole.usage)
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])


def _tokens(usage: Any) -> dict[str, Any]:
    """Without how they came about, which depends on how long steps took."""
    return {name: value for name, value in usage.to_dict().items() if name != "speculation"}


def test_a_conversation_in_one_piece_and_in_a_stream(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=TURNS, **GREEDY)
    assert whole.object == "chat.completion"
    assert whole.id.startswith("chatcmpl-")
    assert whole.choices[0].message.role == "assistant"
    assert whole.choices[0].finish_reason == "length"

    chunks = list(client.chat.completions.create(messages=TURNS, stream=True, **GREEDY))
    assert chunks[0].object == "chat.completion.chunk"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert all(chunk.choices[0].delta.role is None for chunk in chunks[1:])
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks)
    assert text == whole.choices[0].message.content
    assert chunks[-1].choices[0].finish_reason == "length"
    assert chunks[-1].choices[0].delta.content is None
    assert all(chunk.choices and chunk.usage is None for chunk in chunks)


async def test_the_async_client(server: ServerProcess) -> None:
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:
        whole = await client.completions.create(prompt=PROMPT, **GREEDY)
        stream = await client.chat.completions.create(messages=TURNS, stream=True, **GREEDY)
        finish = [chunk.choices[0].finish_reason async for chunk in stream][-1]
    assert whole.usage is not None
    assert whole.usage.completion_tokens == 24
    assert finish == "length"


async def test_requests_side_by_side_do_not_mix(server: ServerProcess) -> None:
    prompts = [f"{word} and {word}" for word in ("one", "two", "cat", "dog", "mat", "log")]
    async with openai.AsyncOpenAI(base_url=server.url + "/v1", api_key=KEY, max_retries=0) as client:

        async def ask(prompt: str) -> str:
            stream = await client.completions.create(prompt=prompt, stream=True, **GREEDY)
            return "".join([chunk.choices[0].text async for chunk in stream])

        together = await asyncio.gather(*map(ask, prompts))
        alone = [await ask(prompt) for prompt in prompts]
    assert together == alone
    assert len(set(alone)) > 1


def test_speculation_changes_the_steps_and_not_the_text(client: openai.OpenAI) -> None:
    def ask(**speculation: Any) -> tuple[str, dict[str, Any]]:
        options = GREEDY | {"max_tokens": 200, "extra_body": {"ignore_eos": True, "speculation": speculation}}
        answer = client.completions.create(prompt=PROMPT, **options)
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.to_dict()["speculation"]

    plain, without = ask(proposer="none")
    proposed, with_proposals = ask(proposer="ngram", max_depth=4)
    assert plain == proposed
    assert without == {
        "verification_steps": 200,
        "proposed_tokens": 0,
        "accepted_tokens": 0,
        "accepted_length": 0,
    }
    assert with_proposals["verification_steps"] == 200 - with_proposals["accepted_tokens"]
    assert with_proposals["accepted_tokens"] <= with_proposals["proposed_tokens"]


def test_acceptance_by_position(client: openai.OpenAI) -> None:
    speculation = {"proposer": "ngram", "max_depth": 3, "positions": True}
    options = GREEDY | {"max_tokens": 200, "extra_body": {"ignore_eos": True, "speculation": speculation}}
    for _ in range(10):  # measured times may be against proposals for some hundred steps
        answer = client.completions.create(prompt=PROMPT, **options)
        assert answer.usage is not None
        found = answer.usage.to_dict()["speculation"]
        assert isinstance(found, dict)
        proposed, accepted = found["proposed_by_position"], found["accepted_by_position"]
        if proposed:
            break
    assert 0 < len(proposed) <= 3
    assert sorted(proposed, reverse=True) == proposed
    assert sorted(accepted, reverse=True) == accepted
    assert sum(accepted) == found["accepted_tokens"]
    assert all(kept <= tried for kept, tried in zip(accepted, proposed, strict=False))


def test_a_seed_repeats_and_another_does_not(client: openai.OpenAI) -> None:
    def ask(seed: int, **more: Any) -> str:
        options: Any = {"seed": seed, "max_tokens": 24} | more
        return str(client.completions.create(model="tiny", prompt=PROMPT, **options).choices[0].text)

    assert ask(1) == ask(1) == ask(1, extra_body={"speculation": {"proposer": "none"}})
    assert ask(1) != ask(2)


def test_a_stop_string_ends_the_text_before_it(client: openai.OpenAI) -> None:
    text = client.completions.create(prompt=PROMPT, **GREEDY).choices[0].text
    stop = next(text[at : at + 2] for at in range(4, len(text)) if text[at : at + 2].isascii())
    cut = client.completions.create(prompt=PROMPT, stop=stop, **GREEDY)
    assert cut.choices[0].text == text[: text.index(stop)]
    assert cut.choices[0].finish_reason == "stop"
    stream = client.completions.create(prompt=PROMPT, stop=[stop, "\x00"], stream=True, **GREEDY)
    assert "".join(chunk.choices[0].text for chunk in stream) == text[: text.index(stop)]


def test_choices_differ_with_their_number_and_not_with_their_company(client: openai.OpenAI) -> None:
    def ask(n: int, **more: Any) -> list[str]:
        options: Any = {"seed": 3, "n": n, "max_tokens": 24} | more
        answer = client.completions.create(model="tiny", prompt=PROMPT, **options)
        assert [choice.index for choice in answer.choices] == list(range(n))
        return [choice.text for choice in answer.choices]

    three = ask(3)
    assert len(set(three)) == 3
    assert ask(1) == three[:1]
    assert ask(3, extra_body={"speculation": {"proposer": "none"}}) == three
    stream = client.completions.create(model="tiny", prompt=PROMPT, seed=3, n=3, max_tokens=24, stream=True)
    texts = ["", "", ""]
    for chunk in stream:
        texts[chunk.choices[0].index] += chunk.choices[0].text
    assert texts == three


def test_logprobs_are_the_targets_own(client: openai.OpenAI) -> None:
    plain = client.completions.create(prompt=PROMPT, logprobs=3, **GREEDY)
    found = plain.choices[0].logprobs
    assert found is not None
    assert found.tokens is not None
    assert found.token_logprobs is not None
    assert found.top_logprobs is not None
    assert len(found.tokens) == len(found.token_logprobs) == len(found.top_logprobs) == 24
    # Greedy takes the likeliest token, whatever else the request asks for.
    for logprob, top in zip(found.token_logprobs, found.top_logprobs, strict=True):
        assert len(top) <= 4
        assert max(top.values()) == logprob
    stream = client.completions.create(prompt=PROMPT, logprobs=3, stream=True, **GREEDY)
    parts = [chunk.choices[0].logprobs for chunk in stream]
    assert [token for part in parts if part for token in part.tokens or ()] == found.tokens


def test_an_echo_scores_the_prompt_as_generation_does(client: openai.OpenAI) -> None:
    def logprobs(prompt: list[int], **options: Any) -> list[float]:
        choice = client.completions.create(model="tiny", prompt=prompt, logprobs=0, **options).choices[0]
        assert choice.logprobs is not None
        assert choice.logprobs.token_logprobs is not None
        return choice.logprobs.token_logprobs

    generated = logprobs([5, 6, 7], max_tokens=5, extra_body={"allowed_token_ids": [40]})
    echoed = logprobs([5, 6, 7, *[40] * 5], max_tokens=1, echo=True)
    assert echoed[0] is None
    assert len(echoed) == 9
    assert echoed[3:8] == pytest.approx(generated, abs=1e-4)


def test_an_echo_has_the_same_scores_in_all_choices(client: openai.OpenAI) -> None:
    def scores(n: int) -> list[list[float]]:
        made = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, n=n, **GREEDY)
        found = [choice.logprobs.token_logprobs for choice in made.choices if choice.logprobs]
        return [each for each in found if each is not None]

    (alone,) = scores(1)
    together = scores(4)
    assert [each[1:] for each in together] == [pytest.approx(alone[1:], abs=1e-4)] * 4


def test_an_echo_begins_with_the_prompt(client: openai.OpenAI) -> None:
    choice = client.completions.create(prompt=PROMPT, logprobs=1, echo=True, **GREEDY).choices[0]
    plain = client.completions.create(prompt=PROMPT, **GREEDY).choices[0]
    assert choice.text == PROMPT + plain.text
    assert choice.logprobs is not None
    assert "".join(choice.logprobs.tokens or ()).startswith(PROMPT)


def test_logprobs_of_a_conversation(client: openai.OpenAI) -> None:
    whole = client.chat.completions.create(messages=TURNS, logprobs=True, top_logprobs=2, **GREEDY)
    found = whole.choices[0].logprobs
    assert found is not None
    assert found.content is not None
    assert len(found.content) == 24
    assert all(len(item.top_logprobs) == 2 for item in found.content)
    text = bytes(byte for item in found.content for byte in item.bytes or ()).decode(errors="replace")
    assert text == whole.choices[0].message.content


def test_the_law_can_be_bent(client: openai.OpenAI) -> None:
    def tokens(**more: Any) -> list[str]:
        options: Any = {"model": "tiny", "prompt": PROMPT, "max_tokens": 8, "logprobs": 0, "seed": 1} | more
        found = client.completions.create(**options).choices[0].logprobs
        assert found is not None
        assert found.tokens is not None
        return found.tokens

    assert set(tokens(logit_bias={"40": 100}, temperature=0)) == {tokens(logit_bias={"40": 100})[0]}
    allowed = tokens(extra_body={"allowed_token_ids": [40, 41]})
    assert set(allowed) <= set(tokens(logit_bias={"40": 100}) + tokens(logit_bias={"41": 100}))
    assert len(tokens(extra_body={"allowed_token_ids": [1], "min_tokens": 0})) == 1
    assert len(tokens(extra_body={"stop_token_ids": [40], "allowed_token_ids": [40]})) == 1
    assert tokens(extra_body={"top_k": 1}) == tokens(temperature=0)
    assert tokens(extra_body={"min_p": 1}) == tokens(temperature=0)
    banned = {"allowed_token_ids": [40, 41], "banned_token_ids": [41]}
    assert set(tokens(extra_body=banned)) == {tokens(logit_bias={"40": 100})[0]}


def test_output_has_the_form_that_was_asked_for(client: openai.OpenAI) -> None:
    def ask(**more: Any) -> str:
        options: Any = {"model": "tiny", "messages": TURNS, "max_tokens": 64, "seed": 1} | more
        return client.chat.completions.create(**options).choices[0].message.content or ""

    assert ask(extra_body={"structured_outputs": {"choice": ["yes", "no"]}}) in ("yes", "no")
    assert re.fullmatch("[ab]{3}", ask(extra_body={"structured_outputs": {"regex": "[ab]{3}"}}))
    schema = {"type": "object", "properties": {"a": {"enum": [1, 2]}}, "required": ["a"]}
    schema["additionalProperties"] = False
    form = {"type": "json_schema", "json_schema": {"name": "a", "schema": schema, "strict": True}}
    assert json.loads(ask(response_format=form))["a"] in (1, 2)


def test_token_ids_as_prompt(client: openai.OpenAI) -> None:
    answer = client.completions.create(prompt=[5, 6, 7], **GREEDY)
    assert answer.usage is not None
    assert answer.usage.prompt_tokens == 3


def test_default_limits(client: openai.OpenAI) -> None:
    answer = client.completions.create(model="tiny", prompt=PROMPT, extra_body={"ignore_eos": True})
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 16


def test_models(client: openai.OpenAI) -> None:
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").owned_by == "outrider"
    with pytest.raises(openai.NotFoundError):
        client.models.retrieve("other")


def test_request_ids(client: openai.OpenAI) -> None:
    answer = client.completions.with_raw_response.create(prompt=PROMPT, **GREEDY)
    assert answer.headers["x-request-id"] == answer.parse().id
