"""What flags of the `outrider` command accept: types of argparse, which say what came and what is allowed."""

from __future__ import annotations

import argparse
import math
import re
from collections.abc import Callable
from enum import Enum
from typing import TypeVar

Choice = TypeVar("Choice", bound=Enum)

LARGEST = 2**31 - 1
"""Of a count."""


def number(minimum: int, maximum: int, allowed: str) -> Callable[[str], int]:
    """A whole number from `minimum` to `maximum`, which `allowed` says in words."""

    def parse(text: str) -> int:
        try:
            value = int(text)
        except ValueError:
            value = minimum - 1
        if not minimum <= value <= maximum:
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return parse


port = number(0, 65535, "a port (0 to 65535)")
count = number(1, LARGEST, "a whole number of at least 1")


def one_of(kind: type[Choice]) -> Callable[[str], Choice]:
    """A member of an enumeration, by its value."""

    def parse(text: str) -> Choice:
        try:
            return kind(text)
        except ValueError as error:
            allowed = ", ".join(str(member.value) for member in kind)
            raise argparse.ArgumentTypeError(f"{text!r} is none of {allowed}") from error

    return parse


def real(holds: Callable[[float], bool], allowed: str) -> Callable[[str], float]:
    """A number for which something holds, which `allowed` says in words; it does not hold for NaN."""

    def parse(text: str) -> float:
        try:
            value = float(text)
        except ValueError:
            value = math.nan
        if not holds(value):
            raise argparse.ArgumentTypeError(f"{text!r} is not {allowed}")
        return value

    return parse


seconds = real(lambda value: 0 <= value < 86_400, "a number of seconds (0 to 86400)")
share = real(lambda value: 0 < value <= 1, "a share (over 0, at most 1)")


def positive_seconds(text: str) -> float:
    """Seconds over 0."""
    value = seconds(text)
    if value == 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of seconds over 0")
    return value


_UNITS = {"": 1, "Ki": 1 << 10, "Mi": 1 << 20, "Gi": 1 << 30}


def size(text: str) -> int:
    """Bytes, perhaps in Ki, Mi or Gi."""
    found = re.fullmatch(r"(\d{1,15})(Ki|Mi|Gi)?", text, re.ASCII)
    if found is None:
        raise argparse.ArgumentTypeError(f"{text!r} is not a number of bytes, as 1073741824 or 1Gi")
    return int(found[1]) * _UNITS[found[2] or ""]


def text(text: str) -> str:
    """A text that is not blank and not long."""
    if not text.strip() or len(text) > 1024:
        raise argparse.ArgumentTypeError(f"{text[:80]!r} is not a text of 1 to 1024 characters")
    return text
