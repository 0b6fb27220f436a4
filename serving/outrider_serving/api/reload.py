"""Changed files become the settings and keys in force; what cannot be taken leaves the earlier in force."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

from outrider_serving import watch
from outrider_serving.api import keys
from outrider_serving.api.state import Serving

logger = logging.getLogger(__name__)

MAX_REPORTED = 8
"""How many things wrong with the keys are reported one by one."""


def load_keys(serving: Serving, directory: Path) -> None:
    """Put a directory's keys in force before anybody is served; nobody's where it cannot be read."""
    try:
        contents = keys.read_directory(directory)
    except OSError as error:
        serving.apply_keys(keys.NO_KEYS, refused=_unreadable(error))
    else:
        _apply_keys(serving, contents)


def watchers(
    serving: Serving, *, settings_file: Path | None, keys_directory: Path | None
) -> list[Coroutine[None, None, None]]:
    """What follows the files, for ever."""
    following = []
    if settings_file is not None:
        following.append(
            watch.follow(
                partial(watch.read_settings, settings_file),
                partial(_apply_settings, serving),
                lambda error: serving.refuse_settings(str(error)),
            )
        )
    if keys_directory is not None:
        following.append(
            watch.follow(
                partial(keys.read_directory, keys_directory),
                partial(_apply_keys, serving),
                lambda error: serving.refuse_keys(_unreadable(error)),
            )
        )
    return following


def _apply_settings(serving: Serving, raw: bytes) -> None:
    try:
        serving.apply_settings(watch.parse_settings(raw))
    except watch.SettingsError as error:
        serving.refuse_settings(str(error))


def _apply_keys(serving: Serving, contents: keys.Contents) -> None:
    ring, wrong = keys.parse(contents, earlier=serving.keys or keys.NO_KEYS)
    if len(wrong) > MAX_REPORTED:
        wrong[MAX_REPORTED:] = [f"and {len(wrong) - MAX_REPORTED} more"]
    serving.apply_keys(ring, refused="; ".join(wrong) or None)


def _unreadable(error: Exception) -> str:
    return f"the directory cannot be read, and the earlier keys stay in force: {error}"
