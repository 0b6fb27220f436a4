"""The fixed pages of keys and values: who holds them, which text they contain, which are used next.

Bookkeeping only: a page is a number, and what lies in its slots is the model runner's. A page is

* *held* by one or more page tables;
* *cached*: held by none, but named, so that a text that begins alike may take it up again; or
* *unused*.

Unused pages are given out before cached ones. Of those the least recently held goes first, and of one text
the later page before the earlier one, without which it could not be found.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from outrider_serving.engine.schedule.runs import Runs


@dataclass(frozen=True, slots=True)
class Found:
    """The leading pages of a text that are there already.

    Attributes:
        pages: in the order of the text.
        marks: those that all of these pages bear; none where there is no page.
    """

    pages: tuple[int, ...] = ()
    marks: frozenset[str] = frozenset()


@dataclass(frozen=True, slots=True)
class _Label:
    """What is known of the content of a page."""

    name: bytes
    marks: frozenset[str]


class PagePool:
    """All pages of one engine.

    A mark of a named page says that a proposer has keys and values of its own in it.
    """

    def __init__(self, total: int, page_size: int) -> None:
        """Make a pool of unused pages.

        Args:
            total: number of pages, at least 1.
            page_size: tokens in a page, at least 1.
        """
        self.total = total
        self.page_size = page_size
        self._holders = [0] * total
        self._labels: dict[int, _Label] = {}
        self._index: dict[bytes, int] = {}
        self._cached: OrderedDict[int, None] = OrderedDict()  # least recently held first
        self._unused = Runs(total)

    @property
    def free(self) -> int:
        """Pages that nobody holds, cached ones included."""
        return len(self._unused) + len(self._cached)

    @property
    def cached(self) -> int:
        """Pages that nobody holds but that are named."""
        return len(self._cached)

    @property
    def held(self) -> int:
        """Pages in at least one page table."""
        return self.total - self.free

    def pages_for(self, tokens: int) -> int:
        """How many pages so many tokens fill, the last one perhaps in part."""
        return -(-tokens // self.page_size)

    def allocate(self, count: int, after: int | None = None) -> list[int]:
        """Hold `count` free pages, neighbours where possible: contiguous slots are read without a copy.

        Args:
            count: how many.
            after: the page to go on behind, that is the last one of the table.

        Raises:
            ValueError: fewer pages are free.
        """
        if count > self.free:
            raise ValueError(f"{count} pages were asked for, {self.free} are free")
        while len(self._unused) < count:
            self._evict()
        taken: list[int] = []
        if after is not None and count:
            taken.extend(self._behind(after, count))
        while len(taken) < count:
            taken.extend(self._within_longest(count - len(taken)))
        for page in taken:
            self._holders[page] = 1
        return taken

    def release(self, pages: Sequence[int]) -> None:
        """Let go of pages of one text, given in its order; named ones that nobody else holds stay cached."""
        for page in reversed(pages):
            self._holders[page] -= 1
            if self._holders[page] == 0:
                if page in self._labels:
                    self._cached[page] = None
                else:
                    self._unused.add(page)

    def lookup(self, names: Iterable[bytes], required: frozenset[str] = frozenset()) -> Found:
        """The leading pages that exist under these names and bear the required marks; holds nothing."""
        pages: list[int] = []
        marks: frozenset[str] | None = None
        for name in names:
            page = self._index.get(name)
            if page is None or not required <= self._labels[page].marks:
                break
            pages.append(page)
            marks = self._labels[page].marks if marks is None else marks & self._labels[page].marks
        return Found(tuple(pages), marks or frozenset())

    def cached_among(self, pages: Iterable[int]) -> int:
        """How many of these pages are cached, so that to acquire them leaves fewer free ones."""
        return sum(page in self._cached for page in pages)

    def acquire(self, pages: Iterable[int]) -> None:
        """Hold pages that `lookup` found just now."""
        for page in pages:
            self._cached.pop(page, None)
            self._holders[page] += 1

    def publish(self, page: int, name: bytes, marks: frozenset[str] = frozenset()) -> None:
        """Name a held page whose slots are all written and will not be written again while it has the name.

        Of two pages with one name the first stays the named one, unless it lacks a mark of the second and has
        none that the second lacks: otherwise a text that was once read without a proposer would keep this
        proposer from ever finding its own.
        """
        earlier = self._index.get(name)
        if earlier is not None:
            if not self._labels[earlier].marks < marks:
                return
            self._unname(earlier)
        self._labels[page] = _Label(name, marks)
        self._index[name] = page

    def forget(self, names: Iterable[bytes]) -> None:
        """Take names out of the index at once; pages that nobody holds become unused."""
        for name in names:
            if name in self._index:
                self._unname(self._index[name])

    def drop_mark(self, mark: str) -> None:
        """Take a mark off all pages: the proposer's keys and values are gone."""
        for page, label in self._labels.items():
            if mark in label.marks:
                self._labels[page] = _Label(label.name, label.marks - {mark})

    def check(self) -> None:
        """Raise AssertionError unless every page is in exactly one state and the index fits the pages."""
        held = {page for page, holders in enumerate(self._holders) if holders > 0}
        states = [*held, *self._cached, *self._unused]
        assert sorted(states) == list(range(self.total)), "a page is in no state or in two"
        assert min(self._holders) >= 0, "a page was released more often than held"
        assert {label.name: page for page, label in self._labels.items()} == self._index
        assert self._labels.keys() >= self._cached.keys(), "a cached page has no name"
        assert self._labels.keys().isdisjoint(self._unused), "an unused page has a name"
        assert len(self._unused) == sum(1 for _ in self._unused)

    def _behind(self, page: int, count: int) -> range:
        """The unused pages that follow a held one, at most `count`."""
        length = self._unused.length(page + 1)
        return self._unused.take(page + 1, min(count, length)) if length else range(0)

    def _within_longest(self, count: int) -> range:
        """At most `count` pages of the longest run.

        Where a held page lies just before the run, half of what is left over stays between the two, so that
        both tables can grow without a gap.
        """
        first, length = self._unused.longest()
        count = min(count, length)
        crowded = first > 0 and self._holders[first - 1] > 0
        return self._unused.take(first, count, skip=(length - count) // 2 if crowded else 0)

    def _evict(self) -> None:
        page, _ = self._cached.popitem(last=False)
        del self._index[self._labels.pop(page).name]
        self._unused.add(page)

    def _unname(self, page: int) -> None:
        del self._index[self._labels.pop(page).name]
        if page in self._cached:
            del self._cached[page]
            self._unused.add(page)
