"""Models of the hub, against a local stand-in of its HTTP API (see hub.py): the real hub is never asked."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from huggingface_hub import constants

from outrider_serving.models.errors import ModelError
from outrider_serving.models.loading import load_model
from serving.engine.hub import Hub, Repository, serving
from serving.tiny import make_tiny_model

OLD, NEW = "a" * 40, "b" * 40
NAME = "some-org/tiny-1.0"


@pytest.fixture(scope="module")
def commits(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    root = tmp_path_factory.mktemp("hub")
    made = {
        OLD: make_tiny_model(root / "old", seed=1, context_length=256),
        NEW: make_tiny_model(root / "new", seed=2, context_length=512),
    }
    for path in made.values():
        (path / "README.md").write_text("of no importance")
        (path / "pytorch_model.bin").write_bytes(b"a pickle, which is never fetched")
    return made


@pytest.fixture
def hub(commits: dict[str, Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    hub = Hub({NAME: Repository(commits, {"main": OLD})})
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "no-login"))
    monkeypatch.delenv("HF_TOKEN", raising=False)
    with serving(hub) as endpoint:
        monkeypatch.setenv("HF_ENDPOINT", endpoint)
        yield hub


@pytest.fixture
def token(tmp_path: Path) -> Path:
    path = tmp_path / "token"
    path.write_text("hf_secret\n")
    return path


def test_a_model_is_downloaded_at_the_commit_of_its_branch(hub: Hub) -> None:
    loaded = load_model(NAME)
    assert (loaded.revision, loaded.context_length, loaded.source) == (OLD, 256, NAME)
    fetched = {path.rsplit("/", 1)[1] for path in hub.asked if path.startswith("GET") and "/resolve/" in path}
    assert {"config.json", "model.safetensors", "tokenizer.json"} <= fetched
    assert not fetched & {"README.md", "pytorch_model.bin"}


def test_a_branch_that_has_moved(hub: Hub) -> None:
    assert load_model(NAME).revision == OLD
    hub.repositories[NAME].branches["main"] = NEW
    moved = load_model(NAME)
    assert (moved.revision, moved.context_length) == (NEW, 512)
    assert load_model(NAME, revision=OLD).revision == OLD


def test_a_tag_or_branch_can_be_named(hub: Hub) -> None:
    hub.repositories[NAME].branches["v2"] = NEW
    assert load_model(NAME, revision="v2").revision == NEW


def test_a_model_that_is_in_the_cache_is_not_fetched_again(hub: Hub) -> None:
    load_model(NAME)
    hub.asked.clear()
    load_model(NAME)
    assert not any("/resolve/" in path and path.startswith("GET") for path in hub.asked)


def test_a_private_model_needs_a_token(hub: Hub, token: Path, tmp_path: Path) -> None:
    hub.repositories[NAME].token = "hf_secret"
    with pytest.raises(ModelError, match="no such repository, or it is private and needs a token"):
        load_model(NAME)
    assert load_model(NAME, hub_token=token).revision == OLD
    wrong = tmp_path / "wrong"
    wrong.write_text("hf_other")
    with pytest.raises(ModelError, match="token"):
        load_model(NAME, hub_token=wrong)


def test_a_gated_model_says_so(hub: Hub, token: Path) -> None:
    hub.repositories[NAME].token = "hf_secret"
    hub.repositories[NAME].gated = True
    with pytest.raises(ModelError, match="is gated: accept its terms there, and give a token"):
        load_model(NAME)
    assert load_model(NAME, hub_token=token).revision == OLD


def test_what_is_not_there(hub: Hub) -> None:
    with pytest.raises(ModelError, match=r"model some-org/other .*no such repository"):
        load_model("some-org/other")
    with pytest.raises(ModelError, match=r"model some-org/tiny-1.0 .*no revision 'v9'"):
        load_model(NAME, revision="v9")
    assert not any("/resolve/" in path for path in hub.asked)


def test_a_repository_without_usable_weights(hub: Hub, tmp_path: Path) -> None:
    pickled = tmp_path / "pickled"
    pickled.mkdir()
    (pickled / "config.json").write_text("{}")
    (pickled / "pytorch_model.bin").write_bytes(b"")
    hub.repositories["some-org/pickled"] = Repository({OLD: pickled}, {"main": OLD})
    with pytest.raises(
        ModelError, match=r"some-org/pickled has no weights: neither \*.safetensors nor \*.gguf"
    ):
        load_model("some-org/pickled")


def test_a_hub_that_cannot_be_reached(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_ENDPOINT", "http://127.0.0.1:9")
    with pytest.raises(ModelError, match=r"hub http://127.0.0.1:9.* cannot be downloaded"):
        load_model(NAME)


@pytest.mark.parametrize(("content", "message"), [(None, "cannot be read"), ("\n", "is empty")])
def test_a_token_file_that_is_missing_or_empty(tmp_path: Path, content: str | None, message: str) -> None:
    path = tmp_path / "token"
    if content is not None:
        path.write_text(content)
    with pytest.raises(ModelError, match=message):
        load_model(NAME, hub_token=path)
