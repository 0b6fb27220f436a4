"""From the command line's MODEL to an engine that has generated a real token. Imports torch when called."""

from __future__ import annotations

import os

from outrider_serving.api.options import ServeOptions, StartError
from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TemplateError, TextEncoder
from outrider_serving.settings import ModelState


def load(options: ServeOptions, serving: Serving) -> ServedModel:
    """Load the model and warm its engine up; takes seconds to minutes.

    Raises:
        StartError: the model or its chat template cannot be served as asked.
        EngineError: the engine could not generate.
    """
    # Progress bars would break the lines of the log; tqdm asks for this variable when it is imported.
    os.environ.setdefault("TQDM_DISABLE", "1")
    # These take seconds to import: not before the port answers.
    from transformers.utils import logging as transformers_logging

    from outrider_serving.engine.engine import Engine
    from outrider_serving.models.errors import ModelError
    from outrider_serving.models.loading import load_model

    transformers_logging.disable_default_handler()
    transformers_logging.enable_propagation()
    try:
        loaded = load_model(
            options.model,
            revision=options.revision,
            dtype=options.dtype,
            context_length=options.context_length,
        )
        encoder = TextEncoder(
            loaded.tokenizer, vocab_size=loaded.vocab_size, chat_template=options.chat_template
        )
    except ModelError as error:
        raise StartError(str(error)) from error
    except TemplateError as error:
        raise StartError(f"the chat template is malformed: {error}") from error
    engine = Engine(
        loaded,
        serving.settings,
        max_waiting=options.max_waiting,
        max_running=options.max_running,
        on_step=serving.record_step,
    )
    engine.start()
    engine.warm_up()
    state = ModelState(
        name=options.served_name,
        revision=loaded.revision,
        dtype=loaded.dtype,
        context_length=loaded.context_length,
    )
    return ServedModel(state, engine, encoder)
