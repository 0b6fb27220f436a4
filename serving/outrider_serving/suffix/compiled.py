"""The index of earlier text by compiled code: what `twin.py` says.

At a million tokens it looks up some 16 times as fast, and takes text in 58 times.
"""

from __future__ import annotations

import ctypes
from array import array
from collections import deque
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache

from outrider_serving.native.structs import SuffixLook
from outrider_serving.suffix.lookup import Found, Look, Size

_AT_ONCE = 1 << 20
"""Bytes of memory that are given back within a call; to give back a megabyte takes some 0.15 ms."""


class GivenBack:
    """Gives the memory of indexes back, much of it in a thread of its own. Belongs to one thread."""

    def __init__(self, functions: ctypes.PyDLL) -> None:
        """Take the functions of the library."""
        self._functions = functions
        handle, handles = ctypes.c_void_p, ctypes.POINTER(ctypes.c_void_p)
        # What takes long lets go of the interpreter's lock; the other keeps it, like those of the library.
        close_all = ctypes.CFUNCTYPE(None, handles, ctypes.c_int64)
        self._close_all = close_all(("outrider_suffix_close_all", functions))
        self._leaving = ctypes.PYFUNCTYPE(handle, handle, handle)(("outrider_suffix_leaving", functions))
        self._thread = ThreadPoolExecutor(1, "outrider-memory")
        self._queue: deque[tuple[int | None, int]] = deque()
        self._begun = self._done = 0  # bytes; each is written by one thread only

    @property
    def bytes(self) -> int:
        """What was handed over and is not given back yet."""
        return self._begun - self._done

    def leftover(self, handle: int | None, heir: int | None) -> None:
        """Give back what an index has no use for any more, but for what another one has, or it itself."""
        if (left := self._leaving(handle, heir)) is not None:
            self.whole(left)

    def whole(self, handle: int | None) -> None:
        """Give back an index with all that it has; nobody may use it any more."""
        size = _size(self._functions, handle).bytes
        if size <= _AT_ONCE:
            self._functions.outrider_suffix_close(handle)
        else:
            self._begun += size
            self._queue.append((handle, size))
            self._thread.submit(self._give_back)

    def _give_back(self) -> None:
        """All that waits, by one call: to get the interpreter's lock after each may take 5 ms."""
        batch = [self._queue.popleft() for _ in range(len(self._queue))]
        self._close_all(_handles(len(batch))(*(handle for handle, _ in batch)), len(batch))
        self._done += sum(size for _, size in batch)


class CompiledIndex:
    """See `lookup.SuffixIndex`.

    Attributes:
        handle: of the compiled index, as long as this lives.
    """

    __slots__ = ("_functions", "_given_back", "handle")

    def __init__(self, functions: ctypes.PyDLL, given_back: GivenBack, first: int, most: int) -> None:
        """Take the tokens of the first segment and of the largest, both powers of two from 128 on.

        Raises:
            MemoryError: there is not enough.
        """
        self._functions, self._given_back = functions, given_back
        self.handle: int | None = functions.outrider_suffix(first, most)
        if self.handle is None:
            raise MemoryError("no memory for an index")

    def __del__(self) -> None:
        if self.handle is not None:
            self._functions.outrider_suffix_close(self.handle)

    def discard(self) -> None:
        """See `lookup.SuffixIndex.discard`."""
        handle, self.handle = self.handle, None
        self._given_back.whole(handle)

    @property
    def size(self) -> Size:
        """What it holds."""
        return _size(self._functions, self.handle)

    def extend(self, tokens: Sequence[int], time: int = 0) -> None:
        """See `lookup.SuffixIndex.extend`."""
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
        address, count = ids.buffer_info()
        if self._functions.outrider_suffix_extend(self.handle, address, count, time):
            raise MemoryError("no memory for a text in an index")

    def limit(self, most: int) -> None:
        """See `lookup.SuffixIndex.limit`."""
        self._functions.outrider_suffix_limit(self.handle, most)
        self._given_back.leftover(self.handle, self.handle)

    def end(self) -> None:
        """See `lookup.SuffixIndex.end`."""
        self._functions.outrider_suffix_end(self.handle)

    def drop(self, heir: CompiledIndex | None = None, /) -> list[tuple[int, Sequence[int]]] | None:
        """See `lookup.SuffixIndex.drop`."""
        tokens, several = ctypes.c_int64(), ctypes.c_int64()
        if not self._functions.outrider_suffix_oldest(
            self.handle, ctypes.byref(tokens), ctypes.byref(several)
        ):
            return None
        kept, texts = array("i", bytes(4 * tokens.value)), array("q", bytes(16 * several.value))
        count = self._functions.outrider_suffix_drop(
            self.handle, kept.buffer_info()[0], texts.buffer_info()[0]
        )
        self._given_back.leftover(self.handle, self.handle if heir is None else heir.handle)
        found, at = list[tuple[int, Sequence[int]]](), 0
        for time, length in zip(texts[: 2 * count : 2], texts[1 : 2 * count : 2], strict=True):
            found.append((time, kept[at : at + length]))
            at += length
        return found

    def erase(self, before: int) -> int:
        """See `lookup.SuffixIndex.erase`."""
        return int(self._functions.outrider_suffix_erase(self.handle, before))


class CompiledLookup:
    """See `lookup.Lookup`. Keeps what it hands over, so it belongs to one thread."""

    def __init__(self, functions: ctypes.PyDLL) -> None:
        """Take the functions of the library."""
        self._look_up = functions.outrider_suffix_look_up
        self._request = SuffixLook()
        self._argument = ctypes.byref(self._request)
        self._tokens, self._parents = array("i"), array("i")

    def __call__(
        self,
        text: CompiledIndex,
        scopes: Sequence[CompiledIndex],
        look: Look,
        depth: int,
        nodes: int,
        /,
    ) -> Found:
        """See `lookup.Lookup`.

        Raises:
            MemoryError: there is not enough.
        """
        request = self._request
        if len(self._tokens) < nodes:
            self._tokens, self._parents = array("i", bytes(4 * nodes)), array("i", bytes(4 * nodes))
            request.tokens, request.parents = self._tokens.buffer_info()[0], self._parents.buffer_info()[0]
        request.max_match, request.places, request.least = look.max_match, look.places, look.least
        request.depth, request.nodes = depth, nodes
        handles = _handles(len(scopes))(*(scope.handle for scope in scopes))
        count = self._look_up(text.handle, handles, len(scopes), self._argument)
        if count < 0:
            raise MemoryError("no memory to look a text up")
        if count == 0:
            return Found()
        return Found(tuple(self._tokens[:count]), tuple(self._parents[:count]), request.score, request.scope)


def _size(functions: ctypes.PyDLL, handle: int | None) -> Size:
    tokens, size = ctypes.c_int64(), ctypes.c_int64()
    functions.outrider_suffix_size(handle, ctypes.byref(tokens), ctypes.byref(size))
    return Size(tokens.value, size.value)


@cache
def _handles(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count
