"""The page tables of sequences: how they begin, grow, are offered to others, and are given up."""

from __future__ import annotations

from dataclasses import dataclass, field

from outrider_serving.engine.schedule.pages import Found, PagePool
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.sequence import Sequence


@dataclass(slots=True)
class _Private:
    """What is remembered of private requests that share pages with each other only."""

    members: int = 0
    names: set[bytes] = field(default_factory=set)


class PageTables:
    """Sets all that sequences say of pages, and `computed` where they begin or give their pages up.

    `enter` is the first call for a sequence and `leave` the last one.
    """

    def __init__(self, pool: PagePool, names: PageNames) -> None:
        """Keep tables in a pool, under names of the same page size."""
        self._pool = pool
        self._names = names
        self._private: dict[bytes, _Private] = {}

    def enter(self, sequence: Sequence) -> None:
        """Take note that a sequence is in the engine, waiting or running."""
        if sequence.request.private:
            self._private.setdefault(self._names.salt(sequence.request), _Private()).members += 1

    def leave(self, sequence: Sequence) -> None:
        """Give up what a sequence holds, for good; with the last one of a private group go its names."""
        self.vacate(sequence)
        if sequence.request.private:
            salt = self._names.salt(sequence.request)
            group = self._private[salt]
            group.members -= 1
            if group.members == 0:
                self._pool.forget(group.names)
                del self._private[salt]

    def find(self, sequence: Sequence, required: frozenset[str]) -> Found:
        """The pages that a waiting sequence may begin with; at least its last token is left to be run.

        Nothing is found where logprobs of the prompt are asked for: they need a row for each of its tokens.
        """
        if sequence.request.params.prompt_logprobs is not None:
            return Found()
        pages = self._reusable(len(sequence.tokens))
        return self._pool.lookup(self._named(sequence, pages)[:pages], required)

    def name_ahead(self, sequence: Sequence, most: int) -> int:
        """Name pages that `find` will ask for, at most so many; returns how many were named."""
        if sequence.request.params.prompt_logprobs is not None:
            return 0
        named, wanted = len(sequence.names), self._reusable(len(sequence.tokens))
        return len(self._named(sequence, min(wanted, named + most))) - named

    def prompt_name(self, sequence: Sequence) -> bytes | None:
        """Names what a waiting sequence could begin with once another one has read the same prompt.

        None where that is nothing.
        """
        pages = self._reusable(len(sequence.request.prompt))
        if pages == 0 or sequence.request.params.prompt_logprobs is not None:
            return None
        return self._named(sequence, pages)[pages - 1]

    def reads_prompt(self, sequence: Sequence) -> bool:
        """Whether a sequence that runs has yet to read some of what `prompt_name` names."""
        return sequence.computed < self._reusable(len(sequence.request.prompt)) * self._pool.page_size

    def begin(self, sequence: Sequence, found: Found) -> None:
        """Give a sequence the pages that were found for it just now, and free ones for the rest of it."""
        self._pool.acquire(found.pages)
        sequence.pages = list(found.pages)
        sequence.published = len(found.pages)
        sequence.computed = sequence.reused = len(found.pages) * self._pool.page_size
        sequence.hit_marks = found.marks
        self.grow(sequence, len(sequence.tokens))

    def lacking(self, sequence: Sequence, slots: int) -> int:
        """How many pages a table must grow by to have so many slots."""
        return max(0, self._pool.pages_for(slots) - len(sequence.pages))

    def grow(self, sequence: Sequence, slots: int) -> None:
        """Let a table have at least so many slots; raises ValueError where too few pages are free."""
        last = sequence.pages[-1] if sequence.pages else None
        sequence.pages += self._pool.allocate(self.lacking(sequence, slots), after=last)

    def grow_within(self, sequence: Sequence, slots: int) -> int:
        """Let a table have so many slots, or fewer where too few pages are free; returns how many of them."""
        room = (len(sequence.pages) + self._pool.free) * self._pool.page_size
        self.grow(sequence, min(slots, room))
        return min(slots, room)

    def publish(self, sequence: Sequence, marks: frozenset[str]) -> None:
        """Offer the pages that have become full to other sequences.

        Args:
            sequence: after `computed` has moved on.
            marks: of the proposers whose keys and values are in all of these pages.
        """
        full = min(sequence.computed, len(sequence.tokens)) // self._pool.page_size
        if full <= sequence.published:
            return
        names = self._named(sequence, full)[sequence.published : full]
        for page, name in zip(sequence.pages[sequence.published : full], names, strict=True):
            self._pool.publish(page, name, marks)
        if sequence.request.private:
            self._private[self._names.salt(sequence.request)].names.update(names)
        sequence.published = full

    def disown(self, sequence: Sequence) -> None:
        """Offer its pages to nobody any more, nor those that it took over from others."""
        self._pool.forget(sequence.names[: sequence.published])

    def trim(self, sequence: Sequence) -> None:
        """Give back the pages beyond the text, which proposals took."""
        keep = self._pool.pages_for(len(sequence.tokens))
        self._pool.release(sequence.pages[keep:])
        del sequence.pages[keep:]

    def vacate(self, sequence: Sequence) -> None:
        """Give up all pages; those that were published stay cached until something else needs them."""
        self._pool.release(sequence.pages)
        sequence.pages = []
        sequence.computed = sequence.published = 0

    def _reusable(self, tokens: int) -> int:
        """Full pages of a text of so many tokens, of which the last one is to be run."""
        return (tokens - 1) // self._pool.page_size

    def _named(self, sequence: Sequence, pages: int) -> list[bytes]:
        """The names of its leading full pages, at least of `pages`."""
        self._names.extend(sequence.names, sequence.request, sequence.tokens, pages)
        return sequence.names
