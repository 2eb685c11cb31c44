"""A layout that ranks refuse is not sent to them again and again."""

import pytest

from equipoise.planning.policy import Policy
from equipoise.wire.messages import Stage

WINDOW_S = 10


@pytest.fixture
def bench(make_bench):
    policy = Policy(interval_s=WINDOW_S, min_assignments=100.0, rollback_cooldown_s=80.0)
    bench = make_bench(policy=policy)
    bench.serve()
    return bench


def run_refusing(bench, load, *, windows):
    """Rank 1 refuses whatever it is to stage; gives how often it was asked to."""
    asked = len(bench.sent_to("worker-1", Stage))
    for _ in range(windows * WINDOW_S):
        bench.run_traffic(load, seconds=1, carry_out=False)
        if bench.ranks[1].staged is not None:
            bench.say(bench.ranks[1], bench.ranks[1].refuse("no memory"))
    return len(bench.sent_to("worker-1", Stage)) - asked


def test_each_refusal_doubles_the_wait_up_to_that_after_a_rollback(bench, skewed):
    assert run_refusing(bench, skewed(1), windows=1) == 1
    # Tried again after 10, 20, 40, 80 and 80 seconds: five times in 23 windows.
    assert run_refusing(bench, skewed(1), windows=23) == 5
    waited = [one.reason for one in bench.decisions() if "failed" in one.reason]
    assert "the last 5 rollouts failed" in waited[-1]
    assert "rank 1 refused: no memory" in waited[-1]
    assert sum(one.accepted for one in bench.decisions()) == 6


def test_a_rollout_that_succeeds_forgets_the_setbacks_before(bench, skewed):
    run_refusing(bench, skewed(1), windows=4)
    assert bench.pool.rollouts._setbacks.count > 1
    bench.run_traffic(skewed(1), seconds=8 * WINDOW_S)
    assert bench.pool.rollouts.completed == 1
    assert bench.pool.rollouts._setbacks.count == 0


def test_ranks_that_form_anew_are_asked_at_once(bench, skewed):
    run_refusing(bench, skewed(1), windows=4)
    bench.pool.rollouts.begin_epoch()
    assert bench.pool.rollouts._setbacks.count == 0


def test_a_rank_that_is_lost_is_no_setback(bench, skewed):
    bench.run_traffic(skewed(1), seconds=WINDOW_S, carry_out=False)
    bench.lose(bench.ranks[2])
    assert bench.pool.rollouts.aborted == 1
    assert bench.pool.rollouts._setbacks.count == 0
