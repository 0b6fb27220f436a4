"""Changed files become the settings and keys in force; what cannot be taken leaves the earlier in force."""

from __future__ import annotations

import logging
from collections.abc import Coroutine
from functools import partial
from pathlib import Path

from outrider_serving import logs, watch
from outrider_serving.api import keys
from outrider_serving.api.state import Serving

logger = logging.getLogger(__name__)


def first_keys(directory: Path | None) -> keys.KeyRing | None:
    """The keys to start with: None where the API is open; nobody's where the directory cannot be taken."""
    if directory is None:
        return None
    try:
        ring = keys.parse(keys.read_directory(directory))
    except (OSError, keys.KeysError) as error:
        _keys_refused(error, "every request is refused")
        return keys.NO_KEYS
    _log_keys(ring)
    return ring


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
                partial(_keys_refused, consequence="the earlier keys stay in force"),
            )
        )
    return following


def _apply_settings(serving: Serving, raw: bytes) -> None:
    try:
        serving.apply_settings(watch.parse_settings(raw))
    except watch.SettingsError as error:
        serving.refuse_settings(str(error))


def _apply_keys(serving: Serving, contents: keys.Contents) -> None:
    try:
        ring = keys.parse(contents)
    except keys.KeysError as error:
        _keys_refused(error, "the earlier keys stay in force")
        return
    if ring != serving.keys:
        serving.keys = ring
        _log_keys(ring)


def _log_keys(ring: keys.KeyRing) -> None:
    if ring.tenants:
        logs.event(logger, "keys in force", tenants=ring.tenants, keys=len(ring.digests))
    else:
        logs.event(logger, "there are no keys: every request is refused", logging.ERROR)


def _keys_refused(error: Exception, consequence: str) -> None:
    logs.event(logger, f"keys refused: {consequence}", logging.ERROR, reason=str(error))
