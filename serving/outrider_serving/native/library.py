"""Finds the compiled library for this machine's CPU."""

from __future__ import annotations

import ctypes
import logging
from functools import cache
from pathlib import Path

import torch

from outrider_serving.native import structs
from outrider_serving.native.build import Variant, variants
from outrider_serving.native.structs import Batch, ClockRow, LawRow, Model, SuffixLook

logger = logging.getLogger(__name__)

TYPES = {torch.bfloat16: structs.BFLOAT16, torch.float32: structs.FLOAT32, torch.float64: structs.FLOAT64}
"""What compiled code computes with."""


class Library:
    """The compiled functions.

    Attributes:
        name: which kind of CPU it was compiled for.
        suffix: the functions of suffix.cpp.
    """

    def __init__(self, variant: Variant) -> None:
        """Load it.

        Raises:
            OSError: it is not there, or does not fit this machine.
        """
        torch.get_num_threads()  # torch has loaded its OpenMP, in which the library finds the functions
        self.name = variant.name
        self._functions = functions = ctypes.CDLL(str(variant.path))
        functions.outrider_decoder.argtypes = [ctypes.POINTER(Model)]
        functions.outrider_decoder.restype = ctypes.c_void_p
        functions.outrider_run.argtypes = [ctypes.c_void_p, ctypes.POINTER(Batch), ctypes.c_int]
        functions.outrider_run.restype = ctypes.c_int
        functions.outrider_close.argtypes = [ctypes.c_void_p]
        functions.outrider_close.restype = None
        functions.outrider_law.argtypes = [
            ctypes.POINTER(LawRow),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int,
        ]
        functions.outrider_law.restype = ctypes.c_int
        functions.outrider_law_close.argtypes = [ctypes.POINTER(LawRow), ctypes.c_int64]
        functions.outrider_law_close.restype = None
        functions.outrider_coupled.argtypes = [
            ctypes.POINTER(ClockRow),
            ctypes.c_int64,
            ctypes.c_int64,
            ctypes.c_int,
        ]
        functions.outrider_coupled.restype = None
        self.suffix = suffix_functions(variant)

    def decoder(self, model: Model) -> int:
        """A decoder of the model, which must outlive it, until `close`."""
        handle = self._functions.outrider_decoder(ctypes.byref(model))
        assert handle is not None
        return int(handle)

    def run(self, decoder: int, batch: Batch, threads: int) -> None:
        """One pass, without the interpreter's lock.

        Raises:
            MemoryError: there is not enough for what it needs beside its results.
            IndexError: a token is not in the vocabulary, or a slot not in the store; nothing was written.
        """
        match self._functions.outrider_run(decoder, ctypes.byref(batch), threads):
            case 1:
                raise MemoryError("no memory for the pass")
            case 2:
                raise IndexError("a token or a slot is out of range")

    def close(self, decoder: int) -> None:
        """Give a decoder's memory back."""
        self._functions.outrider_close(decoder)

    def law(self, rows: ctypes.Array[LawRow], vocabulary: int, threads: int) -> bool:
        """The law of each row, without the interpreter's lock; `close_law` must follow, whatever came out.

        Returns:
            False where the highest logit of some row is not finite.

        Raises:
            MemoryError: there is not enough.
        """
        outcome = self._functions.outrider_law(rows, len(rows), vocabulary, threads)
        if outcome == 1:
            raise MemoryError("no memory for the law of the next token")
        return bool(outcome == 0)

    def close_law(self, rows: ctypes.Array[LawRow]) -> None:
        """Give back the memory of what was kept in rows."""
        self._functions.outrider_law_close(rows, len(rows))

    def coupled(self, rows: ctypes.Array[ClockRow], vocabulary: int, threads: int) -> None:
        """The token of each row, without the interpreter's lock."""
        self._functions.outrider_coupled(rows, len(rows), vocabulary, threads)


def suffix_functions(variant: Variant) -> ctypes.PyDLL:
    """Those of the index of earlier text. They take microseconds, in which the interpreter's lock is kept:
    to get it back from a busy thread may take a thousand times longer.
    """
    functions = ctypes.PyDLL(str(variant.path))
    handle, whole, pointer = ctypes.c_void_p, ctypes.c_int64, ctypes.c_void_p
    look, numbers = ctypes.POINTER(SuffixLook), ctypes.POINTER(ctypes.c_int64)
    for name, result, arguments in (
        ("outrider_suffix", handle, (whole, whole)),
        ("outrider_suffix_close", None, (handle,)),
        ("outrider_suffix_extend", ctypes.c_int, (handle, pointer, whole, whole)),
        ("outrider_suffix_limit", None, (handle, whole)),
        ("outrider_suffix_end", None, (handle,)),
        ("outrider_suffix_erase", whole, (handle, whole)),
        ("outrider_suffix_size", None, (handle, numbers, numbers)),
        ("outrider_suffix_oldest", ctypes.c_int, (handle, numbers, numbers)),
        ("outrider_suffix_drop", whole, (handle, pointer, pointer)),
        ("outrider_suffix_look_up", whole, (handle, pointer, whole, look)),
    ):
        function = getattr(functions, name)
        function.restype, function.argtypes = result, arguments
    return functions


def usable() -> tuple[Variant, ...]:
    """The kinds of CPU that this machine is one of, the best first."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
    except OSError:
        return ()
    flags = next((line.partition(":")[2] for line in lines if line.startswith(("flags", "Features"))), "")
    present = set(flags.split())
    return tuple(variant for variant in variants() if variant.features <= present)


@cache
def library() -> Library | None:
    """The best library for this machine, loaded once; None where there is none, which is logged."""
    best = next(iter(usable()), None)
    if best is None:
        logger.warning(
            "there are no kernels for this kind of CPU: models run slower, on transformers' own code"
        )
        return None
    try:
        return Library(best)
    except (OSError, AttributeError) as error:  # not there, or not of these sources
        logger.warning(
            "the CPU kernels cannot be used, so models run slower, on transformers' own code: %s", error
        )
        return None
