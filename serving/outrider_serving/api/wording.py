"""How values and places of a request are spelled in an error message."""

from __future__ import annotations

import json
from typing import Any

LONGEST = 80
"""Most characters of a client's value that an error repeats."""


def shown(value: Any) -> str:
    """A value as JSON, cut short."""
    # A large container is described, not walked; what is in a small one is walked until enough is shown.
    if isinstance(value, dict) and len(value) > 4:
        return f"an object with {len(value)} fields"
    if isinstance(value, list) and len(value) > 8:
        return f"a list of {len(value)}"
    text = ""
    for piece in json.JSONEncoder().iterencode(value[:LONGEST] if isinstance(value, str) else value):
        text += piece
        if len(text) > LONGEST:
            return text[:LONGEST] + "..."
    return text


def place(loc: tuple[int | str, ...]) -> str:
    """A pydantic location as one writes it: messages[0].content."""
    text = ""
    for part in loc:
        text += f"[{part}]" if isinstance(part, int) else f".{part}" if text else str(part)
    return text[:LONGEST]
