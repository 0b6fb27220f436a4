"""From an engine's client to a model that can be asked."""

from __future__ import annotations

import asyncio
import gc
import math
import pickle

from outrider_serving import logs
from outrider_serving.api.forms import Forms
from outrider_serving.api.options import ServeOptions, StartError
from outrider_serving.api.sharing import model_identity
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
        encoder, identity = await asyncio.to_thread(_encoder, model, options)
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
    # What is there now stays: no garbage collection needs to walk through it while requests wait.
    gc.collect()
    gc.freeze()
    limits = options.engine
    return ServedModel(
        state,
        engine,
        encoder,
        identity,
        Forms(limits.max_waiting),
        max_running=limits.max_running,
        max_waiting=limits.max_waiting,
    )


def _encoder(model: ModelInfo, options: ServeOptions) -> tuple[TextEncoder, str]:
    """What encodes, and the model's identity, where it is needed.

    Imports transformers, but not torch: there are neither weights nor workers in this process.
    """
    logs.adopt_libraries()
    tokenizer = pickle.loads(model.tokenizer)
    # What is too long is refused with an error that says so: its own warning of it is not needed.
    tokenizer.model_max_length = math.inf
    identity = model_identity(model.revision, tokenizer) if options.shared_cache is not None else ""
    encoder = TextEncoder(
        tokenizer,
        vocab_size=model.vocab_size,
        chat_template=options.chat_template,
        eos_token_ids=model.eos_token_ids,
        max_waiting=options.engine.max_waiting,
    )
    return encoder, identity
