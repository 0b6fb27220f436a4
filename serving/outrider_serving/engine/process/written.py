"""What requests have written, between the API, which hears of it elsewhere too, and the engine."""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from typing import Protocol

from outrider_serving.engine.process.protocol import Learn

_AT_ONCE = 2048
"""Tokens in one message to the engine, which takes them in 0.3 ms."""

_A_SECOND = 60_000
"""Tokens, which take less than a hundredth of the engine's time."""


class OutputListener(Protocol):
    """Is told what requests write that may be remembered; of each, until it has ended or is given up."""

    def began(self, request_id: str, history: str, *, private: bool) -> None:
        """A request that sees a history was sent to the engine; what a private one writes is nobody's."""

    def wrote(self, request_id: str, tokens: Sequence[int]) -> None:
        """Tokens were committed; one that did not begin is no error."""

    def ended(self, request_id: str) -> None:
        """Nothing more will come of it; one that did not begin is no error."""


def lessons(tenant: str, outputs: Sequence[array[int]], written: int) -> Iterator[tuple[Learn, float]]:
    """The messages that tell an engine of outputs, none of them long.

    Args:
        tenant: whose they are.
        outputs: token ids, each an array of type "i".
        written: when, in seconds since the epoch.

    Yields:
        (message, seconds to wait after it while requests run).
    """
    batch, tokens = list[bytes](), 0
    for output in outputs:
        for at in range(0, len(output), _AT_ONCE):
            piece = output[at : at + _AT_ONCE]
            if tokens + len(piece) > _AT_ONCE:
                yield Learn(tenant, tuple(batch), written), tokens / _A_SECOND
                batch, tokens = [], 0
            batch.append(piece.tobytes())
            tokens += len(piece)
    if batch:
        yield Learn(tenant, tuple(batch), written), tokens / _A_SECOND
