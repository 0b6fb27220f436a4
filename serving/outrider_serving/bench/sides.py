"""What generates: the interface that the two sides of a comparison share."""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Protocol, TypeVar

from outrider_serving.bench.coverage import Written
from outrider_serving.bench.results import BenchError, Run
from outrider_serving.bench.workloads import Job

Result = TypeVar("Result")


class Side(Protocol):
    """One of the two that are compared."""

    @property
    def name(self) -> str:
        """What tables call it."""
        ...

    def prepare(self, job: Job) -> tuple[Written, ...]:
        """Answer what a workload has stored, before its first run; what that gave, where it is known.

        Nothing else that was answered before may be proposed from then on, as far as the side can forget.

        Raises:
            BenchError: it could not.
        """
        ...

    def run(self, job: Job) -> Run:
        """Generate a workload's requests, to the last token. Nothing of them is remembered.

        Raises:
            BenchError: it could not, or gave more or fewer tokens than were asked for.
        """
        ...

    def close(self) -> None:
        """Give back what it holds; the last call."""
        ...


def check_lengths(run: Run, job: Job, side: str) -> Run:
    """The run, if each request gave as many tokens as were asked for.

    Raises:
        BenchError: one gave more or fewer: speeds of other work cannot be compared.
    """
    for number, stream in enumerate(run.streams):
        if stream.tokens != job.tokens:
            raise BenchError(
                f"{side}, workload {job.workload.name}: request {number} gave {stream.tokens} tokens, "
                f"but {job.tokens} were asked for"
            )
    return run


def alone(call: Callable[[], Result]) -> Result:
    """The result of a call in a thread that ends with it.

    A thread that has run torch's parallel operations keeps workers as long as it lives, and workers of
    several threads, together more than there are cores, slow each other down. So no side may leave any to
    the other.
    """
    with ThreadPoolExecutor(max_workers=1, thread_name_prefix="outrider-bench") as thread:
        return thread.submit(call).result()
