"""The stock client against the real server: every way of asking gives the same answer."""

import asyncio
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
    assert chunks[-1].usage == whole.usage
    assert {chunk.id for chunk in chunks} == {chunks[0].id}
    assert all(chunk.usage is None for chunk in chunks[:-1])


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
    def ask(**speculation: Any) -> tuple[str, dict[str, int]]:
        options = GREEDY | {"max_tokens": 200, "extra_body": {"ignore_eos": True, "speculation": speculation}}
        answer = client.completions.create(prompt=PROMPT, **options)
        assert answer.usage is not None
        return answer.choices[0].text, answer.usage.to_dict()["speculation"]

    plain, without = ask(proposer="none")
    proposed, with_proposals = ask(proposer="ngram", max_depth=4)
    assert plain == proposed
    assert without == {"verification_steps": 200, "proposed_tokens": 0, "accepted_tokens": 0}
    assert with_proposals["verification_steps"] == 200 - with_proposals["accepted_tokens"]
    assert with_proposals["accepted_tokens"] <= with_proposals["proposed_tokens"]


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
