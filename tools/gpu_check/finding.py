"""What a part of the check found, one line each."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any


@dataclass(frozen=True, slots=True)
class Finding:
    """One line of the report.

    Attributes:
        what: what was looked at.
        figure: what came out, to be read.
        right: whether it is as it must be; None where nothing is required.
        numbers: what came out, raw.
    """

    what: str
    figure: str
    right: bool | None = None
    numbers: Mapping[str, Any] = field(default_factory=dict)


Findings = Iterator[Finding]
"""A part gives them as they come, so that what is found before a part fails is not lost."""


def skipped(why: str) -> Finding:
    """In the place of what cannot be looked at here."""
    return Finding("all of it", f"skipped: {why}")


def table(found: Mapping[str, Sequence[Finding]]) -> str:
    """A Markdown table of all parts."""
    marks = {True: "yes", False: "**NO**", None: ""}
    lines = ["| part | what | found | right |", "| --- | --- | --- | --- |"]
    lines += [
        f"| {part} | {one.what} | {one.figure.replace('|', '/')} | {marks[one.right]} |"
        for part, findings in found.items()
        for one in findings
    ]
    return "\n".join(lines) + "\n"
