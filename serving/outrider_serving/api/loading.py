"""From an engine's client to a model that can be asked."""

from __future__ import annotations

import asyncio
import pickle

from outrider_serving.api.options import ServeOptions, StartError
from outrider_serving.api.state import ServedModel
from outrider_serving.api.text import TemplateError, TextEncoder
from outrider_serving.engine.process.client import EngineClient
from outrider_serving.engine.process.protocol import ModelInfo
from outrider_serving.models.errors import ModelError
from outrider_serving.settings import ModelState


async def load(options: ServeOptions, engine: EngineClient) -> ServedModel:
    """Start the engine and take over what the API needs of its model; takes seconds to minutes.

    Raises:
        StartError: the model or its chat template cannot be served as asked.
        EngineError: the engine has failed.
    """
    try:
        model = await engine.start()
        encoder = await asyncio.to_thread(_encoder, model, options)
    except ModelError as error:
        raise StartError(str(error)) from error
    except TemplateError as error:
        raise StartError(f"the chat template is malformed: {error}") from error
    state = ModelState(
        name=options.served_name,
        revision=model.revision,
        dtype=model.dtype,
        context_length=model.context_length,
    )
    return ServedModel(state, engine, encoder)


def _encoder(model: ModelInfo, options: ServeOptions) -> TextEncoder:
    """Imports transformers, but not torch: there are neither weights nor workers in this process."""
    tokenizer = pickle.loads(model.tokenizer)
    return TextEncoder(
        tokenizer,
        vocab_size=model.vocab_size,
        chat_template=options.chat_template,
        eos_token_ids=model.eos_token_ids,
        max_waiting=options.engine.max_waiting,
    )
