"""Prompts and conversations as tokens, with a real tokenizer."""

import asyncio
from collections.abc import Awaitable, Callable, Iterator

import pytest
from tokenizers.processors import TemplateProcessing
from transformers import PreTrainedTokenizerFast

from outrider_serving.api.errors import ApiError
from outrider_serving.api.schema import Message
from outrider_serving.api.text import TemplateError, TextEncoder
from serving.tiny import CHAT_TEMPLATE, make_tokenizer

TENANT = "someone"
TURNS = [Message(role="system", content="be brief"), Message(role="user", content="hi <eos>")]


@pytest.fixture
def tokenizer() -> PreTrainedTokenizerFast:
    """One that starts every text with BOS, as most models' do."""
    made = make_tokenizer()
    made.backend_tokenizer.post_processor = TemplateProcessing(
        single="<bos> $A", special_tokens=[("<bos>", made.bos_token_id)]
    )
    return made


@pytest.fixture
def encoder(tokenizer: PreTrainedTokenizerFast) -> Iterator[TextEncoder]:
    template = "{{ bos_token }}" + CHAT_TEMPLATE
    made = TextEncoder(tokenizer, vocab_size=len(tokenizer), chat_template=template)
    yield made
    made.close()


async def test_a_prompt_gets_the_tokenizers_special_tokens(
    encoder: TextEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = await encoder.encode("the cat", TENANT)
    assert list(ids) == tokenizer("the cat").input_ids
    assert ids.count(tokenizer.bos_token_id) == 1


def test_the_ends_of_a_text_are_the_models_and_the_tokenizers(tokenizer: PreTrainedTokenizerFast) -> None:
    for given, known in (((), {tokenizer.eos_token_id}), ((7, 8), {7, 8, tokenizer.eos_token_id})):
        encoder = TextEncoder(tokenizer, vocab_size=len(tokenizer), eos_token_ids=given)
        assert encoder.eos_token_ids == known
        encoder.close()


async def test_ids_are_taken_as_they_are(encoder: TextEncoder) -> None:
    assert await encoder.encode([5, 6], TENANT) == (5, 6)


async def test_a_conversation_has_one_bos_and_no_forged_tokens(
    encoder: TextEncoder, tokenizer: PreTrainedTokenizerFast
) -> None:
    ids = await encoder.encode_chat(TURNS, TENANT)
    assert ids[0] == tokenizer.bos_token_id
    assert ids.count(tokenizer.bos_token_id) == 1
    assert tokenizer.eos_token_id not in ids
    assert tokenizer.decode(list(ids)) == "<bos><system>be brief\n<user>hi <eos>\n<assistant>"


async def test_a_developer_is_the_templates_system(encoder: TextEncoder) -> None:
    developer = [Message(role="developer", content="be brief"), TURNS[1]]
    assert await encoder.encode_chat(developer, TENANT) == await encoder.encode_chat(TURNS, TENANT)


@pytest.mark.parametrize("prompt", ["", []])
async def test_an_empty_prompt_is_refused_whatever_the_tokenizer_adds(
    encoder: TextEncoder, prompt: str | list[int]
) -> None:
    with pytest.raises(ApiError, match="prompt: the prompt is empty") as refused:
        await encoder.encode(prompt, TENANT)
    assert (refused.value.status, refused.value.param) == (400, "prompt")


async def test_a_conversation_of_empty_messages_has_its_template(encoder: TextEncoder) -> None:
    assert await encoder.encode_chat([Message(role="user", content="")], TENANT)


async def test_an_enormous_id_is_not_repeated_whole(encoder: TextEncoder) -> None:
    with pytest.raises(ApiError, match="outside the model's vocabulary") as refused:
        await encoder.encode([10**4000], TENANT)
    assert len(refused.value.message) < 200


async def test_ids_beyond_the_models_vocabulary(tokenizer: PreTrainedTokenizerFast) -> None:
    """Some tokenizers know more tokens than their model."""
    encoder = TextEncoder(tokenizer, vocab_size=10)
    with pytest.raises(ApiError, match=r"outside the model's vocabulary \(0 to 9\)"):
        await encoder.encode("zebra", TENANT)
    encoder.close()


MANY_TURNS = [Message(role="user", content="")] * 2048
IDS = [5 + number % 300 for number in range(8000)]
Ask = Callable[[TextEncoder, str], Awaitable[object]]


@pytest.mark.parametrize(
    "long",
    [
        lambda encoder, tenant: encoder.encode("the cat " * 20_000, tenant),
        lambda encoder, tenant: encoder.encode_chat(MANY_TURNS, tenant),
        lambda encoder, tenant: encoder.echo(IDS, IDS, tenant, offsets=True),
    ],
    ids=["text", "messages", "echo"],
)
async def test_a_short_prompt_does_not_wait_for_the_long_ones_before_it(
    encoder: TextEncoder, long: Ask
) -> None:
    before = [asyncio.create_task(_await(long(encoder, TENANT))) for _ in range(8)]
    await asyncio.sleep(0)
    await encoder.encode("the cat " * 2000, TENANT)
    assert sum(task.done() for task in before) <= 2
    for task in before:
        task.cancel()


@pytest.mark.parametrize(
    "flood",
    [
        lambda encoder, tenant: encoder.encode_chat(MANY_TURNS, tenant),
        lambda encoder, tenant: encoder.echo(IDS, IDS, tenant, offsets=True),
    ],
    ids=["messages", "echo"],
)
async def test_what_takes_long_for_its_size_takes_nothing_from_others(
    encoder: TextEncoder, flood: Ask
) -> None:
    """Tens of milliseconds each, where an ordinary prompt takes one or two."""
    others = [asyncio.create_task(_await(flood(encoder, "other"))) for _ in range(60)]
    await asyncio.sleep(0)
    for _ in range(8):
        await encoder.encode("the cat " * 1000, TENANT)
    assert sum(task.done() for task in others) < 40
    for task in others:
        task.cancel()


async def _await(answer: Awaitable[object]) -> None:
    await answer


async def test_a_template_that_breaks_on_a_conversation(tokenizer: PreTrainedTokenizerFast) -> None:
    encoder = TextEncoder(tokenizer, vocab_size=len(tokenizer), chat_template="{{ messages[1].content + 1 }}")
    with pytest.raises(ApiError) as refused:
        await encoder.encode_chat(TURNS, TENANT)
    assert (refused.value.status, refused.value.code) == (400, "chat_template_error")
    encoder.close()


def test_a_malformed_template(tokenizer: PreTrainedTokenizerFast) -> None:
    with pytest.raises(TemplateError, match="line 1: "):
        TextEncoder(tokenizer, vocab_size=len(tokenizer), chat_template="{% if %}")
