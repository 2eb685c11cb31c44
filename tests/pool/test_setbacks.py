"""A layout that ranks reject is not sent to them again and again."""

import pytest

from equipoise.planning.policy import Policy
from equipoise.wire.balancer_messages import Stage

WINDOW_S = 10


@pytest.fixture
def harness(make_harness):
    policy = Policy(interval_s=WINDOW_S, min_assignments=100.0, rollback_cooldown_s=80.0)
    harness = make_harness(policy=policy)
    harness.serve()
    return harness


def run_rejecting(harness, load, *, windows):
    """Rank 1 rejects whatever it is to stage; gives how often it was asked to."""
    asked = len(harness.sent_to("worker-1", Stage))
    for _ in range(windows * WINDOW_S):
        harness.run_traffic(load, seconds=1, carry_out=False)
        if harness.ranks[1].staged is not None:
            harness.say(harness.ranks[1], harness.ranks[1].reject("no memory"))
    return len(harness.sent_to("worker-1", Stage)) - asked


def test_each_rejection_doubles_the_wait_up_to_that_after_a_rollback(harness, skewed):
    assert run_rejecting(harness, skewed(1), windows=1) == 1
    # Tried again after 10, 20, 40, 80 and 80 seconds: five times in 23 windows.
    assert run_rejecting(harness, skewed(1), windows=23) == 5
    waited = [one.reason for one in harness.decisions() if "failed" in one.reason]
    assert "the last 5 rollouts failed" in waited[-1]
    assert "rank 1 rejected it: no memory" in waited[-1]
    assert sum(one.accepted for one in harness.decisions()) == 6


def test_a_rollout_that_succeeds_forgets_the_setbacks_before(harness, skewed):
    run_rejecting(harness, skewed(1), windows=4)
    assert harness.pool.rollouts._setbacks.count > 1
    harness.run_traffic(skewed(1), seconds=8 * WINDOW_S)
    assert harness.pool.rollouts.completed == 1
    assert harness.pool.rollouts._setbacks.count == 0


def test_ranks_that_re_formed_are_asked_at_once(harness, skewed):
    run_rejecting(harness, skewed(1), windows=4)
    harness.pool.rollouts.begin_epoch()
    assert harness.pool.rollouts._setbacks.count == 0


def test_a_rank_that_is_lost_is_no_setback(harness, skewed):
    harness.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    harness.lose(harness.ranks[2])
    assert harness.pool.rollouts.aborted == 1
    assert harness.pool.rollouts._setbacks.count == 0
