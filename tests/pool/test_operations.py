"""Operators' requests and their outcomes."""

from dataclasses import replace

import pytest

from equipoise.planning.layout import contiguous_layout
from equipoise.pool.effects import Reply, WriteAudit, WriteProposed
from equipoise.pool.operations import MAX_POSTPONED
from equipoise.pool.records import MAX_AUDIT, PoolMemory
from equipoise.pool.requests import (
    AdminRequest,
    Pause,
    Pin,
    Preview,
    Rebalance,
    Resume,
    RollBack,
    Unpin,
)


class Operator:
    """Asks a harness's controller; the answer is that of the audit record, or the reply."""

    def __init__(self, harness) -> None:
        self.harness = harness
        self.tickets = 0

    def ask(self, wish, *, reason="because"):
        self.tickets += 1
        request = AdminRequest(
            ticket=self.tickets, who="ann", reason=reason, what=type(wish).__name__, operation=wish
        )
        self.harness.perform(self.harness.controller.administer(request, now=self.harness.now))
        effects = [*self.harness.writes, *self.harness.replies]
        (effect,) = (
            one
            for one in effects
            if isinstance(one, WriteAudit | Reply) and one.request.ticket == self.tickets
        )
        if isinstance(effect, WriteAudit):
            assert effect.record.accepted == effect.answer.accepted
            assert effect.record.who == "ann"
        return effect.answer


@pytest.fixture
def operator(serving_harness):
    return Operator(serving_harness)


@pytest.fixture
def balanced(serving_harness, skewed):
    """A harness that adopted a plan: generation 2 runs."""
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert serving_harness.pool.layouts.stored_generation == 2
    return serving_harness


def at_once(harness, *wishes):
    """Requests that all arrive before the store has the first; returns the hold in the end."""
    chains = [
        harness.controller.administer(
            AdminRequest(ticket=ticket, who="ann", reason="", what="x", operation=wish),
            now=harness.now,
        )
        for ticket, wish in enumerate(wishes)
    ]
    for chain in chains:
        harness.perform(chain)
    return harness.pool.journal.hold


def test_requests_that_wait_for_the_store_together_all_apply(serving_harness):
    hold = at_once(serving_harness, Pause(), Pin())
    assert hold.paused
    assert hold.pin is not None
    audits = [write for write in serving_harness.writes if isinstance(write, WriteAudit)]
    assert audits[-1].hold == hold, "the store has both"


def test_a_pin_that_follows_an_unpin_at_once_holds(serving_harness):
    at_once(serving_harness, Pin())
    assert at_once(serving_harness, Unpin(), Pin()).pin is not None
    assert at_once(serving_harness, Pin(), Unpin()).pin is None


def test_a_resume_that_is_still_being_written_does_not_end_the_pause_of_a_rollback(
    balanced, operator
):
    start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    operator.ask(Pause(), reason="the night")
    assert at_once(balanced, Resume(), RollBack(layout=start)).paused == "ann: the night"


def test_a_rollback_that_leaves_planning_on_resumes_nothing(balanced, operator):
    start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    operator.ask(Pause())
    answer = operator.ask(RollBack(layout=start, keep_planning=True))
    assert "planning stays paused by ann" in answer.reason
    assert balanced.pool.journal.hold.paused


def rearranged(layout, *, generation=1):
    """Another valid placement for the same ranks."""
    table = (layout.expert_of_slot + 1) % layout.num_experts
    return layout.with_placement(table, generation=generation)


def running(harness):
    return harness.pool.layouts.current


def test_a_paused_pool_closes_windows_and_adopts_nothing_until_it_is_resumed(
    serving_harness, operator, skewed
):
    assert operator.ask(Pause()).accepted
    serving_harness.run_traffic(skewed(1), seconds=30)
    assert serving_harness.pool.windows.num_closed == 3
    assert running(serving_harness).generation == 1
    assert serving_harness.decisions() == []
    assert operator.ask(Resume()).accepted
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert running(serving_harness).generation == 2


def test_a_second_pause_is_answered_with_the_first_caller_and_reason(operator):
    operator.ask(Pause(), reason="the network is being mended")
    again = operator.ask(Pause())
    assert not again.accepted
    assert again.reason == "it is already paused, by ann: the network is being mended"


def test_pausing_lets_the_rollout_under_way_come_to_its_end(serving_harness, operator, skewed):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    answer = operator.ask(Pause())
    assert "generation 2 continues to completion" in answer.reason
    serving_harness.carry_out_rollout()
    assert running(serving_harness).generation == 2


@pytest.mark.parametrize(
    ("wish", "words"),
    [
        (Resume(), "it is not paused"),
        (Unpin(), "it is not pinned"),
        (Rebalance(), "no window with traffic has closed yet"),
    ],
)
def test_impossible_operations_are_rejected_and_recorded(operator, wish, words):
    answer = operator.ask(wish)
    assert not answer.accepted
    assert words in answer.reason
    assert not operator.harness.pool.journal.audit[0].accepted


def test_a_rollback_is_an_ordinary_rollout_to_an_old_placement_under_a_new_number(
    balanced, operator
):
    start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    answer = operator.ask(RollBack(layout=start))
    assert answer.accepted
    assert answer.generation == 3
    kinds = [type(write) for write in balanced.writes]
    assert kinds.index(WriteAudit) < max(
        place for place, kind in enumerate(kinds) if kind is WriteProposed
    ), "recorded before anything happens"
    stages = [worker.staged for worker in balanced.ranks]
    assert all(stage.base_generation == 2 for stage in stages)
    assert any(move.checksum for stage in stages for move in stage.moves)
    balanced.carry_out_rollout()
    assert running(balanced).generation == 3
    assert running(balanced).same_placement(start)
    decision = balanced.decisions()[-1]
    assert decision.algorithm == "rollback"
    assert "generation 1, by ann: because" in decision.reason


def test_a_rollback_pauses_planning_so_that_it_is_not_undone(balanced, operator, skewed):
    start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    answer = operator.ask(RollBack(layout=start))
    assert "planning is paused" in answer.reason
    balanced.carry_out_rollout()
    balanced.run_traffic(skewed(1), seconds=30)
    assert running(balanced).same_placement(start)


def test_a_rollback_may_leave_planning_on(balanced, operator, skewed):
    start = contiguous_layout(num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10)
    operator.ask(RollBack(layout=start, keep_planning=True))
    balanced.carry_out_rollout()
    assert not balanced.pool.journal.hold.reason
    balanced.run_traffic(skewed(1), seconds=10)
    assert not running(balanced).same_placement(start)


def test_a_rollback_to_what_runs_or_while_something_rolls_is_rejected(
    serving_harness, operator, skewed
):
    start = running(serving_harness)
    same = operator.ask(RollBack(layout=start))
    assert not same.accepted
    assert "already has this placement" in same.reason
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    busy = operator.ask(RollBack(layout=rearranged(start)))
    assert not busy.accepted
    assert "generation 2 is being rolled out (staging)" in busy.reason


def test_a_layout_of_other_ranks_is_rejected(balanced, operator):
    other = contiguous_layout(num_layers=3, num_experts=32, num_ranks=5, slots_per_rank=10)
    for wish in (RollBack(layout=other), Pin(layout=other)):
        answer = operator.ask(wish)
        assert not answer.accepted
        assert "the layout does not fit the pool" in answer.reason


def test_a_pinned_pool_stays_whatever_traffic_says_until_it_is_unpinned(
    serving_harness, operator, skewed
):
    assert operator.ask(Pin()).accepted
    serving_harness.run_traffic(skewed(1), seconds=30)
    assert running(serving_harness).generation == 1
    rejected = operator.ask(Rebalance())
    assert "pinned by ann: because" in rejected.reason
    assert operator.ask(Unpin()).accepted
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert running(serving_harness).generation == 2


def test_a_pool_goes_to_a_pinned_placement_at_once_although_it_is_paused(serving_harness, operator):
    operator.ask(Pause())
    target = rearranged(running(serving_harness))
    assert operator.ask(Pin(layout=target)).accepted
    serving_harness.carry_out_rollout()
    assert running(serving_harness).same_placement(target)
    assert serving_harness.decisions()[-1].algorithm == "pin"


def test_a_paused_pool_goes_on_to_its_pin_under_the_next_balancer(
    serving_harness, operator, make_harness, skewed
):
    operator.ask(Pause())
    target = rearranged(running(serving_harness))
    operator.ask(Pin(layout=target))
    memory = PoolMemory(hold=serving_harness.pool.journal.hold)
    harness = make_harness(memory=memory)
    harness.serve()
    assert not running(harness).same_placement(target)
    harness.run_traffic(skewed(1), seconds=11)
    assert running(harness).same_placement(target)
    assert harness.pool.journal.hold.paused


def test_a_pool_that_is_pinned_during_a_rollout_goes_back_afterwards(
    serving_harness, operator, skewed
):
    before = running(serving_harness)
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    answer = operator.ask(Pin())
    assert answer.accepted
    assert "the rollout of generation 2 continues to completion; then" in answer.reason
    serving_harness.carry_out_rollout()
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert running(serving_harness).same_placement(before)


def test_a_plan_that_an_operator_requested_is_not_adopted_if_the_pool_is_pinned_meanwhile(
    serving_harness, operator, skewed
):
    operator.ask(Pause())
    serving_harness.run_traffic(skewed(1), seconds=10)
    operator.ask(Resume())
    request = AdminRequest(ticket=99, who="eve", reason="", what="rebalance", operation=Rebalance())
    plan = serving_harness.controller.administer(request, now=serving_harness.now)
    assert operator.ask(Pin()).accepted
    serving_harness.perform(plan)
    answer = next(
        one.answer for one in serving_harness.writes if getattr(one, "request", None) is request
    )
    assert not answer.accepted
    assert "pinned by ann: because while this was planned" in answer.reason
    assert running(serving_harness).generation == 1


def test_a_pool_that_missed_its_pin_goes_there_at_the_end_of_the_interval(
    serving_harness, operator, skewed
):
    serving_harness.run_traffic(skewed(1), seconds=10, carry_out=False)
    target = rearranged(running(serving_harness))
    answer = operator.ask(Pin(layout=target))
    assert "the rollout of generation 2 continues to completion; then" in answer.reason
    serving_harness.carry_out_rollout()
    assert running(serving_harness).generation == 2
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert running(serving_harness).same_placement(target)


def test_a_pin_outlives_a_change_of_ranks_and_waits_while_it_does_not_fit(
    serving_harness, operator, skewed
):
    target = rearranged(running(serving_harness))
    operator.ask(Pin(layout=target))
    serving_harness.carry_out_rollout()
    pool = serving_harness.pool
    pool.layouts.run(
        contiguous_layout(
            num_layers=3, num_experts=32, num_ranks=4, slots_per_rank=10, generation=7
        )
    )
    for worker in serving_harness.ranks:
        worker.run(pool.layouts.current)
        serving_harness.say(worker, worker.serving())
    serving_harness.run_traffic(skewed(1), seconds=10)
    assert running(serving_harness).same_placement(target)
    assert running(serving_harness).generation == 8


def test_a_rebalance_plans_at_once_and_answers_with_the_verdict(serving_harness, operator, skewed):
    operator.ask(Pause())
    serving_harness.run_traffic(skewed(1), seconds=10)
    operator.ask(Resume())
    answer = operator.ask(Rebalance())
    assert answer.accepted, answer.reason
    assert answer.generation == 2
    assert "raises balancedness" in answer.reason
    serving_harness.carry_out_rollout()
    assert running(serving_harness).generation == 2


@pytest.mark.parametrize("limit", ["min_gain", "min_throughput_gain"])
def test_a_forced_rebalance_adopts_what_gains_too_little(make_harness, skewed, limit):
    harness = make_harness(policy=replace(make_harness().pool.policy.values, **{limit: 0.9}))
    harness.serve()
    harness.run_traffic(skewed(1), seconds=10)
    assert not harness.decisions()[-1].accepted
    operator = Operator(harness)
    rejected = operator.ask(Rebalance())
    assert not rejected.accepted
    assert "too little" in rejected.reason
    assert operator.ask(Rebalance(force=True)).accepted


def test_a_preview_shows_the_plan_and_changes_nothing(serving_harness, operator, skewed):
    operator.ask(Pause())
    serving_harness.run_traffic(skewed(1), seconds=10)
    decisions = len(serving_harness.decisions())
    policy = replace(serving_harness.pool.policy.values, payback_s=300.0)
    answer = operator.ask(Preview(policy=policy))
    assert answer.accepted
    assert answer.reason.startswith("would be adopted: ")
    assert answer.proposal.waves
    assert answer.proposal.request.policy is policy
    assert len(serving_harness.decisions()) == decisions
    assert serving_harness.pool.rollouts.current is None
    assert not serving_harness.pool.decisions.is_proposing


def test_previews_are_not_recorded_so_that_they_evict_no_operation(
    serving_harness, operator, skewed
):
    policy = serving_harness.pool.policy.values
    assert not operator.ask(Preview(policy=policy)).accepted, "no window has closed yet"
    operator.ask(Pause(), reason="maintenance")
    serving_harness.run_traffic(skewed(1), seconds=10)
    for _ in range(2 * MAX_AUDIT):
        assert operator.ask(Preview(policy=policy)).accepted
    assert [record.what for record in serving_harness.pool.journal.audit] == ["Pause"]
    assert not any(
        isinstance(write, WriteAudit) and isinstance(write.request.operation, Preview)
        for write in serving_harness.writes
    )


def test_a_preview_is_answered_while_the_store_is_down(serving_harness, operator, skewed):
    operator.ask(Pause())
    serving_harness.run_traffic(skewed(1), seconds=10)
    serving_harness.store_fault = "the disk is full"
    assert operator.ask(Preview(policy=serving_harness.pool.policy.values)).accepted


def test_a_plan_that_was_being_made_when_the_pool_was_paused_is_not_adopted(
    serving_harness, operator, skewed
):
    harness, held_back = serving_harness, []
    harness.perform, perform = held_back.append, harness.perform
    for worker in harness.ranks:
        worker.serve_traffic(skewed(1) * 10)
        harness.controller.message(worker.hello.worker, worker.report(), now=harness.now + 9)
    harness.now += 10
    harness.perform = perform
    chain = harness.controller.tick(now=harness.now)
    operator.ask(Pause())
    harness.perform(chain)
    assert not harness.decisions()[-1].accepted
    assert "paused by ann: because while this was planned" in harness.decisions()[-1].reason


def plan_in_the_making(harness, load):
    """A window of ten seconds has closed; gives what the pool wants done, the plan among it."""
    harness.serve()
    harness.run_traffic(load, seconds=9)
    for worker in harness.ranks:
        worker.serve_traffic(load)
        harness.say(worker, worker.report())
    harness.now += 1.0
    return harness.controller.tick(now=harness.now)


def test_requests_during_a_plan_wait_for_its_end(make_harness, policy, skewed):
    harness = make_harness(policy=replace(policy, min_gain=1.0))
    due = plan_in_the_making(harness, skewed(1))
    for ticket in range(1, MAX_POSTPONED + 1):
        wish = Rebalance(force=ticket == 1)
        request = AdminRequest(
            ticket=ticket, who="ann", reason="", what="rebalance", operation=wish
        )
        assert harness.controller.administer(request, now=harness.now) == ()
    operator = Operator(harness)
    operator.tickets = MAX_POSTPONED
    assert not operator.ask(Rebalance()).accepted, "too many wait already"
    harness.perform(due)
    verdicts = {record.accepted for record in harness.decisions()}
    assert verdicts == {True, False}, "the plan of the window gained too little"
    answers = {
        write.request.ticket: write.answer
        for write in harness.writes
        if isinstance(write, WriteAudit)
    }
    assert answers[1].accepted
    assert all("is being rolled out" in answers[ticket].reason for ticket in range(2, 9))
    assert harness.pool.rollouts.current is not None


def test_a_request_that_waited_too_long_for_a_plan_is_rejected(make_harness, policy, skewed):
    harness = make_harness(policy=replace(policy, min_gain=1.0))
    due = plan_in_the_making(harness, skewed(1))
    request = AdminRequest(ticket=1, who="ann", reason="", what="rebalance", operation=Rebalance())
    assert harness.controller.administer(request, now=harness.now) == ()
    harness.now += policy.plan_timeout_s + 1.0
    harness.perform(due)
    (write,) = (write for write in harness.writes if isinstance(write, WriteAudit))
    assert "earlier plans took too long" in write.answer.reason
    assert not write.answer.accepted


def test_a_planner_that_fails_is_reported_to_the_operator(serving_harness, operator, skewed):
    operator.ask(Pause())
    serving_harness.run_traffic(skewed(1), seconds=10)
    request = AdminRequest(ticket=99, who="ann", reason="", what="x", operation=Rebalance())
    serving_harness.pool.decisions.begin_proposing()
    (write,) = serving_harness.controller.proposal_failed(
        "the planner failed: so it goes",
        timed_out=False,
        now=serving_harness.now,
        requested_by=request,
    )
    assert not write.answer.accepted
    assert "the planner failed" in write.answer.reason
    assert not serving_harness.pool.decisions.is_proposing


def test_what_the_store_does_not_take_does_not_happen(serving_harness, skewed):
    serving_harness.store_fault = "the disk is full"
    request = AdminRequest(ticket=1, who="ann", reason="", what="pause", operation=Pause())
    serving_harness.perform(serving_harness.controller.administer(request, now=serving_harness.now))
    assert not serving_harness.pool.journal.hold.reason
    assert len(serving_harness.pool.journal.audit) == 0


def test_a_restarted_balancer_keeps_the_holds_of_its_pools(make_harness, operator, skewed):
    operator.ask(Pin())
    hold, audit = operator.harness.pool.journal.hold, tuple(operator.harness.pool.journal.audit)
    harness = make_harness(memory=PoolMemory(hold=hold, audit=audit))
    harness.serve()
    harness.run_traffic(skewed(1), seconds=20)
    assert running(harness).generation == 1
    assert harness.pool.journal.audit[0].what == "Pin"
