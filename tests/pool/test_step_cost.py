"""A pool learns what a step's time consists of, and what imbalance costs."""

import numpy as np
import pytest

from equipoise.balancer.service.status import decision_to_proto, pool_status
from equipoise.cli.live.balance import imbalance_text
from equipoise.cli.live.decisions import decisions_table
from equipoise.planning.policy import Policy
from equipoise.wire.messages import GroupLost
from equipoise.wire.plain import as_json
from tests.support.timed_fleet import FIXED_S, PER_ASSIGNMENT_S, PER_ROW_S, TimedFleet

POLICY = Policy(interval_s=2.0, min_assignments=100.0, pause=True)
"""Nothing moves: the layout stays as it is."""


@pytest.fixture
def fleet(make_harness):
    harness = make_harness(policy=POLICY)
    harness.serve()
    return TimedFleet(harness)


def windows_of_traffic(fleet, skewed, *, count, seed=0, stalls=0):
    """Windows whose traffic differs in amount and skew; a step stalls in some of them."""
    random = np.random.default_rng(seed)
    stalled = set(random.choice(count, stalls, replace=False).tolist())
    for number in range(count):
        load = skewed(1) * random.uniform(0.5, 2.0)
        load = load * random.uniform(0.0, 1.0) + load.mean(axis=1, keepdims=True)
        fleet.run(load, seconds=2, stall_s=0.04 if number in stalled else 0.0)


def imbalance_of(fleet):
    return pool_status(fleet.harness.pool, now=fleet.harness.now).imbalance


@pytest.mark.parametrize(("seed", "stalls"), [(0, 0), (1, 3), (2, 3)])
def test_known_constants_are_found_within_5_per_cent_after_20_windows(fleet, skewed, seed, stalls):
    windows_of_traffic(fleet, skewed, count=20, seed=seed, stalls=stalls)
    cost = fleet.harness.pool.windows.step_cost
    assert cost.is_known
    assert cost.num_windows == 20
    assert cost.fixed_s == pytest.approx(FIXED_S, rel=0.05)
    assert cost.per_assignment_s == pytest.approx(PER_ASSIGNMENT_S, rel=0.05)
    assert cost.per_row_s == pytest.approx(PER_ROW_S, rel=0.05)


def test_traffic_that_never_changes_shows_the_cost_by_comparing_ranks(fleet, skewed):
    load = skewed(1)
    fleet.run(load, seconds=20)
    shown = imbalance_of(fleet)
    assert shown.is_measured
    window = fleet.harness.pool.windows.latest.step
    excess = window.max_rank_load - window.mean_rank_load
    assert shown.cost_s == pytest.approx(PER_ASSIGNMENT_S * excess, rel=0.05)
    assert shown.step_s == pytest.approx(fleet.step_s(load), rel=0.03)
    assert shown.share == pytest.approx(shown.cost_s / shown.step_s)
    text = imbalance_text(shown)
    assert text.startswith(f"imbalance costs {shown.cost_s * 1e3:.3g} ± ")
    assert f" ms of {shown.step_s * 1e3:.3g} ms a step, {shown.share:.0%} (" in text
    assert as_json(shown)["is_measured"] is True


def test_too_few_windows_give_an_upper_bound_and_say_so(fleet, skewed):
    fleet.run(skewed(1), seconds=6)
    shown = imbalance_of(fleet)
    assert not shown.is_measured
    window = fleet.harness.pool.windows.latest.step
    best = 1 - window.mean_rank_load / window.max_rank_load
    assert shown.share == pytest.approx(best)
    assert shown.cost_s == pytest.approx(best * shown.step_s)
    assert shown.reason.startswith("a measurement needs 8 windows")
    assert shown.reason.endswith("and no switch; so far 3")
    assert "imbalance costs at most" in imbalance_text(shown)


def test_workers_that_report_no_step_times_show_the_best_share_only(fleet, skewed):
    fleet.harness.run_traffic(skewed(1), seconds=4)
    shown = imbalance_of(fleet)
    assert not shown.is_measured
    document = as_json(shown)
    unknown = ("step_s", "cost_s", "error_s", "expert_share", "per_assignment_s", "fixed_s")
    assert [document[name] for name in unknown] == [None] * len(unknown)
    assert shown.share == pytest.approx(1 - fleet.harness.pool.windows.latest.balancedness)
    assert shown.reason.endswith("so far 0")
    assert f"at most {shown.share:.0%} of a step" in imbalance_text(shown)


def test_a_window_without_traffic_costs_nothing(fleet):
    fleet.harness.run_traffic(np.zeros((3, 32)), seconds=2)
    assert not pool_status(fleet.harness.pool, now=fleet.harness.now).HasField("imbalance")


def test_another_epoch_learns_again(fleet, skewed):
    windows_of_traffic(fleet, skewed, count=10)
    harness = fleet.harness
    assert harness.pool.windows.step_cost is not None
    for worker in harness.ranks:
        harness.say(
            worker, GroupLost(epoch=worker.epoch, reason="a peer is gone", expert_of_slot=None)
        )
    assert harness.pool.roster.epoch == 2
    assert harness.pool.windows.step_cost is None


def test_one_rank_that_reports_false_times_changes_little(fleet, skewed):
    harness = fleet.harness
    random = np.random.default_rng(3)
    liar = harness.ranks[1]
    for _ in range(40):
        load = skewed(1) * random.uniform(0.5, 2.0)
        liar.step_us += 900_000
        fleet.run(load, seconds=1)
    cost = harness.pool.windows.step_cost
    assert cost.per_assignment_s == pytest.approx(PER_ASSIGNMENT_S, rel=0.1)


@pytest.fixture
def moving(make_harness):
    harness = make_harness(policy=Policy(interval_s=2.0, min_assignments=100.0))
    harness.serve()
    return TimedFleet(harness)


def test_a_rollout_s_predicted_step_time_stands_beside_what_it_took(moving, skewed):
    """The second rollout is predicted by what windows before it have shown."""
    for _ in range(10):
        moving.run(skewed(1), seconds=2)
    began = len(moving.harness.decisions())
    before_s = moving.step_s(skewed(2))
    moving.run(skewed(2), seconds=20)
    decisions = moving.harness.decisions()[began:]
    plan = next(one for one in decisions if one.kind == "plan" and one.accepted)
    assert plan.step_s_current == pytest.approx(before_s, rel=0.05)
    assert plan.step_s_proposed < 0.97 * plan.step_s_current
    assert plan.throughput_gain == pytest.approx(plan.step_s_current / plan.step_s_proposed - 1)
    assert f"raises throughput by {plan.throughput_gain:.1%}" in plan.reason
    outcome = next(one for one in decisions if one.kind == "outcome")
    assert outcome.accepted
    assert outcome.step_s_realised == pytest.approx(moving.step_s(skewed(2)), rel=0.05)
    assert outcome.step_s_proposed == pytest.approx(outcome.step_s_realised, rel=0.05)
    expected, took = 1e3 * outcome.step_s_proposed, 1e3 * outcome.step_s_realised
    assert f"was expected to take {expected:.3g} ms and took {took:.3g} ms" in outcome.reason
    gain = pool_status(moving.harness.pool, now=moving.harness.now).gains[0]
    assert (gain.step_s_expected, gain.step_s_realised) == (
        outcome.step_s_proposed,
        outcome.step_s_realised,
    )
    row = decisions_table([decision_to_proto(outcome)]).columns[4]
    assert next(iter(row.cells)).endswith(f"({expected:.3g} ms expected)")


def test_verdicts_weigh_moves_by_what_waves_took(moving, skewed):
    for seed in range(1, 6):
        moving.run(skewed(seed), seconds=8)
    waves = moving.harness.pool.rollouts.measured_waves(expert_bytes=2**20)
    assert len(waves) >= 3
    latest = moving.harness.pool.rollouts.switches[0]
    assert waves[0].most_bytes == latest.most_moves * 2**20
    assert waves[0].stall_s == latest.max_stall_us / 1e6
    assert 0 < latest.most_moves <= latest.moves
    accepted = [one for one in moving.harness.decisions() if one.kind == "plan" and one.accepted]
    assert "at the policy's cost of moves" in accepted[0].reason
    assert "at the cost of the latest" in accepted[-1].reason
