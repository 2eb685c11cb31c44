"""Traffic that goes back and forth: a pool settles in between, and does not chase it."""

from dataclasses import replace

import pytest

NUM_WINDOWS = 18
WINDOW_S = 10
NUM_SLOTS = 3 * 40
SETTLING = 5
"""Windows in which the pool learns that there are two kinds of traffic."""


def run_back_and_forth(harness, skewed, *, period_s):
    """Gives, of each window, the moves that were decided at its end."""
    loads = [skewed(1), skewed(2)]
    for turn in range(NUM_WINDOWS * WINDOW_S // period_s):
        harness.run_traffic(loads[turn % 2], seconds=period_s)
    plans = [one for one in harness.decisions() if one.kind == "plan"]
    return [one.moves if one.accepted else 0 for one in plans]


@pytest.mark.parametrize("period_s", [5, 10, 20])
def test_few_experts_move_for_recurring_traffic(serving_harness, skewed, period_s):
    moves = run_back_and_forth(serving_harness, skewed, period_s=period_s)
    assert len(moves) == NUM_WINDOWS, "one decision a window at most"
    assert 0 < sum(moves[:SETTLING]) < NUM_SLOTS
    assert max(moves[SETTLING:]) <= 0.05 * NUM_SLOTS
    first, *_, last = serving_harness.pool.windows.closed
    assert last.balancedness > first.balancedness + 0.1


def test_with_a_hysteresis_nothing_moves_once_both_are_served_well(make_harness, policy, skewed):
    harness = make_harness(policy=replace(policy, plan_below=0.85))
    harness.serve()
    moves = run_back_and_forth(harness, skewed, period_s=10)
    assert any(moves)
    assert not any(moves[SETTLING:])
    assert harness.pool.windows.closed[-1].balancedness > 0.85


def test_the_kinds_of_traffic_that_recur_are_recognised(serving_harness, skewed):
    run_back_and_forth(serving_harness, skewed, period_s=10)
    traffic = serving_harness.pool.windows.traffic
    assert 2 <= len(traffic.kinds) <= 4
    assert traffic.num_switches > 0
    assert (
        traffic.expected(most_s=600.0, most_kinds=4, least_weight=0.01, window_s=10.0).weights.max()
        < 0.7
    )
