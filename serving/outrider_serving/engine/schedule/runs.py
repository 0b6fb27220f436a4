"""A set of unused pages that knows which of them are neighbours."""

from __future__ import annotations

import heapq
from collections.abc import Iterator

_SLACK = 64
"""Outdated entries of the heap, beyond one for each run, that make it worth being built anew."""


class Runs:
    """Pages as maximal runs of neighbours; an operation takes constant or amortised logarithmic time."""

    def __init__(self, pages: int) -> None:
        """Begin with the pages 0 to `pages` - 1, at least one."""
        self._length: dict[int, int] = {}  # of the run that begins with a page
        self._first: dict[int, int] = {}  # of the run that ends with a page
        self._heap: list[tuple[int, int]] = []  # (-length, first) of every run, and of some that are no more
        self._pages = pages
        self._insert(0, pages)

    def __len__(self) -> int:
        """How many pages there are, in all runs."""
        return self._pages

    def __iter__(self) -> Iterator[int]:
        """All pages, in no particular order."""
        for first, length in self._length.items():
            yield from range(first, first + length)

    def length(self, first: int) -> int:
        """Length of the run that begins with a page; 0 where none does."""
        return self._length.get(first, 0)

    def longest(self) -> tuple[int, int]:
        """First page and length of the longest run, the lowest of equal ones; there must be a page."""
        while self._length.get(self._heap[0][1]) != -self._heap[0][0]:
            heapq.heappop(self._heap)
        length, first = self._heap[0]
        return first, -length

    def add(self, page: int) -> None:
        """Put in a page that is not in the set."""
        first, length = page, 1
        if page - 1 in self._first:
            first = self._first[page - 1]
            length += self._delete(first)
        if page + 1 in self._length:
            length += self._delete(page + 1)
        self._insert(first, length)
        self._pages += 1

    def take(self, first: int, count: int, skip: int = 0) -> range:
        """Take out the `count` pages behind the `skip` leading ones of the run that begins with `first`."""
        length = self._delete(first)
        begin, end = first + skip, first + skip + count
        if skip:
            self._insert(first, skip)
        if end < first + length:
            self._insert(end, first + length - end)
        self._pages -= count
        return range(begin, end)

    def _insert(self, first: int, length: int) -> None:
        self._length[first] = length
        self._first[first + length - 1] = first
        if len(self._heap) > 2 * len(self._length) + _SLACK:
            self._heap = [(-length, first) for first, length in self._length.items()]
            heapq.heapify(self._heap)
        else:
            heapq.heappush(self._heap, (-length, first))

    def _delete(self, first: int) -> int:
        length = self._length.pop(first)
        del self._first[first + length - 1]
        return length
