"""The rules of the scheduler, one by one: who runs, with how many tokens, in which pages."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Any
from unittest.mock import patch

import pytest
from hypothesis import given
from hypothesis import strategies as st

from outrider_serving.engine.schedule.budget import evenly
from outrider_serving.engine.schedule.prefix import PageNames
from outrider_serving.engine.schedule.queue import FairQueue
from outrider_serving.engine.schedule.scheduler import EngineLimits, Plan, Work
from outrider_serving.engine.schedule.sequence import Sequence
from outrider_serving.engine.types import DeadlineError, FinishReason, QueueFullError, Request
from unit.engine.simulation import MARK, Simulation, limits, request

LONG_PROMPT = tuple(range(100, 130))


def simulation(*requests: Request, **changes: int) -> Simulation:
    made = Simulation(limits(**changes))
    made.submit(*requests)
    return made


def tokens(plan: Plan) -> dict[str, int]:
    return {work.sequence.request.id: work.tokens for work in plan.work}


def nodes(plan: Plan) -> dict[str, int]:
    return {work.sequence.request.id: work.nodes for work in plan.work}


def ids(sequences: Iterable[Sequence]) -> list[str]:
    return [sequence.request.id for sequence in sequences]


def running(made: Simulation) -> dict[str, Sequence]:
    return {sequence.request.id: sequence for sequence in made.scheduler.sequences}


# What is refused


@pytest.mark.parametrize(
    ("refused", "message"),
    [
        (request("new", ()), "the prompt is empty"),
        (request("old"), "a request with the id old is in the engine"),
        (request("new", (1,) * 13, max_tokens=4), "prompt and max_tokens need 5 pages, there are 4"),
    ],
)
def test_a_request_that_cannot_be_served_is_refused(refused: Request, message: str) -> None:
    made = simulation(request("old"), pages=4)
    with pytest.raises(ValueError, match=message):
        made.submit(refused)
    assert made.scheduler.waiting == 1


def test_a_request_that_fills_all_pages_is_served() -> None:
    made = simulation(request("a", (1,) * 12, max_tokens=4), pages=4)
    made.drain(4)
    assert made.ended == {"a": FinishReason.LENGTH}


def test_too_many_waiting_requests_are_refused() -> None:
    made = simulation(request("runs"), max_running=1, max_waiting=2)
    made.step()
    made.submit(request("waits"), request("waits too"))
    with pytest.raises(QueueFullError, match="2 requests are waiting"):
        made.submit(request("refused"))


def test_requests_that_find_a_place_at_once_do_not_count_as_waiting() -> None:
    made = simulation(*(request(name) for name in "abc"), max_running=2, max_waiting=1)
    with pytest.raises(QueueFullError):
        made.submit(request("refused"))


@pytest.mark.parametrize("field", ["pages", "page_size", "max_running"])
def test_limits_are_at_least_one(field: str) -> None:
    with pytest.raises(ValueError, match=f"{field} is 0, but must be at least 1"):
        limits(**{field: 0})


def test_each_running_request_needs_a_token_of_the_step() -> None:
    with pytest.raises(ValueError, match="step_tokens is 7, but must be at least max_running"):
        EngineLimits(pages=1, page_size=1, max_running=8, max_waiting=0, step_tokens=7)


# The tokens of a step


def test_a_prompt_is_read_and_then_each_step_decodes() -> None:
    made = simulation(request("a", (1, 2, 3), max_tokens=3))
    plans = [made.step() for _ in range(3)]
    assert [tokens(plan) for plan in plans] == [{"a": 3}, {"a": 1}, {"a": 1}]
    assert all(work.verifies for plan in plans for work in plan.work)
    assert made.ended == {"a": FinishReason.LENGTH}
    assert made.step() == Plan()


def test_a_long_prompt_is_read_in_pieces_beside_rows_that_decode() -> None:
    made = simulation(request("a", max_tokens=50), step_tokens=8)
    made.step()
    made.submit(request("long", LONG_PROMPT))
    plans = [made.step() for _ in range(5)]
    assert [tokens(plan)["long"] for plan in plans] == [7, 7, 7, 7, 2]
    assert [plan.work[1].verifies for plan in plans] == [False, False, False, False, True]
    assert all(tokens(plan)["a"] == 1 for plan in plans)


def test_prompts_are_read_in_the_order_in_which_they_began() -> None:
    made = simulation(
        request("a", (1, 2, 3)), request("b", (4, 5, 6)), request("c", (7, 8, 9)), step_tokens=8
    )
    assert tokens(made.step()) == {"a": 3, "b": 3, "c": 2}


def test_proposals_share_what_rows_and_prompts_leave() -> None:
    made = simulation(*(request(name, max_tokens=50) for name in "abc"), step_tokens=18)
    made.step()
    plan = made.step(wants=lambda sequence: {"a": 2, "b": 20, "c": 20}[sequence.request.id])
    assert nodes(plan) == {"a": 2, "b": 6, "c": 7}


def test_a_prompt_has_at_least_half_of_what_is_left_and_proposals_the_other_half() -> None:
    made = simulation(request("a", max_tokens=50), step_tokens=11)
    made.step()
    made.submit(request("long", LONG_PROMPT))
    plan = made.step(wants=lambda _: 50)
    assert (tokens(plan), nodes(plan)) == ({"a": 1, "long": 5}, {"a": 5, "long": 0})


def test_what_proposals_leave_goes_to_the_prompt() -> None:
    made = simulation(request("a", max_tokens=50), step_tokens=11)
    made.step()
    made.submit(request("long", LONG_PROMPT))
    plan = made.step(wants=lambda _: 2)
    assert (tokens(plan), nodes(plan)) == ({"a": 1, "long": 8}, {"a": 2, "long": 0})


def test_a_proposal_can_follow_a_prompt_that_is_read_to_its_end() -> None:
    made = simulation(request("a", (1, 2, 3)), step_tokens=8)
    plan = made.step(wants=lambda _: 4)
    assert (tokens(plan), nodes(plan)) == ({"a": 3}, {"a": 4})
    assert plan.work[0].verifies


def test_only_rows_that_verify_are_asked_what_they_want() -> None:
    asked: list[str] = []
    made = simulation(request("a", (1, 2)), request("long", LONG_PROMPT), step_tokens=8)

    def wants(sequence: Sequence) -> int:
        asked.append(sequence.request.id)
        return 0

    made.step(wants=wants)
    assert asked == ["a"]


@given(st.integers(0, 60), st.lists(st.integers(0, 20), max_size=8))
def test_an_even_share_gives_all_there_is_and_nobody_more_than_another_could_use(
    budget: int, wants: list[int]
) -> None:
    granted = evenly(budget, wants)
    assert all(0 <= got <= want for got, want in zip(granted, wants, strict=True))
    assert sum(granted) == min(budget, sum(wants))
    short = [got for got, want in zip(granted, wants, strict=True) if got < want]
    assert all(got <= least + 1 for got in granted for least in short)


# Pages


def test_a_table_has_room_for_the_proposal_and_gives_back_what_was_not_used() -> None:
    made = simulation(request("a", (1, 2, 3), max_tokens=20))
    made.step(wants=lambda _: 10)
    assert len(running(made)["a"].pages) == 1, "four tokens of text"
    plan = made.step(wants=lambda _: 10, commits=lambda _: [7] * 6)
    assert nodes(plan) == {"a": 10}
    assert len(running(made)["a"].pages) == 3, "ten tokens of text"
    assert (made.scheduler.pool.held, made.scheduler.pool.free) == (3, 61)


def test_proposals_shrink_to_the_pages_that_are_free_and_preempt_nobody() -> None:
    made = simulation(request("a", (1, 2), 8), request("b", (3, 4), 8), pages=5)
    made.step()
    plan = made.step(wants=lambda _: 20)
    assert plan.preempted == ()
    assert nodes(plan) == {"a": 13, "b": 1}


def test_the_last_to_arrive_is_preempted_when_a_text_needs_a_page() -> None:
    made = simulation(*(request(name, (1, 2, 3), 9) for name in "abc"), pages=8)
    assert ids(made.step().began) == ["a", "b", "c"]
    plans = [made.step() for _ in range(7)]
    assert [ids(plan.preempted) for plan in plans if plan.preempted] == [["c"]]
    assert made.scheduler.waiting == 1
    made.drain(50)
    assert set(made.ended.values()) == {FinishReason.LENGTH}


def test_the_row_that_needs_a_page_gives_way_itself_where_it_came_last() -> None:
    made = simulation(request("a", (1, 2), 9), request("b", (1, 2, 3), 9), pages=4)
    assert ids(made.step().began) == ["a", "b"]
    plans = [made.step() for _ in range(6)]
    assert [tokens(plan) for plan in plans[:5]] == [{"a": 1, "b": 1}] * 5
    assert ids(plans[5].preempted) == ["b"], "nine tokens need a third page"
    assert tokens(plans[5]) == {"a": 1}


def test_a_preempted_request_goes_on_with_the_text_it_had() -> None:
    made = simulation(request("a", (1, 2, 3), 12), request("b", (4, 5, 6), 12), pages=5)
    texts: dict[str, list[int]] = {}
    for _ in range(60):
        plan = made.step()
        texts |= {work.sequence.request.id: list(work.sequence.tokens) for work in plan.work}
    assert texts["b"] == [4, 5, 6] + [7] * 12
    assert made.ended == {"a": FinishReason.LENGTH, "b": FinishReason.LENGTH}


def test_a_preempted_request_finds_its_own_pages_again() -> None:
    made = simulation(request("a", (1, 2, 3), 5), request("b", LONG_PROMPT, 5), pages=11)
    made.step()
    b = running(made)["b"]
    made.scheduler._preempt(b)
    assert (b.pages, b.computed) == ([], 0)
    made.scheduler.cancel("a")
    assert ids(made.step().began) == ["b"]
    assert b.reused == 28


# Who begins


def test_no_more_run_than_there_are_places() -> None:
    made = simulation(*(request(name) for name in "abc"), max_running=2)
    assert ids(made.step().began) == ["a", "b"]
    assert (made.scheduler.running, made.scheduler.waiting) == (2, 1)


def test_a_prompt_waits_until_the_step_has_tokens_for_it() -> None:
    made = simulation(request("long", LONG_PROMPT), request("b"), step_tokens=8)
    assert ids(made.step().began) == ["long"]
    assert [ids(made.step().began) for _ in range(3)] == [[], [], ["b"]]


def test_admission_leaves_pages_for_those_that_run_to_grow() -> None:
    made = simulation(request("a", (1,) * 8, 4), request("b", (2,) * 8, 4), pages=6)
    assert ids(made.step().began) == ["a", "b"]
    made = simulation(request("a", (1,) * 8, 4), request("b", (2,) * 8, 4), pages=5)
    assert ids(made.step().began) == ["a"]


def test_an_idle_engine_admits_what_leaves_no_page() -> None:
    made = simulation(request("a", (1,) * 19, 1), pages=5)
    assert ids(made.step().began) == ["a"]


def test_nobody_overtakes_the_fair_choice_that_does_not_fit() -> None:
    made = simulation(request("a", (1,) * 8, 9), pages=8)
    made.step()
    made.submit(request("large", (2,) * 24, 4), request("small", (3,), 1))
    assert made.step().began == ()
    order = [name for _ in range(40) for name in ids(made.step().began)]
    assert order == ["large", "small"]


def test_nobody_begins_in_a_step_that_preempts() -> None:
    made = simulation(request("a", (1,) * 8, 12), request("b", (2,) * 24, 12), pages=10)
    made.step()
    made.submit(request("c", (3,), 1, tenant="c"))
    plans = [made.step() for _ in range(6)]
    assert [(ids(plan.preempted), ids(plan.began)) for plan in plans[3:]] == [
        ([], []),
        (["b"], []),
        ([], ["c"]),
    ]


def test_admission_preempts_nobody() -> None:
    made = simulation(request("a", (1,) * 8, 20), pages=8)
    made.step()
    made.submit(request("large", (2,) * 24, 4))
    assert all(made.step().preempted == () for _ in range(10))


def test_pages_kept_for_later_make_way_for_a_request_that_begins() -> None:
    made = simulation(request("a", (1,) * 24, 1), pages=8)
    made.step()
    assert made.scheduler.pool.cached == 6
    made.submit(request("b", (2,) * 24, 1))
    assert ids(made.step().began) == ["b"]


def test_pages_of_texts_that_wait_are_named_ahead_a_part_in_each_step() -> None:
    made = simulation(request("runs", max_tokens=50), max_running=2)
    made.step()
    made.ahead = 12  # three pages
    waiting = made.submit(
        request("scored", LONG_PROMPT, params={"prompt_logprobs": 0}),
        request("a1", LONG_PROMPT, tenant="a"),
        request("a2", LONG_PROMPT, tenant="a"),
        request("b", LONG_PROMPT[:8], tenant="b"),
    )
    lengths = []
    with patch.object(FairQueue, "head", return_value=None):  # so that all of them go on waiting
        for _ in range(4):
            made.step()
            lengths.append([len(sequence.names) for sequence in waiting])
    # As many as can run are looked at; of the text of b one page is full without the token that is run.
    assert lengths == [[0, 3, 0, 0], [0, 6, 0, 0], [0, 7, 0, 1], [0, 7, 0, 1]]


def test_a_plan_names_nothing_that_was_named_ahead() -> None:
    made = simulation(request("runs", max_tokens=50), max_running=2)
    made.step()
    made.ahead = 1000
    made.submit(request("a", LONG_PROMPT))
    with patch.object(FairQueue, "head", return_value=None):
        made.step()
    with patch.object(PageNames, "_hash", side_effect=AssertionError("a page is named")):
        assert ids(made.scheduler.plan(0.0, lambda _: 0, lambda _: frozenset()).began) == ["a"]


def test_those_that_go_next_are_looked_at_first() -> None:
    made = simulation(*(request(name, tenant=name[0]) for name in ("a1", "a2", "a3", "b1", "c1", "b2")))
    made.scheduler._queue.charge("a", prompt=5)
    assert ids(made.scheduler._queue) == ["b1", "c1", "a1", "b2", "a2", "a3"]


def test_tenants_that_wait_at_the_same_time_get_equal_service() -> None:
    made, served, sent = Simulation(limits(max_running=2, max_waiting=40)), Counter[str](), 0
    for _ in range(400):
        waiting = Counter(sequence.request.tenant for sequence in made.scheduler._queue)
        for tenant, load in (("many", 10), ("few", 1)):
            for _ in range(load - waiting[tenant]):
                sent += 1
                made.submit(request(str(sent), (sent,), 6, tenant=tenant))
        for work in made.step().work:
            served[work.sequence.request.tenant] += 1
    assert abs(served["many"] - served["few"]) <= 4 * 6


def test_a_tenant_does_not_take_all_places_at_once() -> None:
    made = simulation(*(request(name, tenant=name[0]) for name in ("a1", "a2", "a3", "b1", "b2")))
    assert ids(made.step().began) == ["a1", "b1", "a2", "b2", "a3"]


def test_a_prompt_that_was_cached_costs_its_tenant_nothing() -> None:
    made = simulation(request("b", (9,), 1, tenant="b"), max_running=1)
    made.step()
    made.submit(request("a", LONG_PROMPT, 1, tenant="a"))
    made.step()
    made.submit(request("again", LONG_PROMPT, 1, tenant="a"))
    charged = made.scheduler._queue._served["a"]
    made.step()
    assert made.ended.keys() == {"a", "b", "again"}
    assert made.scheduler._queue._served["a"] - charged == 2 + 2, "two tokens of the prompt, one of output"


def test_a_tenant_does_not_pay_for_being_preempted() -> None:
    alone = simulation(request("b", (4, 5, 6), 12, tenant="b"), request("a", (1,), 1))
    alone.drain(50)
    made = simulation(request("a", (1, 2, 3), 12), request("b", (4, 5, 6), 12, tenant="b"), pages=5)
    preempted = 0
    for _ in range(60):
        preempted += len(made.step().preempted)
    assert preempted
    assert made.scheduler._queue._served["b"] == alone.scheduler._queue._served["b"] == 3 + 2 * 12


# What is reused


def reused(prompt: tuple[int, ...], *, later: tuple[int, ...] | None = None, **rest: Any) -> int:
    """How many tokens a second request finds of what a first one left behind."""
    made = simulation(request("first", prompt, 1))
    made.step()
    second = made.submit(request("second", later or prompt, 1, **rest))[0]
    made.step()
    return second.reused


@pytest.mark.parametrize(("length", "found"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8), (12, 8)])
def test_full_pages_are_reused_and_at_least_one_token_is_run(length: int, found: int) -> None:
    assert reused(tuple(range(length))) == found


def test_a_text_that_differs_is_reused_up_to_the_page_where_it_does() -> None:
    assert reused(tuple(range(20)), later=(*range(10), 99, *range(11, 20))) == 8


def test_output_is_reused_as_prompts_are() -> None:
    made = simulation(request("first", (1, 2, 3), 10))
    made.drain(20)
    second = made.submit(request("second", (1, 2, 3, *[7] * 10, 5), 1))[0]
    made.step()
    assert second.reused == 12


def test_an_accepted_proposal_is_reused_as_other_text_is() -> None:
    made = simulation(request("first", (1, 2, 3), 9))
    made.step(wants=lambda _: 12, commits=lambda _: list(range(20, 29)))
    assert made.ended == {"first": FinishReason.LENGTH}
    second = made.submit(request("second", (1, 2, 3, *range(20, 29), 7), 1))[0]
    made.step()
    assert second.reused == 8, "the last committed token was never run"


def test_requests_that_run_at_the_same_time_share_pages() -> None:
    made = simulation(request("first", LONG_PROMPT, 5))
    made.step()
    made.submit(request("second", LONG_PROMPT, 5))
    made.step()
    assert running(made)["second"].pages[:7] == running(made)["first"].pages[:7]


def test_tenants_share_nothing() -> None:
    assert reused(LONG_PROMPT) == 28
    assert reused(LONG_PROMPT, tenant="other") == 0


def test_private_requests_share_nothing_with_others() -> None:
    assert reused(LONG_PROMPT, private=True) == 0


def test_logprobs_of_the_prompt_need_all_of_it_run() -> None:
    assert reused(LONG_PROMPT, params={"prompt_logprobs": 1}) == 0


def test_pages_without_a_required_mark_are_not_reused() -> None:
    made = simulation(request("first", LONG_PROMPT, 1))
    made.step()
    made.load()
    second = made.submit(request("second", LONG_PROMPT, 1))[0]
    made.step(requires=lambda _: frozenset({MARK}))
    assert second.reused == 0
    third = made.submit(request("third", LONG_PROMPT, 1))[0]
    made.step(requires=lambda _: frozenset({MARK}))
    assert (third.reused, third.hit_marks) == (28, {MARK}), "the second one left marked pages"


def test_a_request_is_told_which_marks_its_pages_bear() -> None:
    made = simulation(request("first", LONG_PROMPT[:9], 1))
    made.step()
    made.load()
    second = made.submit(request("second", LONG_PROMPT, 1))[0]
    made.step()
    assert (second.reused, second.hit_marks) == (8, frozenset())


# Choices of one call


def choices(*names: str, prompt: tuple[int, ...] = LONG_PROMPT, **rest: Any) -> list[Request]:
    return [request(name, prompt, 8, group="call", **rest) for name in names]


def test_choices_wait_until_one_of_them_has_read_the_prompt_and_reuse_it() -> None:
    made = simulation(*choices("a", "b", "c"), step_tokens=16)
    began = [ids(made.step().began) for _ in range(3)]
    assert began == [["a"], [], ["b", "c"]]
    assert {name: sequence.reused for name, sequence in running(made).items()} == {"a": 0, "b": 28, "c": 28}


def test_others_begin_while_choices_wait() -> None:
    made = simulation(*choices("a", "b"), request("other"))
    assert ids(made.step().began) == ["a", "other"]


def test_choices_with_too_short_a_prompt_to_share_do_not_wait() -> None:
    made = simulation(*choices("a", "b", prompt=(1, 2, 3, 4)))
    assert ids(made.step().began) == ["a", "b"]


def test_choices_of_different_prompts_do_not_wait_for_each_other() -> None:
    made = simulation(*choices("a"), *choices("b", prompt=LONG_PROMPT[1:]))
    assert ids(made.step().began) == ["a", "b"]


def test_choices_of_different_calls_do_not_wait_for_each_other() -> None:
    made = simulation(request("a", LONG_PROMPT, group="one"), request("b", LONG_PROMPT, group="other"))
    assert ids(made.step().began) == ["a", "b"]


def test_choices_that_can_reuse_nothing_do_not_wait() -> None:
    made = simulation(*choices("a", "b", params={"prompt_logprobs": 0}))
    assert ids(made.step().began) == ["a", "b"]


def test_choices_whose_prompt_is_cached_do_not_wait() -> None:
    made = simulation(request("before", LONG_PROMPT, 1))
    made.step()
    made.submit(*choices("a", "b"))
    assert ids(made.step().began) == ["a", "b"]


@pytest.mark.parametrize("end", ["cancel", "preempt"])
def test_where_the_leading_choice_is_gone_the_next_one_leads(end: str) -> None:
    made = simulation(*choices("a", "b", "c"), step_tokens=16)
    a = made.step().began[0]
    if end == "cancel":
        made.scheduler.cancel("a")
    else:
        made.scheduler._preempt(a)
    assert ids(made.step().began) == (["b"] if end == "cancel" else ["a"])
    made.drain(30)
    assert made.scheduler.pool.held == 0


# Private calls


def test_private_choices_share_until_the_last_one_ends() -> None:
    made = simulation(*choices("a", "b", private=True), max_running=1)
    made.drain(30)
    assert made.ended.keys() == {"a", "b"}
    assert made.scheduler.pool.cached == 0


def test_the_names_of_a_private_call_stay_while_one_of_it_waits() -> None:
    made = simulation(*choices("a", "b", private=True), max_running=1)
    while "a" not in made.ended:
        made.step()
    assert made.scheduler.pool.cached > 0
    made.step()
    assert running(made)["b"].reused == 28
    made.scheduler.cancel("b")
    made.step()
    assert (made.scheduler.pool.held, made.scheduler.pool.cached) == (0, 0)


def test_a_private_call_takes_no_other_names_with_it() -> None:
    made = simulation(request("public", LONG_PROMPT, 1), request("private", LONG_PROMPT, 1, private=True))
    made.step()
    assert made.ended.keys() == {"public", "private"}
    assert made.scheduler.pool.cached == 7


# How requests end


def test_a_cancelled_request_is_gone_with_the_next_plan() -> None:
    made = simulation(request("runs", max_tokens=50), request("waits"), max_running=1)
    made.step()
    made.scheduler.cancel("runs")
    made.scheduler.cancel("waits")
    made.scheduler.cancel("unknown")
    plan = made.step()
    assert [(sequence.request.id, error) for sequence, error in plan.ended] == [
        ("runs", None),
        ("waits", None),
    ]
    assert (made.scheduler.running, made.scheduler.waiting, made.scheduler.pool.held) == (0, 0, 0)
    made.submit(request("runs"))
    assert ids(made.step().began) == ["runs"], "its id is free again"


def test_a_request_ends_when_its_deadline_has_passed_whether_it_runs_or_waits() -> None:
    made = simulation(
        request("runs", max_tokens=50, deadline=5.0), request("waits", deadline=6.0), max_running=1
    )
    assert made.step(now=4.9).ended == ()
    plan = made.step(now=6.0)
    assert ids(sequence for sequence, _ in plan.ended) == ["runs", "waits"]
    assert all(isinstance(error, DeadlineError) for _, error in plan.ended)
    assert made.scheduler.pool.held == 0


def test_a_place_that_is_given_up_is_taken_in_the_same_plan() -> None:
    made = simulation(request("runs", max_tokens=50), request("waits"), max_running=1)
    made.step()
    made.scheduler.cancel("runs")
    assert ids(made.step().began) == ["waits"]


def test_a_request_that_failed_is_finished_whether_it_was_settled_or_not() -> None:
    made = simulation(request("a", max_tokens=50), request("waits"), max_running=1)
    plan = made.scheduler.plan(0.0, lambda _: 5, lambda _: frozenset())
    made.scheduler.finish(plan.work[0].sequence)
    made.check_pages()
    assert made.scheduler.pool.held == 0
    assert ids(made.step().began) == ["waits"]


def test_an_end_of_sequence_that_a_step_commits_ends_the_request() -> None:
    made = Simulation(limits())
    sequence = made.scheduler.submit(request("a", max_tokens=50), eos_token_ids=frozenset({9}))

    def commits(work: Work) -> list[int]:
        return [7, 9, 7, 7]

    made.step(wants=lambda _: 8, commits=commits)
    assert made.ended == {"a": FinishReason.STOP}
    assert sequence.tokens == [1, 2, 3, 7, 9]
    assert made.scheduler.pool.held == 0
