"""Files that change under a running pod: polled, compared by content, applied when they differ.

A mounted ConfigMap or Secret is replaced by moving a symbolic link, which no file watch reports in the
same way everywhere; reading a few kilobytes once a second costs nothing and always works.
"""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

from outrider_serving.settings import PodSettings

POLL_SECONDS = 1.0
"""How long a change may go unnoticed."""

Content = TypeVar("Content")


class SettingsError(ValueError):
    """A settings file that cannot be used; the message names the field and what is allowed."""


def read_settings(path: Path) -> bytes:
    """The content of a settings file; SettingsError if it cannot be read."""
    try:
        return path.read_bytes()
    except OSError as error:
        raise SettingsError(f"cannot read {path}: {error.strerror}") from error


def parse_settings(raw: bytes) -> PodSettings:
    """The settings in a file's content (JSON); SettingsError naming the first field at fault."""
    try:
        return PodSettings.model_validate_json(raw)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the settings"
        raise SettingsError(f"{field}: {first['msg']}") from error


async def follow(
    read: Callable[[], Content],
    apply: Callable[[Content], None],
    failed: Callable[[Exception], None],
    *,
    interval: float = POLL_SECONDS,
) -> None:
    """Call `apply` with what `read` returns at first and whenever it has changed, for ever.

    `read` has a thread of its own, so that a revoked key waits for nobody's work. `failed` is told once when
    reading begins to fail (OSError or SettingsError); when it works again the content is applied anew. Only
    a digest of it is kept.
    """
    seen: bytes | None = None
    failing = False
    thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="watch")
    try:
        while True:
            await asyncio.sleep(interval)
            try:
                content = await asyncio.get_running_loop().run_in_executor(thread, read)
            except (OSError, SettingsError) as error:
                if not failing:
                    failed(error)
                failing, seen = True, None
                continue
            failing = False
            digest = _digest(content)
            if digest != seen:
                seen = digest
                apply(content)
    finally:
        thread.shutdown(wait=False)


def _digest(content: object) -> bytes:
    return hashlib.sha256(repr(content).encode()).digest()
