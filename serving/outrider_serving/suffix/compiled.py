"""The index of earlier text by compiled code: what `twin.py` says, a hundred times as fast."""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from threading import Thread

from outrider_serving.native.structs import SuffixLook
from outrider_serving.suffix.lookup import Found, Look, Size


class CompiledIndex:
    """See `lookup.SuffixIndex`.

    Attributes:
        handle: of the compiled index, as long as this lives.
    """

    __slots__ = ("_functions", "handle")

    def __init__(self, functions: ctypes.PyDLL, first: int, most: int) -> None:
        """Take the tokens of the first segment and of the largest, both powers of two from 128 on.

        Raises:
            MemoryError: there is not enough.
        """
        self._functions = functions
        self.handle: int | None = functions.outrider_suffix(first, most)
        if self.handle is None:
            raise MemoryError("no memory for an index")

    def __del__(self) -> None:
        if self.handle is not None:
            self._functions.outrider_suffix_close(self.handle)

    def discard(self) -> None:
        """See `lookup.SuffixIndex.discard`; by a thread, as to give megabytes back takes milliseconds."""
        handle, self.handle = self.handle, None
        Thread(target=_closing(self._functions._name), args=(handle,), daemon=True).start()

    @property
    def size(self) -> Size:
        """What it holds."""
        tokens, size = ctypes.c_int64(), ctypes.c_int64()
        self._functions.outrider_suffix_size(self.handle, ctypes.byref(tokens), ctypes.byref(size))
        return Size(tokens.value, size.value)

    def extend(self, tokens: Sequence[int], time: int = 0) -> None:
        """See `lookup.SuffixIndex.extend`."""
        ids = tokens if isinstance(tokens, array) and tokens.typecode == "i" else array("i", tokens)
        address, count = ids.buffer_info()
        if self._functions.outrider_suffix_extend(self.handle, address, count, time):
            raise MemoryError("no memory for a text in an index")

    def limit(self, most: int) -> None:
        """See `lookup.SuffixIndex.limit`."""
        self._functions.outrider_suffix_limit(self.handle, most)

    def end(self) -> None:
        """See `lookup.SuffixIndex.end`."""
        self._functions.outrider_suffix_end(self.handle)

    def drop(self) -> list[tuple[int, Sequence[int]]] | None:
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


@cache
def _closing(library: str) -> Callable[[int | None], None]:
    """What closes an index without the interpreter's lock."""
    close = ctypes.CDLL(library).outrider_suffix_close
    close.restype, close.argtypes = None, (ctypes.c_void_p,)
    return close


@cache
def _handles(count: int) -> type[ctypes.Array[ctypes.c_void_p]]:
    return ctypes.c_void_p * count
