"""What a person sees: progress lines, and problems that say what to do about them."""

from __future__ import annotations

import sys
import time

EXIT_USAGE = 2


class ProblemError(Exception):
    """Something a person has to know about: what is wrong, and what they can do."""

    def __init__(self, what: str, advice: str = "", exit_code: int = 1) -> None:
        super().__init__(what)
        self.what = what
        self.advice = advice
        self.exit_code = exit_code

    def __str__(self) -> str:
        if not self.advice:
            return self.what
        return f"{self.what}\n  what to do: {self.advice}"


def say(text: str = "") -> None:
    """Print a line at once, also when the output is a pipe."""
    print(text, flush=True)


def step(text: str) -> None:
    """Announce what is about to be done."""
    say(f"==> {text}")


def detail(text: str) -> None:
    """Add a line below the current step."""
    for line in text.splitlines() or [""]:
        say(f"    {line}")


def complain(problem: ProblemError) -> None:
    """Print a problem to standard error."""
    sys.stdout.flush()
    print(f"error: {problem}", file=sys.stderr, flush=True)


class Stopwatch:
    """Seconds since it was made, for progress lines."""

    def __init__(self) -> None:
        self._began = time.monotonic()

    @property
    def seconds(self) -> float:
        """The time so far."""
        return time.monotonic() - self._began

    def __str__(self) -> str:
        return f"{self.seconds:.1f} s"
