"""The environment variables, and what is said about wrong ones."""

from __future__ import annotations

from pathlib import Path

import pytest

from outrider_local.report import EXIT_USAGE, ProblemError
from outrider_local.settings import Settings, from_environment


def read(**variables: str) -> Settings:
    return from_environment({"HOME": "/home/me", **variables})


def test_defaults() -> None:
    settings = read()
    assert (settings.name, settings.port, settings.api_port) == ("outrider", 8000, 16443)
    assert settings.state == Path("/home/me/.local/state/outrider/outrider")
    assert settings.cache == Path("/home/me/.cache/outrider")
    assert (settings.checkout / "pyproject.toml").exists()


def test_another_process_arrives_at_the_same_settings() -> None:
    settings = read(
        OUTRIDER_NAME="two", OUTRIDER_PORT="9000", XDG_STATE_HOME="/data/state", XDG_CACHE_HOME="/data/c"
    )
    assert settings.command("down", knobs=("OUTRIDER_NAME",)) == "make down OUTRIDER_NAME=two"
    assert from_environment({"HOME": "/root", **settings.variables()}) == settings


@pytest.mark.parametrize(
    ("variables", "what", "advice"),
    [
        ({"OUTRIDER_NAME": "My Node"}, "OUTRIDER_NAME is 'My Node'", "lower-case"),
        ({"OUTRIDER_NAME": "x" * 41}, "OUTRIDER_NAME", "40"),
        ({"OUTRIDER_NAME": "../up"}, "OUTRIDER_NAME", "lower-case"),
        ({"OUTRIDER_PORT": "eighty"}, "OUTRIDER_PORT is 'eighty'", "1024 to 65535"),
        ({"OUTRIDER_PORT": "80"}, "OUTRIDER_PORT is '80'", "1024 to 65535"),
        ({"OUTRIDER_API_PORT": "70000"}, "OUTRIDER_API_PORT", "1024 to 65535"),
        ({"OUTRIDER_PORT": "9000", "OUTRIDER_API_PORT": "9000"}, "are both 9000", "different"),
        ({"XDG_STATE_HOME": "/var/lib"}, "/var of its own", "XDG_STATE_HOME"),
        ({"XDG_STATE_HOME": "/srv/my state"}, "mounts cannot name", "XDG_STATE_HOME"),
        ({"XDG_STATE_HOME": "/run/user/1000"}, "/run of its own", "XDG_STATE_HOME"),
    ],
)
def test_wrong_values(variables: dict[str, str], what: str, advice: str) -> None:
    with pytest.raises(ProblemError, match=what) as caught:
        read(**variables)
    assert advice in caught.value.advice
    assert caught.value.exit_code == EXIT_USAGE


def test_a_relative_folder_is_ignored_as_the_xdg_specification_asks() -> None:
    assert read(XDG_CACHE_HOME="cache").cache == Path("/home/me/.cache/outrider")
