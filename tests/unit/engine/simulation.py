"""A step loop without a model: does what a plan says, over slots that remember which text was written there.

Every step checks what must hold whatever the calls: a table has room for what is planned, every slot that a
request reads holds its own text, and a page in two tables is a published one. So an error by one anywhere
between the names of pages and the scheduler shows up as a slot that holds something else.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import chain
from typing import Any
from unittest.mock import patch

from outrider_serving.engine.schedule import scheduler
from outrider_serving.engine.schedule.budget import PREFILL_SHARE
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.scheduler import EngineLimits, Plan, Scheduler, Work
from outrider_serving.engine.schedule.sequence import Sequence as Running
from outrider_serving.engine.types import Labels, Request, SamplingClass, SamplingParams

LABELS = Labels("other", "completions", SamplingClass.GREEDY, "stable", 1)
MARK = "kv"
"""The mark of the one proposer with keys and values of its own."""


def request(
    name: str,
    prompt: Sequence[int] = (1, 2, 3),
    max_tokens: int = 4,
    *,
    params: dict[str, Any] | None = None,
    **rest: Any,
) -> Request:
    return Request(
        name, tuple(prompt), SamplingParams(max_tokens, **(params or {})), LABELS, received=0.0, **rest
    )


def limits(**changes: int) -> EngineLimits:
    return EngineLimits(
        **{"pages": 64, "page_size": 4, "max_running": 8, "max_waiting": 8, "step_tokens": 64} | changes
    )


def one_token(work: Work) -> list[int]:
    """What a step commits where nothing that was proposed is accepted."""
    return [7]


@dataclass
class Simulation:
    """The loop, what lies in its slots, and one proposer that may be loaded.

    Attributes:
        ahead: for how many tokens pages are named ahead in each step; None where nothing is prepared.
    """

    limits: EngineLimits
    secret: bytes = b"a secret"
    ahead: int | None = None
    loaded: bool = False
    slots: dict[int, object] = field(default_factory=dict)
    proposer_slots: dict[int, object] = field(default_factory=dict)
    followed: set[str] = field(default_factory=set)
    ended: dict[str, object] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.scheduler = Scheduler(self.limits, PageNames(self.limits.page_size, self.secret))

    def submit(self, *requests: Request) -> list[Running]:
        return [self.scheduler.submit(each) for each in requests]

    def load(self) -> None:
        self.loaded = True

    def unload(self) -> None:
        self.loaded = False
        self.followed.clear()
        self.proposer_slots.clear()
        self.scheduler.pool.drop_mark(MARK)

    def step(
        self,
        now: float = 0.0,
        *,
        wants: Callable[[Running], int] = lambda _: 0,
        requires: Callable[[Running], frozenset[str]] = lambda _: frozenset(),
        commits: Callable[[Work], list[int]] = one_token,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Plan:
        """Plan and do one step.

        Args:
            now, wants, requires: for `Scheduler.plan`.
            commits: which tokens a row that verifies commits.
            meanwhile: what comes and is cancelled while the step runs.
        """
        plan = self.scheduler.plan(now, wants, requires)
        for sequence, error in plan.ended:
            self.ended[sequence.request.id] = error
        for sequence in plan.began:
            self._begin(sequence, requires(sequence))
        self._check(plan)
        meanwhile()
        if self.ahead is not None:
            with patch.object(scheduler, "NAMED_AHEAD", self.ahead):
                self.scheduler.prepare()
        for work in plan.work:
            self._run(work, commits)
        for work in plan.work:
            if work.sequence.finish_reason is not None:
                self.scheduler.finish(work.sequence)
                self.ended[work.sequence.request.id] = work.sequence.finish_reason
        self.check_pages()
        return plan

    def drain(self, steps: int) -> int:
        """Step until nothing is left; returns how many steps it took, at most `steps`."""
        for taken in range(steps + 1):
            if not self.scheduler.running and not self.scheduler.waiting:
                return taken
            self.step()
        raise AssertionError(
            f"{self.scheduler.running} run and {self.scheduler.waiting} wait after {steps} steps"
        )

    def check_pages(self) -> None:
        """Every page is where it belongs, and only published pages are shared."""
        pool, size = self.scheduler.pool, self.limits.page_size
        pool.check()
        tables = [sequence.pages for sequence in self.scheduler.sequences]
        assert all(len(set(table)) == len(table) for table in tables)
        assert pool.held == len(set(chain(*tables)))
        own = [page for s in self.scheduler.sequences for page in s.pages[s.computed // size :]]
        published = {page for s in self.scheduler.sequences for page in s.pages[: s.published]}
        assert len(set(own)) == len(own), "two requests would write to one page"
        assert published.isdisjoint(own), "a request would write to a published page"

    def _begin(self, sequence: Running, required: frozenset[str]) -> None:
        assert sequence.computed == sequence.reused < len(sequence.tokens)
        assert sequence.reused == sequence.published * self.limits.page_size
        if sequence.reused and sequence.hit_marks:
            assert all(
                self.proposer_slots[slot] == text for slot, text in self._texts(sequence, 0, sequence.reused)
            ), "a marked page lacks what the mark promises"
        if sequence.reused:
            assert required <= sequence.hit_marks
        follows = self.loaded and (sequence.reused == 0 or MARK in sequence.hit_marks)
        (self.followed.add if follows else self.followed.discard)(sequence.request.id)

    def _check(self, plan: Plan) -> None:
        own, bounds = self.scheduler, self.limits
        assert own.running <= bounds.max_running
        assert own.running + own.waiting <= bounds.max_running + bounds.max_waiting
        assert sum(work.tokens + work.nodes for work in plan.work) <= bounds.step_tokens
        assert plan.work or not (own.running or own.waiting), "a step that does nothing"
        running = set(own.sequences)
        assert running.isdisjoint(plan.preempted)
        assert running.issuperset(plan.began)
        for sequence in plan.preempted:
            assert (sequence.pages, sequence.computed, sequence.published) == ([], 0, 0)
            assert all(other.order < sequence.order for other in running), "an earlier one gave way"
        decoding = {sequence for sequence in running if sequence.pending == 1}
        assert decoding <= {work.sequence for work in plan.work}, "a row that decodes sits out a step"
        read = sum(work.tokens for work in plan.work if work.sequence not in decoding)
        unread = sum(sequence.pending for sequence in running - decoding)
        assert read >= min(unread, math.ceil((bounds.step_tokens - len(decoding)) * PREFILL_SHARE))
        for work in plan.work:
            sequence = work.sequence
            assert 1 <= work.tokens <= sequence.pending
            assert work.verifies == (work.tokens == sequence.pending)
            assert work.verifies or work.nodes == 0
            needed = sequence.computed + work.tokens + work.nodes
            assert len(sequence.pages) * bounds.page_size >= needed, "the table is too short"

    def _run(self, work: Work, commits: Callable[[Work], list[int]]) -> None:
        sequence, size = work.sequence, self.limits.page_size
        start, end = sequence.computed, sequence.computed + work.tokens
        assert all(self.slots[slot] == text for slot, text in self._texts(sequence, 0, start)), (
            "not its own text"
        )
        self._write(sequence, start, end)
        for place in range(end, end + work.nodes):
            slot = sequence.pages[place // size] * size + place % size
            self.slots[slot] = self.proposer_slots[slot] = "proposed"
        sequence.computed = end
        if work.verifies:
            tokens = commits(work)
            assert 1 <= len(tokens) <= work.nodes + 1
            kept = sequence.commit(tokens)
            accepted = min(len(tokens) - 1, len(kept))
            self._write(sequence, end, end + accepted)
            sequence.computed += accepted
        had, text = len(sequence.pages), self.scheduler.pool.pages_for(len(sequence.tokens))
        follows = sequence.request.id in self.followed
        self.scheduler.settle(sequence, frozenset({MARK} if follows else ()))
        assert len(sequence.pages) == min(had, text), "only what lies beyond the text is given back"

    def _write(self, sequence: Running, start: int, end: int) -> None:
        for slot, text in self._texts(sequence, start, end):
            self.slots[slot] = text
            self.proposer_slots[slot] = text if sequence.request.id in self.followed else "nothing"

    def _texts(self, sequence: Running, start: int, end: int) -> list[tuple[int, object]]:
        """Slot and what it must hold, for tokens `start` to `end`: who may see it, and the text up to it."""
        asked, size = sequence.request, self.limits.page_size
        party = ("private", asked.group or asked.id) if asked.private else ("tenant", asked.tenant)
        return [
            (sequence.pages[i // size] * size + i % size, (party, tuple(sequence.tokens[: i + 1])))
            for i in range(start, end)
        ]
