"""Without the compiled library plain Python looks earlier text up: that is told, and proposals go on."""

from __future__ import annotations

from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from outrider_serving.api.state import ServedModel, Serving
from outrider_serving.api.text import TextEncoder
from outrider_serving.models.loading import load_model
from outrider_serving.settings import ModelState, default_settings
from outrider_serving.suffix.indexes import best_indexes
from outrider_serving.suffix.lookup import Look
from serving.engine.support import SUFFIX, bench, request
from serving.tiny import make_tiny_model
from unit.api.test_exchange import Engine
from unit.api.vocabularies import BYTES


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    """There is no library for this machine."""
    monkeypatch.setattr("outrider_serving.suffix.indexes.library", lambda: None)


def compiled_as_told(serving: Serving) -> float:
    """The gauge as it is scraped."""
    (value,) = (
        sample.value
        for family in text_string_to_metric_families(serving.telemetry.exposition().decode())
        for sample in family.samples
        if sample.name == "outrider_suffix_compiled"
    )
    return value


def test_there_is_a_warning_and_there_are_answers(missing: None, caplog: pytest.LogCaptureFixture) -> None:
    indexes = best_indexes()
    (record,) = caplog.records
    assert record.levelname == "WARNING"
    assert "plain Python" in record.message
    assert not indexes.compiled
    log, text = indexes.log(10_000), indexes.text(2)
    log.extend([1, 2, 3, 4])
    log.end()
    text.extend([1, 2])
    assert indexes.look_up(text, [text, log], Look(), 4, 4).tokens == (3, 4)
    assert indexes.leaving() == 0


def test_there_is_none_where_the_library_is(caplog: pytest.LogCaptureFixture) -> None:
    assert best_indexes().compiled
    assert not caplog.records


def test_an_engine_proposes_from_history_and_it_is_told_how(missing: None, tmp_path: Path) -> None:
    engine = bench(load_model(str(make_tiny_model(tmp_path))))
    (cold,), (warm,) = (
        engine.run(request(range(10, 40), ignore_eos=True, speculation=SUFFIX)) for _ in range(2)
    )
    assert warm.tokens == cold.tokens
    assert warm.accepted > cold.accepted

    api = Engine("")
    state = ModelState(name="m", revision="r", dtype="float32", context_length=64)
    serving = Serving(served_name="m", settings=default_settings())
    serving.serve(ServedModel(state, api, TextEncoder(BYTES, vocab_size=len(BYTES))))
    assert compiled_as_told(serving) == 1
    api.suffix_compiled = engine.core.suffix_compiled
    assert compiled_as_told(serving) == 0
    serving.close()
