"""What the API makes of the model that its engine has loaded."""

import gc
import pickle
from collections.abc import Iterator
from typing import Any, cast

import pytest

from outrider_serving.api.loading import load
from outrider_serving.api.options import ServeOptions
from outrider_serving.api.state import ServedModel
from outrider_serving.engine.options import EngineOptions
from outrider_serving.engine.process.client import EngineClient
from outrider_serving.engine.process.protocol import ModelInfo
from outrider_serving.tenancy import EVERYONE_APART
from serving.tiny import make_tokenizer


class Loaded:
    """An engine that has a model with a tokenizer."""

    def __init__(self, tokenizer: Any) -> None:
        self._tokenizer = pickle.dumps(tokenizer)

    async def start(self) -> ModelInfo:
        return ModelInfo(self._tokenizer, "r", "float32", 100, frozenset(), 320, 1, 16)


@pytest.fixture
def unfreeze() -> Iterator[None]:
    assert not gc.get_freeze_count()
    yield
    gc.unfreeze()


async def loaded(tokenizer: Any) -> ServedModel:
    options = ServeOptions(
        engine=EngineOptions("m"),
        served_name="m",
        host="127.0.0.1",
        port=0,
        admin_port=0,
        settings_file=None,
        keys_directory=None,
        tenancy=EVERYONE_APART,
        shared_cache=None,
        retention=60,
        warm_seconds=0,
        chat_template=None,
        step_timeout=60,
        drain_delay=0,
        grace_period=1,
    )
    return await load(options, cast(EngineClient, Loaded(tokenizer)))


def end(model: ServedModel) -> None:
    model.encoder.close()
    model.forms.close()


@pytest.mark.usefixtures("unfreeze")
async def test_what_is_loaded_is_no_work_for_the_garbage_collector() -> None:
    model = await loaded(make_tokenizer())
    end(model)
    assert gc.get_freeze_count() > 10_000
    assert len(gc.get_objects()) < gc.get_freeze_count()


@pytest.mark.usefixtures("unfreeze")
async def test_a_long_prompt_is_nothing_that_the_tokenizer_warns_of(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    tokenizer = make_tokenizer()
    tokenizer.model_max_length = 4
    model = await loaded(tokenizer)
    assert len(await model.encoder.encode("one two three " * 10, "tenant")) > 4
    end(model)
    assert caplog.records == []
    assert capfd.readouterr().err == ""
