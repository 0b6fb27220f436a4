"""What tenants' requests have written in this pod, and in those that share their log with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

from outrider_serving.suffix.indexes import Indexes
from outrider_serving.suffix.lookup import LEAST_OUTPUT, HistorySize, Size, SuffixIndex

BYTES_PER_TOKEN = 64
"""Of an index, at most: 44 for each token that there is room for, and the last segment is not full."""

_WAITING_SHARE = 4
"""One in so many tokens, at most, waits to be taken back."""

_TEXT_BYTES = 200
"""Of a text that waits, beside its tokens of 4 bytes each."""

_NOTHING = Size(0, 0)


@dataclass(slots=True)
class _Tenant:
    """One tenant's history, and its size when it was measured last."""

    index: SuffixIndex
    size: Size = _NOTHING


class _Text(NamedTuple):
    """An output of a tenant, and when it was written."""

    tenant: str
    time: int
    tokens: Sequence[int]


class _Waiting:
    """Texts that wait to be taken back, those first that wait longest.

    Attributes:
        size: of all of them.
    """

    def __init__(self) -> None:
        """There are none."""
        self.size = _NOTHING
        self._texts: deque[_Text] = deque()
        self._room = 0

    def put(self, text: _Text) -> None:
        """Let another one wait."""
        self._texts.append(text)
        self._count(text, 1)

    def bound(self, tokens: int) -> None:
        """Let those go that have waited longest, until there are at most so many tokens."""
        while self.size.tokens > tokens:
            self._next()

    def keep(self, wanted: Callable[[_Text], bool]) -> None:
        """Let all others go."""
        for _ in range(len(self._texts)):
            text = self._next()
            if wanted(text):
                self.put(text)

    def follow(self, tokens: int) -> Iterator[_Text]:
        """Those that may follow so many tokens of other text; what the first one lacks is saved up for it."""
        self._room += tokens
        while self._texts and len(self._texts[0].tokens) <= self._room:
            text = self._next()
            self._room -= len(text.tokens)
            yield text
        if not self._texts:
            self._room = 0

    def _next(self) -> _Text:
        text = self._texts.popleft()
        self._count(text, -1)
        return text

    def _count(self, text: _Text, more: int) -> None:
        tokens, size = len(text.tokens), 4 * len(text.tokens) + _TEXT_BYTES
        self.size = Size(self.size.tokens + more * tokens, self.size.bytes + more * size)


class History:
    """The histories of all tenants within one limit. Belongs to the thread of the steps.

    What is too much goes from the tenant that has most, so each is sure of an equal share: first the oldest
    segment of its log, of which the texts that proposals were made from are taken back as if they were new,
    once, and not more of them at a time than other text comes; what waits for that counts, and is a quarter
    of the limit at most. A tenant that has one segment only goes as a whole, if nobody has more; of several,
    the one that was asked for longest ago.

    It is filled from when somebody first holds it, also while nobody does: who comes back finds it warm.
    """

    def __init__(self, indexes: Indexes) -> None:
        """Nothing is known of anyone."""
        self._indexes = indexes
        self._limits: dict[object, int] = {}
        self._limit = 0
        self._tenants: dict[str, _Tenant] = {}
        self._waiting = _Waiting()
        self._tokens = self._bytes = self._evicted = 0

    @property
    def indexes(self) -> Indexes:
        """What makes its indexes."""
        return self._indexes

    @property
    def kept(self) -> bool:
        """It is filled: somebody makes use of it, or did."""
        return self._limit > 0

    @property
    def size(self) -> HistorySize:
        """How large it is."""
        held = self._bytes + self._waiting.size.bytes + self._indexes.leaving()
        return HistorySize(
            len(self._tenants),
            self._tokens + self._waiting.size.tokens,
            held,
            self._evicted,
            kept=self.kept,
        )

    def hold(self, holder: object, tokens: int) -> None:
        """Fill it from now on; of several holders the one who wants most is heeded."""
        self._limits[holder] = tokens
        self._limit = max(self._limits.values())

    def release(self, holder: object) -> None:
        """Its holder makes no use of it any more; while nobody does, the limit stays."""
        self._limits.pop(holder, None)
        self._limit = max(self._limits.values(), default=self._limit)

    def index(self, tenant: str) -> SuffixIndex | None:
        """A tenant's log; None where there is nothing in it."""
        found = self._tenants.pop(tenant, None)
        if found is None:
            return None
        self._tenants[tenant] = found  # the one that was asked for last
        return found.index

    def learn(self, tenant: str, output: Sequence[int], time: int) -> None:
        """Remember an output, if this is kept.

        Args:
            tenant: whose it is.
            output: token ids.
            time: of any unit; see `erase`.
        """
        if not self.kept or len(output) < LEAST_OUTPUT:
            return
        self._add(tenant, output, time)
        for text in self._waiting.follow(len(output)):
            self._add(text.tenant, text.tokens, text.time)

    def purge(self, tenant: str) -> None:
        """Forget all that a tenant's requests have written."""
        if tenant in self._tenants:
            self._remove(tenant)
        self._waiting.keep(lambda text: text.tenant != tenant)

    def erase(self, before: int) -> None:
        """Forget what is of an earlier time."""
        self._waiting.keep(lambda text: text.time >= before)
        for tenant in self._tenants.values():
            tenant.index.erase(before)

    def _add(self, name: str, output: Sequence[int], time: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._indexes.log(self._limit))
        # What goes at once is about an eighth of what the tenant is sure of; of what it has, if that is more.
        sure = self._limit // len(self._tenants)
        tenant.index.limit(self._indexes.segment(max(sure, tenant.size.tokens)))
        tenant.index.extend(output, time)
        tenant.index.end()
        self._measure(tenant)
        self._waiting.bound(self._limit // _WAITING_SHARE)
        while self._full:
            self._evict(self._tenants.get(name))

    @property
    def _full(self) -> bool:
        waiting = self._waiting.size
        return (
            self._tokens + waiting.tokens > self._limit
            or self._bytes + waiting.bytes > self._limit * BYTES_PER_TOKEN
        )

    def _evict(self, writer: _Tenant | None) -> None:
        """Let the oldest segment go of the tenant that has most; who writes may use its memory."""
        name, largest = max(self._tenants.items(), key=lambda item: item[1].size.bytes)
        used = largest.index.drop(writer.index if writer is not None else None)
        if used is None:
            self._evicted += largest.size.tokens
            self._remove(name)
            return
        gone = -self._measure(largest)
        if writer is not None:
            self._measure(writer)
        self._evicted += gone
        self._take_back(name, used, gone // 4)

    def _measure(self, tenant: _Tenant) -> int:
        """Take note of its size; by how many tokens it has grown."""
        before, after = tenant.size, tenant.index.size
        tenant.size = after
        self._tokens += after.tokens - before.tokens
        self._bytes += after.bytes - before.bytes
        return after.tokens - before.tokens

    def _remove(self, name: str) -> None:
        tenant = self._tenants.pop(name)
        self._tokens -= tenant.size.tokens
        self._bytes -= tenant.size.bytes
        tenant.index.discard()

    def _take_back(self, tenant: str, texts: Sequence[tuple[int, Sequence[int]]], room: int) -> None:
        """Let texts wait to be taken back, the newest first, those that there is room for."""
        for time, text in reversed(texts):
            if len(text) <= room:
                room -= len(text)
                self._waiting.put(_Text(tenant, time, text))
        self._waiting.bound(self._limit // _WAITING_SHARE)
