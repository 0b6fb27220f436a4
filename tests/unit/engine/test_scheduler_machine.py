"""Whatever arrives, is cancelled or accepted: pages are conserved, texts not mixed up, every request ends.

What is checked after each step is in `simulation`. Two simulations get the same calls under different
secrets, and must decide alike. One of them looks ahead in each step, which decides nothing.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from itertools import count
from random import Random

from hypothesis import given
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, rule

from outrider_serving.engine.schedule.scheduler import EngineLimits, Plan, Work
from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.types import QueueFullError, Request
from unit.engine.simulation import MARK, Simulation, request

STEM = (1, 2, 1, 1, 2, 2, 1, 2, 1, 2, 2, 1)
EOS = 0

seeds = st.integers(0, 2**32)
"""Values come from seeded generators: hypothesis prefers small ones, with which too little happens."""


def some_limits(random: Random) -> EngineLimits:
    max_running = random.randint(1, 4)
    return EngineLimits(
        pages=random.randint(4, 12),
        page_size=random.randint(2, 4),
        max_running=max_running,
        max_waiting=random.randint(0, 6),
        step_tokens=max_running + random.choice([0, 1, 4, 12]),
    )


def some_request(random: Random) -> Request:
    """One of few prompts and tenants, so that texts meet; its deadline is from now on."""
    return request(
        "",
        (*STEM[: random.randint(0, 12)], random.randint(1, 2)),
        random.randint(1, 12),
        params={"prompt_logprobs": random.choice([None] * 5 + [0])},
        tenant=random.choice(["", "", "a", "b"]),
        private=random.random() < 0.3,
        group=random.choice(["", "", "g", "h"]),
        deadline=random.choice([None, None, None, 3.0, 20.0]),
    )


class Outcomes:
    """What is wanted and committed: random, but a function of the request and its progress alone."""

    def __init__(self, seed: int, required: bool) -> None:
        self.seed, self.marks = seed, frozenset({MARK} if required else ())

    def wants(self, sequence: Sequence) -> int:
        return self._random(sequence).choice([0, 1, 4, 9])

    def requires(self, sequence: Sequence) -> frozenset[str]:
        return self.marks

    def commits(self, work: Work) -> list[int]:
        random = self._random(work.sequence)
        return random.choices([1, 2, EOS], [12, 12, 1], k=random.randint(0, work.nodes) + 1)

    def _random(self, sequence: Sequence) -> Random:
        return Random(f"{self.seed} {sequence.order} {sequence.outputs}")


def decided(plan: Plan) -> list[object]:
    """A plan without objects of either simulation."""
    return [
        [(w.sequence.request.id, w.tokens, w.nodes, w.verifies, tuple(w.sequence.pages)) for w in plan.work],
        [(s.request.id, s.reused, s.hit_marks) for s in plan.began],
        [s.request.id for s in plan.preempted],
        [(s.request.id, type(error)) for s, error in plan.ended],
    ]


class SchedulerMachine(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.names = count()
        self.now = 0.0
        self.accepted: dict[str, Request] = {}

    @initialize(seed=seeds)
    def start(self, seed: int) -> None:
        random = Random(seed)
        limits, ahead = some_limits(random), random.choice([1, 5, 1000])
        self.both = [Simulation(limits, b"one"), Simulation(limits, b"another", ahead)]
        self.arrive(seed, 6)

    @rule(seed=seeds, number=st.integers(1, 6))
    def arrive(self, seed: int, number: int) -> None:
        arriving = self._some(seed, number)
        self._took(arriving, [self._submit(each, arriving) for each in self.both])

    @rule(which=st.integers(0, 100))
    def cancel(self, which: int) -> None:
        if self.accepted:
            name = list(self.accepted)[-1 - which % len(self.accepted)]
            for each in self.both:
                each.scheduler.cancel(name)

    @rule(loaded=st.booleans())
    def change_proposer(self, loaded: bool) -> None:
        for each in self.both:
            (each.load if loaded else each.unload)()

    @rule(steps=st.integers(1, 9), seed=seeds, required=st.booleans(), later=st.sampled_from([0, 0, 0, 4]))
    def step(self, steps: int, seed: int, required: bool, later: int) -> None:
        """Steps; in some of them a request comes and one is cancelled while the step runs."""
        self.now += later
        outcomes, random = Outcomes(seed, required), Random(seed)
        for _ in range(steps):
            arriving = self._some(random.getrandbits(32), random.choice([0, 0, 1]))
            cancelled = random.choice([*self.accepted, "nobody"]) if random.random() < 0.1 else "nobody"
            took: list[list[str]] = []

            def meanwhile(
                each: Simulation,
                arriving: list[Request] = arriving,
                cancelled: str = cancelled,
                took: list[list[str]] = took,
            ) -> None:
                took.append(self._submit(each, arriving))
                each.scheduler.cancel(cancelled)

            one, another = (
                each.step(
                    self.now,
                    wants=outcomes.wants,
                    requires=outcomes.requires,
                    commits=outcomes.commits,
                    meanwhile=partial(meanwhile, each),
                )
                for each in self.both
            )
            assert decided(one) == decided(another), "the same calls, another decision"
            self._took(arriving, took)

    def teardown(self) -> None:
        if not self.accepted:
            return
        one, left = self.both[0], self.both[0].scheduler.running + self.both[0].scheduler.waiting
        text = sum(len(each.prompt) + each.params.max_tokens for each in self.accepted.values())
        one.drain(text * (1 + left))
        assert one.ended.keys() == self.accepted.keys(), "every request ends"
        assert one.scheduler.pool.held == 0
        assert not one.scheduler._tables._private, "something is remembered of private calls"

    def _some(self, seed: int, number: int) -> list[Request]:
        """Requests with fresh ids."""
        random = Random(seed)
        some = [some_request(random) for _ in range(number)]
        deadlines = [None if each.deadline is None else self.now + each.deadline for each in some]
        return [
            replace(each, id=str(next(self.names)), deadline=deadline)
            for each, deadline in zip(some, deadlines, strict=True)
        ]

    def _took(self, arriving: list[Request], outcomes: list[list[str]]) -> None:
        """Compare what became of requests in both simulations."""
        one, another = outcomes
        assert one == another
        limits = self.both[0].limits
        for asked, outcome in zip(arriving, one, strict=True):
            needed = len(asked.prompt) + asked.params.max_tokens
            assert (outcome == "too long") == (needed > limits.pages * limits.page_size)
            if outcome == "waits":
                self.accepted[asked.id] = asked

    @staticmethod
    def _submit(simulation: Simulation, arriving: list[Request]) -> list[str]:
        """What becomes of each."""
        outcomes = []
        for asked in arriving:
            try:
                simulation.scheduler.submit(asked, frozenset({EOS}))
                outcomes.append("waits")
            except QueueFullError:
                outcomes.append("full")
            except ValueError:
                outcomes.append("too long")
        return outcomes


TestScheduler = SchedulerMachine.TestCase


@given(seeds)
def test_an_engine_that_is_busy_for_long(seed: int) -> None:
    random, machine = Random(seed), SchedulerMachine()
    machine.start(seed)
    for _ in range(120):
        kind = random.choices(["step", "arrive", "cancel", "change"], [10, 8, 1, 1])[0]
        if kind == "step":
            machine.step(
                random.randint(1, 4),
                random.getrandbits(32),
                random.random() < 0.5,
                random.choice([0, 0, 0, 1]),
            )
        elif kind == "arrive":
            machine.arrive(random.getrandbits(32), random.randint(1, 4))
        elif kind == "cancel":
            machine.cancel(random.randint(0, 5))
        else:
            machine.change_proposer(random.random() < 0.7)
    machine.teardown()
