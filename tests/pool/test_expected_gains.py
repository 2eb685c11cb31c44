"""Rollouts are judged by their expected gain."""

import numpy as np
import pytest

from equipoise.balancer.service.status import pool_status
from equipoise.planning.balance import balancedness, layout_loads
from equipoise.planning.expected_gain import GainOutcome
from equipoise.planning.policy import Policy
from equipoise.pool.records import Hold
from equipoise.pool.requests import AdminRequest, Pin, Unpin

# At this gain no second rollout follows before the first is judged.
POLICY = Policy(
    interval_s=10.0,
    min_assignments=100.0,
    min_gain=0.02,
    rollback_windows=2,
    rollback_cooldown_s=100.0,
)


@pytest.fixture
def harness(make_harness):
    harness = make_harness(policy=POLICY)
    harness.serve()
    return harness


@pytest.fixture
def hot():
    """Expert 0, which has two replicas from the start, gets most."""
    load = np.full((3, 32), 100.0)
    load[:, 0] = 4000.0
    return load


def be_lopsided(harness):
    for worker in harness.ranks:
        worker.is_lopsided = True


def test_a_rollout_that_made_it_worse_is_rolled_back_as_a_new_generation(harness, hot):
    first = harness.pool.layouts.current
    harness.run_traffic(hot, seconds=10)
    planned = harness.decisions()[-1]
    assert planned.accepted
    goal = harness.pool.layouts.current.generation
    be_lopsided(harness)
    harness.run_traffic(hot, seconds=30)
    back = next(one for one in harness.decisions() if one.algorithm == "rollback")
    assert back.accepted
    assert "rolled back, because it is worse by more than 0.050" in back.reason
    current = harness.pool.layouts.current
    assert current.generation > goal
    assert current.same_placement(first)
    assert harness.pool.layouts.stored_generation == current.generation
    assert harness.pool.counters.tally.rolled_back == 1
    judged = pool_status(harness.pool, now=harness.now).gains[-1]
    assert (judged.generation, judged.before_generation) == (goal, first.generation)
    assert judged.outcome == "rolled_back"
    assert judged.gain_realised < 0 < judged.gain_expected
    assert judged.balancedness_realised < judged.balancedness_expected - 0.05
    assert judged.reason == back.reason
    assert harness.pool.counters.tally.judged == {GainOutcome.ROLLED_BACK: 1}


def test_a_plan_that_waited_for_its_turn_is_held_to_what_its_own_window_measured(harness, hot):
    be_lopsided(harness)
    controller, late = harness.controller, []

    def keep(proposal, **_):
        late.append(proposal)
        return ()

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(controller, "proposed", keep)
        harness.run_traffic(hot, seconds=80)
    (proposal,) = late
    request = proposal.request
    measured = harness.pool.windows.closed[0]
    assert request.window.size > measured.load.size == 0  # Its tables are gone.
    harness.perform(controller.proposed(proposal, plan_ms=1.0, now=harness.now, requested_by=None))
    computed = balancedness(layout_loads(request.current, request.window))
    optimism = harness.pool.decisions.watched.expected.optimism
    assert optimism == pytest.approx(computed - measured.balancedness)
    assert optimism > 0.05


def test_the_same_load_is_not_tried_again_before_the_cooldown(harness, hot):
    harness.run_traffic(hot, seconds=10)
    be_lopsided(harness)
    harness.run_traffic(hot, seconds=60)
    generation = harness.pool.layouts.current.generation
    rejected = harness.decisions()[-1]
    assert not rejected.accepted
    assert "a plan for this load was rolled back" in rejected.reason
    assert harness.pool.layouts.current.generation == generation
    harness.run_traffic(hot, seconds=80)
    assert any(
        one.accepted and one.time_unix_s > rejected.time_unix_s for one in harness.decisions()
    )


def test_a_layout_other_than_the_restored_one_may_be_improved_at_once(harness, hot):
    """As after an epoch without a rank, whose layout may be as bad as none was before."""
    harness.run_traffic(hot, seconds=10)
    be_lopsided(harness)
    harness.run_traffic(hot, seconds=60)
    rejected = harness.decisions()[-1]
    assert "a plan for this load was rolled back" in rejected.reason
    current = harness.pool.layouts.current
    other = current.with_placement(np.roll(current.expert_of_slot, 10, axis=1), generation=1)
    for ticket, wish in enumerate((Pin(layout=other), Unpin())):
        request = AdminRequest(ticket=ticket, who="ann", reason="", what="", operation=wish)
        harness.perform(harness.controller.administer(request, now=harness.now))
        harness.carry_out_rollout()
    assert harness.pool.layouts.current.same_placement(other)
    harness.run_traffic(hot, seconds=20)
    assert any(
        one.accepted and one.algorithm == "incremental" and one.time_unix_s > rejected.time_unix_s
        for one in harness.decisions()
    )


def test_traffic_that_shifts_after_a_switch_is_not_blamed_on_the_plan(harness, skewed):
    harness.run_traffic(skewed(1), seconds=10)
    assert harness.pool.decisions.watched is not None
    harness.run_traffic(skewed(2), seconds=40)
    assert harness.pool.counters.tally.rolled_back == 0
    assert all(one.algorithm != "rollback" for one in harness.decisions())


def test_a_rollout_that_reaches_its_expected_gain_is_kept(harness, skewed):
    harness.run_traffic(skewed(1), seconds=40)
    assert harness.pool.decisions.watched is None
    assert harness.pool.counters.tally.rolled_back == 0
    judged = pool_status(harness.pool, now=harness.now).gains[-1]
    assert judged.outcome == "kept"
    assert judged.reason.startswith("kept, as expected")
    assert judged.gain_realised == pytest.approx(judged.gain_expected, abs=0.05)
    assert judged.judged_unix_s > 1000.0


def test_a_gain_is_shown_as_open_until_it_is_judged(harness, skewed):
    harness.run_traffic(skewed(1), seconds=10)
    (gain,) = pool_status(harness.pool, now=harness.now).gains
    assert gain.outcome == "open"
    assert gain.gain_expected > 0
    assert (gain.judged_unix_s, gain.balancedness_realised, gain.reason) == (0, 0, "")


def test_a_paused_pool_is_not_rolled_back_before_it_is_resumed(harness, hot):
    harness.run_traffic(hot, seconds=10)
    be_lopsided(harness)
    harness.pool.journal.hold = Hold(paused="ada")
    harness.run_traffic(hot, seconds=40)
    assert harness.pool.counters.tally.rolled_back == 0
    harness.pool.journal.hold = Hold()
    harness.run_traffic(hot, seconds=10)
    assert harness.pool.counters.tally.rolled_back == 1
