"""Reads all tombstones of a model, in pieces: they may be many, and whoever reads has other things to do."""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator

from outrider_serving.suffix.shared import replies
from outrider_serving.suffix.shared.connection import Link
from outrider_serving.suffix.shared.keys import Keys

_TOGETHER = 500
"""About so many come at a time: 3 ms of the event loop."""

_MOST_PIECES = 20_000


def new_version() -> str:
    """What a change gives tombstones: unlike that of any other change, also of another Redis."""
    return secrets.token_hex(8)


async def tombstones(link: Link, keys: Keys) -> AsyncIterator[dict[str, int]]:
    """Tenants and the ids of their last purges, a piece after the other; some may come twice.

    What comes in meanwhile may be missed; what is there all the time is not.
    """
    cursor = b"0"
    for _ in range(_MOST_PIECES):
        answer = await link.call("HSCAN", keys.tombstones, cursor, "COUNT", _TOGETHER)
        following, some = replies.items(answer, 2)
        yield replies.tombstones(some)
        cursor = replies.text(following)
        if cursor == b"0":
            return
    raise replies.NonsenseError("the tombstones have no end")
