"""Which tokens a request's text holds and how often its output does, as penalties see it."""

from __future__ import annotations

from array import array
from collections.abc import Iterable

import numpy as np
from numpy.typing import NDArray


class History:
    """Counts of tokens in the output, and with count 0 those that only the prompt holds.

    Kept in flat arrays, because they are read whole for every position that is verified.
    """

    def __init__(self, prompt: Iterable[int]) -> None:
        """Begin with no output."""
        self._places = {token: place for place, token in enumerate(dict.fromkeys(prompt))}
        self._ids = array("q", self._places)
        self._counts = array("q", [0] * len(self._ids))

    def append(self, tokens: Iterable[int]) -> None:
        """Count committed tokens."""
        for token in tokens:
            place = self._places.setdefault(token, len(self._ids))
            if place == len(self._ids):
                self._ids.append(token)
                self._counts.append(0)
            self._counts[place] += 1

    def along(self, path: Iterable[int]) -> tuple[NDArray[np.int64], NDArray[np.int64]]:
        """Distinct tokens and their counts, were the tokens of the path committed too."""
        ids, counts = list[int](), list[int]()
        seen = np.array(self._counts, dtype=np.int64)
        for token in path:
            if (place := self._places.get(token)) is not None:
                seen[place] += 1
            elif token in ids:
                counts[ids.index(token)] += 1
            else:
                ids.append(token)
                counts.append(1)
        if not ids:
            return np.array(self._ids, dtype=np.int64), seen
        known = np.array(self._ids, dtype=np.int64)
        return np.concatenate((known, np.array(ids))), np.concatenate((seen, np.array(counts)))
