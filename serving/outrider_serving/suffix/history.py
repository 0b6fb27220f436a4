"""What tenants' requests have written in this pod, and in those that share their log with it."""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass

from outrider_serving.suffix.indexes import Indexes
from outrider_serving.suffix.lookup import LEAST_OUTPUT, HistorySize, Size, SuffixIndex

BYTES_PER_TOKEN = 64
"""Of an index, at most: 44 for each token that there is room for, and the last segment is not full."""


_NOTHING = Size(0, 0)


@dataclass(slots=True)
class _Tenant:
    """One tenant's history, and its size when it was measured last."""

    index: SuffixIndex
    size: Size = _NOTHING


class History:
    """The histories of all tenants within one limit. Belongs to the thread of the steps.

    What is too much goes from the tenant that has most, so each is sure of an equal share: first the oldest
    segment of its log, of which the texts that proposals were made from are taken back as if they were new,
    once, and not more of them at a time than other text comes. A tenant that has one segment only goes as a
    whole, if nobody has more; of several, the one that was asked for longest ago.

    It is filled while somebody holds it, and stays afterwards: when a proposer comes back, it is warm.
    """

    def __init__(self, indexes: Indexes) -> None:
        """Nothing is known of anyone."""
        self._indexes = indexes
        self._limits: dict[object, int] = {}
        self._limit = 0
        self._tenants: dict[str, _Tenant] = {}
        self._used: deque[tuple[str, int, Sequence[int]]] = deque()
        self._tokens = self._bytes = self._evicted = 0

    @property
    def indexes(self) -> Indexes:
        """What makes its indexes."""
        return self._indexes

    @property
    def held(self) -> bool:
        """Somebody makes use of it."""
        return bool(self._limits)

    @property
    def size(self) -> HistorySize:
        """How large it is."""
        return HistorySize(len(self._tenants), self._tokens, self._bytes, self._evicted, kept=self.held)

    def hold(self, holder: object, tokens: int) -> None:
        """Fill it from now on; of several holders the one who wants most is heeded."""
        self._limits[holder] = tokens
        self._limit = max(self._limits.values())

    def release(self, holder: object) -> None:
        """It is not filled for this one any more."""
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
        """Remember an output, if somebody holds this.

        Args:
            tenant: whose it is.
            output: token ids.
            time: of any unit; see `erase`.
        """
        if not self.held or len(output) < LEAST_OUTPUT:
            return
        self._add(tenant, output, time)
        spent = 0
        while self._used and spent + len(self._used[0][2]) <= len(output):
            owner, then, text = self._used.popleft()
            spent += len(text)
            self._add(owner, text, then)

    def purge(self, tenant: str) -> None:
        """Forget all that a tenant's requests have written."""
        if tenant in self._tenants:
            self._remove(tenant)
        self._used = deque(text for text in self._used if text[0] != tenant)

    def erase(self, before: int) -> None:
        """Forget what is of an earlier time."""
        self._used = deque(text for text in self._used if text[1] >= before)
        for tenant in self._tenants.values():
            tenant.index.erase(before)

    def _add(self, name: str, output: Sequence[int], time: int) -> None:
        tenant = self._tenants.get(name)
        if tenant is None:
            tenant = self._tenants[name] = _Tenant(self._indexes.log(self._limit))
        # What goes at once is an eighth of the tenant's share, which is the less the more there are.
        tenant.index.limit(self._indexes.segment(self._limit // len(self._tenants)))
        tenant.index.extend(output, time)
        tenant.index.end()
        self._measure(tenant)
        while self._tokens > self._limit or self._bytes > self._limit * BYTES_PER_TOKEN:
            self._evict()

    def _evict(self) -> None:
        """Let the oldest segment go of the tenant that has most."""
        name, largest = max(self._tenants.items(), key=lambda item: item[1].size.bytes)
        used = largest.index.drop()
        if used is None:
            self._evicted += largest.size.tokens
            self._remove(name)
            return
        gone = -self._measure(largest)
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
        """Queue texts again, the newest of them, as far as there is room for their tokens."""
        for time, text in reversed(texts):
            room -= len(text)
            if room < 0:
                return
            self._used.append((tenant, time, text))
