"""Decides who runs, and what each running request does in the next step. Plain bookkeeping, no clock."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from itertools import islice
from operator import attrgetter

from outrider_serving.engine.schedule.budget import share_out
from outrider_serving.engine.schedule.pages import PagePool
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.queue import FairQueue
from outrider_serving.engine.schedule.sequence import Sequence, end_tokens
from outrider_serving.engine.schedule.tables import PageTables
from outrider_serving.engine.types import DeadlineError, EngineError, Request

WATERMARK = 0.01
"""Share of all pages that admission leaves free beside one page for each running row."""

NAMED_AHEAD = 1 << 14
"""Tokens of waiting texts whose pages are named during one step: a millisecond's work, less than a pass."""

Wants = Callable[[Sequence], int]
RequiredMarks = Callable[[Sequence], frozenset[str]]


@dataclass(frozen=True, slots=True)
class EngineLimits:
    """What an engine has and how it is used.

    Attributes:
        pages: pages of keys and values.
        page_size: tokens in a page.
        max_running: most requests in a step.
        max_waiting: most requests that wait while all places are taken.
        step_tokens: most tokens, proposed ones included, in one target pass; at least `max_running`.

    Raises:
        ValueError: one of them is out of range; the message names it.
    """

    pages: int
    page_size: int
    max_running: int
    max_waiting: int
    step_tokens: int

    def __post_init__(self) -> None:
        for name, least in (("pages", 1), ("page_size", 1), ("max_running", 1), ("max_waiting", 0)):
            if getattr(self, name) < least:
                raise ValueError(f"{name} is {getattr(self, name)}, but must be at least {least}")
        if self.step_tokens < self.max_running:
            raise ValueError(
                f"step_tokens is {self.step_tokens}, but must be at least max_running ({self.max_running}): "
                "each running request commits a token in each step"
            )


@dataclass(frozen=True, slots=True)
class Work:
    """What one request does in a step.

    Attributes:
        sequence: the request; its page table has room for the tokens that are run and for `nodes` more.
        tokens: how many of its pending tokens are run, the first ones; at least 1.
        verifies: these are all its pending tokens, so the step commits at least one token.
        nodes: most proposed nodes that fit; 0 where it does not verify.
    """

    sequence: Sequence
    tokens: int
    verifies: bool
    nodes: int


@dataclass(frozen=True, slots=True)
class Plan:
    """One step.

    Attributes:
        work: in the order in which the requests began.
        began: requests that begin with this step, also those that begin anew.
        preempted: requests that have lost their pages and wait again; none of them is in `began`.
        ended: requests that are gone, and why: their deadline, or None where they were cancelled.
    """

    work: tuple[Work, ...] = ()
    began: tuple[Sequence, ...] = ()
    preempted: tuple[Sequence, ...] = ()
    ended: tuple[tuple[Sequence, EngineError | None], ...] = ()


class Scheduler:
    """Continuous batching over pages. Belongs to the step loop, which for each step calls

    1. `plan`, and runs its work;
    2. for each row moves `computed` on by what was run and kept, calls `commit` where it verified, `settle`;
    3. `finish` for each that has a finish reason or has failed.

    Between 1 and 2, while the device is at the work, `submit` and `cancel` may be called, and `prepare`.

    *Every request that runs ends.* A step runs a token of each row that decodes, and of the first that reads;
    so a row ends unless it is preempted. A row is preempted only for one of lower order or for want of room
    beside them, so never the lowest of those that run; alone it fits, as `submit` refuses what would not.
    Orders are given once, so each request has finitely many lower ones, and by induction all of them end.

    *None waits for ever.* Where the fair choice does not fit, nobody overtakes it: rows end, and an engine
    without rows admits it whatever it needs. A tenant that waits keeps its counter while those of the others
    grow, so its turn comes. A choice that is held back waits for a row of its call, which reads its prompt to
    the end, is preempted, or ends.
    """

    def __init__(self, limits: EngineLimits, names: PageNames | None = None) -> None:
        """Begin with no requests; `names` are those of pages (by default with a secret of their own)."""
        self.limits = limits
        self.pool = PagePool(limits.pages, limits.page_size)
        self._tables = PageTables(self.pool, names or PageNames(limits.page_size))
        self._queue = FairQueue(limits.max_waiting)
        self._sequences: dict[str, Sequence] = {}  # all, by the request's id
        self._running: dict[str, Sequence] = {}  # in the order in which they began
        self._cancelled: set[str] = set()
        self._arrivals = 0
        self._now = 0.0

    @property
    def running(self) -> int:
        """Requests that have begun."""
        return len(self._running)

    @property
    def waiting(self) -> int:
        """Requests that have not begun, or wait to begin anew."""
        return len(self._queue)

    @property
    def sequences(self) -> tuple[Sequence, ...]:
        """The requests that have begun, in that order."""
        return tuple(self._running.values())

    def submit(self, request: Request, eos_token_ids: frozenset[int] = frozenset()) -> Sequence:
        """Let a request wait.

        Args:
            request: what is asked for.
            eos_token_ids: the model's ends of sequence.

        Raises:
            QueueFullError: too many wait, altogether or of this tenant.
            ValueError: the prompt is empty, the id is taken, or the request would not fit into all pages.
        """
        if not request.prompt:
            raise ValueError("the prompt is empty")
        if request.id in self._sequences:
            raise ValueError(f"a request with the id {request.id} is in the engine")
        self.check_fits(request)
        sequence = Sequence(request, self._arrivals, end_tokens(request.params, eos_token_ids))
        self._queue.put(sequence, self.limits.max_running - self.running, self._now)
        self._arrivals += 1
        self._tables.enter(sequence)
        self._sequences[request.id] = sequence
        return sequence

    def check_fits(self, request: Request) -> None:
        """Raise ValueError if a request would not fit into all pages."""
        needed = self.pool.pages_for(len(request.prompt) + request.params.max_tokens)
        if needed > self.pool.total:
            raise ValueError(f"prompt and max_tokens need {needed} pages, there are {self.pool.total}")

    def cancel(self, request_id: str) -> None:
        """Let the next plan end a request; one that has ended, or never was, is no error."""
        if request_id in self._sequences:
            self._cancelled.add(request_id)

    def plan(self, now: float, wants: Wants, required_marks: RequiredMarks) -> Plan:
        """Decide the next step.

        Args:
            now: of the clock that deadlines are of.
            wants: most proposed nodes that a row which verifies in this step could use; 0 for none.
            required_marks: marks that cached pages must bear for a request to begin with them.
        """
        self._now = now
        ended = self._drop()
        preempted = self._make_room()
        began = () if preempted else self._admit(required_marks)
        shares = share_out(self.limits.step_tokens, self._running.values(), wants, self._take_slots)
        work = tuple(Work(s.sequence, s.tokens, s.verifies, s.nodes) for s in shares if s.tokens)
        return Plan(work, began, preempted, ended)

    def prepare(self) -> None:
        """Do ahead what the next plan would do whatever becomes of the present step; it decides nothing.

        That is to name the pages of texts that may begin: 0.6 ms for 8,000 tokens, where all else that admits
        a request takes 0.03 ms, and a plan for 64 rows 0.2 ms.
        """
        left = self.pool.pages_for(NAMED_AHEAD)
        for sequence in islice(self._queue, self.limits.max_running):
            left -= self._tables.name_ahead(sequence, left)

    def settle(self, sequence: Sequence, marks: frozenset[str] = frozenset()) -> None:
        """Take note of what a step added to a request: offer full pages to others, take back surplus ones.

        Args:
            sequence: one that was in the plan, after its `computed` and `tokens` have moved on.
            marks: of the proposers that have keys and values of their own for all leading `computed` tokens.
        """
        self._tables.publish(sequence, marks)
        self._tables.trim(sequence)
        if sequence.outputs:
            self._charge(sequence, len(sequence.tokens))

    def finish(self, sequence: Sequence, *, failed: bool = False) -> None:
        """Take out a request, running or waiting, and release what it holds.

        Nobody begins with the pages of one that has failed: what failed it may lie in them.
        """
        request_id = sequence.request.id
        del self._sequences[request_id]
        self._cancelled.discard(request_id)
        if failed:
            self._tables.disown(sequence)
        self._tables.leave(sequence)
        if self._running.pop(request_id, None) is not None:
            self._queue.ended(sequence, self._now)
        else:
            self._queue.remove(sequence)

    def _drop(self) -> tuple[tuple[Sequence, EngineError | None], ...]:
        """End what was cancelled and what is too late."""
        ended: list[tuple[Sequence, EngineError | None]] = []
        for request_id, sequence in self._sequences.items():
            deadline = sequence.request.deadline
            if request_id in self._cancelled:
                ended.append((sequence, None))
            elif deadline is not None and deadline <= self._now:
                ended.append((sequence, DeadlineError("the deadline of the request has passed")))
        for sequence, _ in ended:
            self.finish(sequence)
        return tuple(ended)

    def _make_room(self) -> tuple[Sequence, ...]:
        """Pages for the whole text of each row, the lowest order first, at the expense of the highest."""
        line = sorted(self._running.values(), key=attrgetter("order"))
        preempted: list[Sequence] = []
        served = 0
        while served < len(line):
            sequence = line[served]
            slots = len(sequence.tokens)
            if self._tables.lacking(sequence, slots) > self.pool.free:
                preempted.append(line.pop())
                self._preempt(preempted[-1])
            else:
                self._tables.grow(sequence, slots)
                served += 1
        return tuple(preempted)

    def _preempt(self, sequence: Sequence) -> None:
        """Release all pages of a running row; it will read its text again."""
        del self._running[sequence.request.id]
        self._tables.vacate(sequence)
        self._queue.put_back(sequence)

    def _admit(self, required_marks: RequiredMarks) -> tuple[Sequence, ...]:
        """Let waiting requests begin, in fair order, while there are places, tokens and pages for them."""
        began: list[Sequence] = []
        tokens = self.limits.step_tokens - sum(sequence.runnable for sequence in self._running.values())
        read = self._being_read(self._running.values())

        def held_back(waiting: Sequence) -> bool:
            return self._call(waiting) in read

        while tokens > 0 and self.running < self.limits.max_running:
            sequence = self._queue.head(held_back)
            if sequence is None or not self._begin(sequence, required_marks(sequence)):
                break
            began.append(sequence)
            tokens -= sequence.runnable
            read |= self._being_read([sequence])
        return tuple(began)

    def _begin(self, sequence: Sequence, required_marks: frozenset[str]) -> bool:
        """Let a waiting request run if its text fits and those that run can still grow; an idle engine may.

        The prompt is charged here, not as it is read, so that a tenant does not take all places at once.
        """
        found = self._tables.find(sequence, required_marks)
        needed = self.pool.pages_for(len(sequence.tokens)) - len(found.pages)
        free = self.pool.free - self.pool.cached_among(found.pages)
        spare = self.running + 1 + int(WATERMARK * self.pool.total)
        if needed + (spare if self._running else 0) > free:
            return False
        self._queue.take(sequence)
        self._running[sequence.request.id] = sequence
        self._tables.begin(sequence, found)
        sequence.paid = max(sequence.paid, sequence.reused)
        self._charge(sequence, len(sequence.request.prompt))
        return True

    def _being_read(self, running: Iterable[Sequence]) -> set[tuple[str, bytes]]:
        """What other choices of the same calls do well to wait for."""
        calls = (self._call(sequence) for sequence in running if self._tables.reads_prompt(sequence))
        return {call for call in calls if call is not None}

    def _call(self, sequence: Sequence) -> tuple[str, bytes] | None:
        """What a request shares with other choices of its call; None where there is nothing to share."""
        name = self._tables.prompt_name(sequence) if sequence.request.group else None
        return None if name is None else (sequence.request.group, name)

    def _charge(self, sequence: Sequence, upto: int) -> None:
        """Charge the tenant for the leading tokens of a text, each of them once, however often it is run."""
        prompt = len(sequence.request.prompt)
        self._queue.charge(
            sequence.request.tenant,
            prompt=max(0, min(upto, prompt) - sequence.paid),
            output=max(0, upto - max(prompt, sequence.paid)),
        )
        sequence.paid = max(sequence.paid, upto)

    def _take_slots(self, sequence: Sequence, nodes: int) -> int:
        """Slots for proposed nodes behind a text, as far as pages are free: nobody is preempted for them."""
        text = len(sequence.tokens)
        return self._tables.grow_within(sequence, text + nodes) - text
